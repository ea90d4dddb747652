"""The file of an inverted index: passage lengths, posting lists and the term dictionary, mapped for
search.

| offset | bytes | what |
| --- | --- | --- |
| 0 | 8 | `BWPOST1` and a line feed |
| 8 | 64 | eight int64: passages n, terms, postings, total length of all passages, size of the lists, size of the |
|   |    | dictionary, groups of the dictionary, scale |
| 72 | 2 n | length of each passage, uint16 |
|    |     | posting lists in the order of their terms (`lists`), and 8 zero bytes |
|    |     | term dictionary (`dictionary`) |
|    | 16 g | groups of the dictionary, int64 |

Each section begins at a multiple of 8, after zero bytes. The scale defines the weights: 0 for term
frequencies; otherwise `scale` units are a weight of 1.

The file contains only those corpus statistics that are sums over the parts: n, the postings of a
term, and the total length. The weights of BM25 are computed from them at search time. Terms
are words in UTF-8, or term numbers of an encoder's vocabulary (`part.encode_term_ids`).
"""

import mmap
import shutil
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, ResourceError
from rag_model.index.files.pieces import Array
from rag_model.index.plan import IndexStats
from rag_model.index.postings.dictionary import GROUP_TERMS, DictionaryWriter, find_terms, read_first_term
from rag_model.index.postings.packing import PADDING
from rag_model.ranges import CachedFile

MAGIC = b"BWPOST1\n"
_HEADER = struct.Struct("<8s8q")
LENGTHS_OFFSET = _HEADER.size  # offset of the passage lengths
_MAX_ROWS = 1 << 32
_PIVOT_BYTES = 16 << 10  # bytes of the dictionary between two terms of the outline
_NO_PIVOTS: dict[str, list[Any]] = {"pivots": []}
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
# Concatenated terms, and for each term its end, its number of postings and the bytes of its list.
TermBatch = tuple[npt.NDArray[np.uint8], Ints, Ints, Ints]


@dataclass(frozen=True, slots=True)
class PostingsLayout:
    """The header of the file: the sizes of its sections."""

    n: int  # number of passages
    n_terms: int
    n_postings: int
    total_length: int  # sum of the lengths of all passages
    lists_bytes: int  # bytes of the posting lists
    dictionary_bytes: int  # bytes of the dictionary
    n_groups: int
    scale: int = 0  # units in a weight of 1; 0 if weights are frequencies

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(MAGIC, *astuple(self))

    @classmethod
    def unpack(cls, file: Bytes) -> Self:
        """Read the header of a whole file.

        Raises:
            ValueError: the header is invalid, or the file has another size.
        """
        if len(file) < _HEADER.size:
            raise ValueError("the file is shorter than its header")
        magic, *layout_fields = _HEADER.unpack(file[: _HEADER.size].tobytes())
        if magic != MAGIC or min(layout_fields) < 0 or layout_fields[0] >= _MAX_ROWS:
            raise ValueError("the header is invalid")
        layout = cls(*layout_fields)
        if layout.size != len(file):
            raise ValueError("the file does not have the size that its header gives")
        return layout

    @property
    def lists_offset(self) -> int:
        """Offset of the posting lists."""
        return _align(LENGTHS_OFFSET + 2 * self.n)

    @property
    def dictionary_offset(self) -> int:
        """Offset of the dictionary."""
        return _align(self.lists_offset + self.lists_bytes + PADDING)

    @property
    def groups_offset(self) -> int:
        """Offset of the groups of the dictionary."""
        return _align(self.dictionary_offset + self.dictionary_bytes)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.groups_offset + 16 * self.n_groups


def _align(offset: int) -> int:
    return -(-offset // 8) * 8


class PostingsFile:
    """An inverted index that is open for reading.

    Its arrays are memory-mapped, or read into memory if `mapped` is false.
    """

    def __init__(
        self, path: Path, *, mapped: bool = True, ranges: CachedFile | None = None, outline: Any = None
    ) -> None:
        """Open a file.

        If only byte ranges of the file are on this disk, `ranges` loads them, and `outline` is the
        result of `build_outline` for the file.

        Raises:
            InputError: the file is missing, truncated or not an inverted index.
        """
        self.path, self._ranges = path, ranges
        try:
            pivots = (outline or _NO_PIVOTS)["pivots"]
            self._pivots = [(bytes.fromhex(term), int(group), int(offset)) for group, offset, term in pivots]
            file_bytes = _read_file_bytes(path, mapped=mapped or ranges is not None)
            layout = PostingsLayout.unpack(file_bytes)
        except FileNotFoundError as error:
            raise InputError(f"there is no index file {path}: build or pull it first") from error
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise InputError(f"{path} is not a complete inverted index: fetch or build it again") from error
        self.layout = layout
        self.lengths = file_bytes[LENGTHS_OFFSET : LENGTHS_OFFSET + 2 * layout.n].view("<u2")
        # The lists, and `PADDING` or more zero bytes after them.
        self.lists = file_bytes[layout.lists_offset : layout.dictionary_offset]
        self.dictionary = file_bytes[layout.dictionary_offset : layout.dictionary_offset + layout.dictionary_bytes]
        # (2 g,) -> (g, 2)
        self.groups = file_bytes[layout.groups_offset :].view("<i8").reshape(-1, 2)

    @property
    def mean_length(self) -> float:
        """The mean length of a passage; 1 if no passage has a term."""
        return self.layout.total_length / self.layout.n if self.layout.total_length else 1.0

    @property
    def hold_ranges(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which loaded ranges stay on the disk."""
        return nullcontext if self._ranges is None else self._ranges.cache.hold

    @property
    def is_whole(self) -> bool:
        """Whether the whole file is on the local disk."""
        return self._ranges is None

    def find_terms(self, terms: list[bytes]) -> Ints:
        """Return (t, 3): the number of postings, the start and the end of each term's list; see
        `dictionary.find_terms`.
        """
        if not self._pivots or self._ranges is None:
            return find_terms(terms, self.dictionary, self.groups, self.layout.n_terms)
        pivot_numbers = [max(0, bisect_right(self._pivots, (term, 1 << 62)) - 1) for term in terms]
        last_pivot = (b"", self.layout.n_groups, self.layout.dictionary_bytes)
        sections = [(self._pivots[i][1:], [*self._pivots, last_pivot][i + 1][1:]) for i in pivot_numbers]
        list_entries = np.zeros((len(terms), 3), np.int64)
        with self.hold_ranges():
            # (t, 2, 2): for each term, the start and the end of its section, each as a group number
            # and an offset in the dictionary.
            section_edges = np.array(sections, np.int64).reshape(-1, 2, 2)
            edge_offsets = [
                16 * section_edges[:, :, 0] + self.layout.groups_offset,
                section_edges[:, :, 1] + self.layout.dictionary_offset,
            ]
            self._ranges.load(*np.concatenate(edge_offsets).T)
            for i, ((group, _), (end_group, _)) in enumerate(sections):
                n_terms = self.layout.n_terms - GROUP_TERMS * group
                list_entries[i] = find_terms([terms[i]], self.dictionary, self.groups[group:end_group], n_terms)[0]
        return list_entries

    def load_lists(self, ranges: npt.ArrayLike) -> None:
        """Load ranges of the posting lists, (m, 2) starts and ends, inside `hold_ranges`."""
        if self._ranges is not None and len(list_ranges := self.layout.lists_offset + np.asarray(ranges, np.int64)):
            self._ranges.load(list_ranges[:, 0], list_ranges[:, 1] + PADDING)

    def load_lists_later(self, ranges: npt.ArrayLike) -> None:
        """Load ranges of the posting lists, (m, 2), in the background; see
        `RangeCache.load_later`.
        """
        if self._ranges is not None and len(bounds := self.layout.lists_offset + np.asarray(ranges, np.int64)):
            self._ranges.cache.load_later([(self._ranges, bounds[:, 0], bounds[:, 1] + PADDING)])

    def count_missing_bytes(self, begin: int, end: int) -> int:
        """Return the number of bytes to fetch to load a range of the posting lists."""
        offset = self.layout.lists_offset
        return 0 if self._ranges is None else self._ranges.count_missing_bytes(begin + offset, end + offset)

    def list_pivots(self) -> list[list[Any]]:
        """Return groups of the dictionary, about one for each 16 KiB: number, offset and term
        (hex).
        """
        pivots: list[list[Any]] = []
        for group, offset in enumerate(self.groups[:, 0].tolist()):
            if not pivots or offset >= pivots[-1][1] + _PIVOT_BYTES:
                pivots.append([group, offset, read_first_term(self.dictionary, offset).hex()])
        return pivots

    def create_content_error(self, content: str) -> InputError:
        """Return the error for a file with other content than expected."""
        return InputError(f"{self.path} is an index of {content}: fetch or build it again")

    def create_damage_error(self) -> InputError:
        """Return the error for a file with invalid bytes."""
        return InputError(f"{self.path} is damaged: fetch or build it again")


def _read_file_bytes(path: Path, *, mapped: bool) -> Bytes:
    with path.open("rb") as file:
        if mapped:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return np.frombuffer(file.read(), np.uint8)


def write_index(
    out: Path, lengths: Iterable[Array], write_lists: Callable[[Array, IO[bytes]], Iterator[TermBatch]], scale: int = 0
) -> IndexStats:
    """Write an index file.

    Args:
        out: the file.
        lengths: uint16 lengths of all passages, in row order.
        write_lists: called with the (n,) lengths of all passages, mapped, and a file; appends the
            lists of all terms to the file, in order, and yields the terms in batches.
        scale: as in `PostingsLayout`.

    Raises:
        ResourceError: the file cannot be written.
    """
    try:
        with out.open("w+b") as file:
            layout = replace(_write_body(file, lengths, write_lists), scale=scale)
            file.seek(0)
            file.write(layout.pack())
    except OSError as error:
        raise ResourceError(f"cannot write {out}: {error.strerror}") from error
    return {"rows": layout.n, "terms": layout.n_terms, "postings": layout.n_postings, "bytes": layout.size}


def _write_body(
    file: IO[bytes], lengths: Iterable[Array], write_lists: Callable[[Array, IO[bytes]], Iterator[TermBatch]]
) -> PostingsLayout:
    file.seek(LENGTHS_OFFSET)
    n, total_length, n_postings, dictionary = 0, 0, 0, DictionaryWriter()
    for part_lengths in lengths:
        n, total_length = n + len(part_lengths), total_length + int(part_lengths.sum(dtype=np.int64))
        file.write(part_lengths.tobytes())
    _pad_to_word(file)
    file.flush()
    lists_offset = file.tell()
    mapped_lengths = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "<u2", n, LENGTHS_OFFSET)
    with ExitStack() as stack:
        terms_file, groups_file = (stack.enter_context(TemporaryFile(dir=Path(file.name).parent)) for _ in range(2))
        for text, term_ends, posting_counts, list_sizes in write_lists(mapped_lengths, file):
            encoded_terms = dictionary.write_terms(text, term_ends, posting_counts, list_sizes)
            terms_file.write(encoded_terms[0])
            groups_file.write(encoded_terms[1])
            n_postings += int(posting_counts.sum())
        list_bytes = file.tell() - lists_offset
        file.write(bytes(PADDING))
        sizes_written = [_append_file(file, temporary) for temporary in (terms_file, groups_file)]
    return PostingsLayout(
        n, dictionary.n_terms, n_postings, total_length, list_bytes, sizes_written[0], sizes_written[1] // 16
    )


def _append_file(file: IO[bytes], temporary_file: IO[bytes]) -> int:
    """Append a temporary file at a multiple of 8; return its size in bytes."""
    _pad_to_word(file)
    section_bytes = temporary_file.tell()
    temporary_file.seek(0)
    shutil.copyfileobj(temporary_file, file)
    return section_bytes


def _pad_to_word(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % 8))
