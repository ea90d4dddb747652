"""The base of the index kinds `bm25` and `impact`, and their search parameters.

This module imports no numba, which takes a second: recipes and command lines need only this module.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import Opener, compute_stamp
from rag_model.index.kind import IndexEntry, IndexFiles, UntrainedKind
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.quality.results import PROCESS_BYTES, ResourceEstimate

if TYPE_CHECKING:
    from rag_model.index.postings.file import PostingsFile
    from rag_model.index.postings.part import PartPostings, PartReader

# Bytes per passage for windows of terms and postings, while parts of 3,500 passages are merged.
_MERGE_BYTES = 13
_COMPILED_BYTES = 128 << 20  # memory of numba and its compiled functions; 127 MB were measured
_CARRY_BYTES = 30  # bytes of memory per passage while a previous index is carried over
# number of queries that the gate also searches without skipping, which reads every posting
EXHAUSTIVE_QUERIES = 64
# Tuned for passages of Wikipedia: Karpukhin et al. 2020, section 5; Pyserini's defaults.
K1, B = 0.9, 0.4
MAX_TERMS = 10_000  # maximum terms of a query
_PARAMETER_LIMITS = {"k1": 1_000.0, "b": 1.0}
# Capacities of the caches of decoded lists, which `estimate_decoded_bytes` counts.
MAX_CACHED_ROWS = 1 << 22  # maximum passages; larger indexes are searched by `maxscore`
MAX_CACHED_POSTINGS = 1 << 25  # maximum postings; they take 500 MB at most
SMALL_CACHE_POSTINGS = 1 << 23  # maximum postings for a few hundred queries: 126 MB at most
_DECODED_BYTES = 15  # maximum bytes per decoded posting, including windows and bits


class PostingsKind(UntrainedKind, ABC):
    """An inverted index: the postings of each part, merged as a stream.

    The bytes of the file do not depend on the division of the passages into parts. A subclass
    defines the terms and weights of a passage (`scatter`), and their scores (`open`).
    """

    suffix: ClassVar[str] = "postings"
    # small, because a search may read only a few postings of a long list
    block_bytes: ClassVar[int] = 4 << 10

    part_bytes: ClassVar[int]  # bytes of memory per passage while a part's postings are built
    piece_bytes: ClassVar[int]  # bytes per passage in the piece of a part
    max_new_passages: ClassVar[int]  # an index with more new passages is built from scratch

    @abstractmethod
    def bytes_per_passage(self, plan: IndexPlan) -> int:
        """Return the bytes of a passage in the index file."""

    def estimate(self, plan: IndexPlan, part_rows: int | None = None) -> ResourceEstimate:
        """Estimate the resources of a build, whose workers hold a part (scatter) or a batch
        (merge).
        """
        n_part_rows, index_bytes = part_rows or min(plan.n, 100_000), plan.n * self.bytes_per_passage(plan)
        bytes_by_stage = {
            "train": PROCESS_BYTES,
            "scatter": PROCESS_BYTES + _COMPILED_BYTES + n_part_rows * self.part_bytes,
            "merge": 2 * PROCESS_BYTES + plan.n * _MERGE_BYTES,
        }
        search_bytes = index_bytes + estimate_decoded_bytes(plan.n, index_bytes) + PROCESS_BYTES
        return ResourceEstimate(bytes_by_stage, search_bytes, index_bytes, index_bytes + plan.n * self.piece_bytes)

    def derive_memory_bytes(self, n: int) -> int:
        """Return the estimated bytes of memory for all rows and for the terms of new passages."""
        new_bytes = min(n, self.max_new_passages) * self.part_bytes
        return PROCESS_BYTES + _COMPILED_BYTES + n * _CARRY_BYTES + new_bytes

    @abstractmethod
    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Write the postings of a part, sorted by term, as a piece with the role `scattered`."""

    def derive(
        self,
        previous_entry: IndexEntry,
        entry: IndexEntry,
        previous_path: Path,
        previous_rows: Rows,
        read_passages: Callable[[Rows], Iterator[Any]],
        out: Path,
    ) -> IndexStats | None:
        """Derive the index file from the file of a previous snapshot; see `DerivingKind`."""
        if any(previous_entry.get(name) != entry.get(name) for name in ("factory", "settings")):
            return None
        from rag_model.index.postings.derive import derive_index  # noqa: PLC0415

        return derive_index(
            previous_path,
            previous_rows,
            lambda rows: self.build_postings(entry, read_passages(rows)),
            out,
            max_new=self.max_new_passages,
        )

    @abstractmethod
    def build_postings(self, entry: IndexEntry, batches: Iterator[Any]) -> "PartPostings":
        """Return the postings of the passages in `batches`, which are texts or weighted terms,
        depending on `represents`.
        """

    def scale(self, plan: IndexPlan, rows: Sequence[Path]) -> int:
        """Return the number of units in a weight of 1; 0 if weights are term frequencies."""
        return 0

    def build_outline(self, path: Path) -> dict[str, Any]:
        """Return the ranges that every search reads (`pinned`), and terms of the dictionary with
        their locations (`pivots`); see `RangedKind`.
        """
        from rag_model.index.postings.file import PostingsFile  # noqa: PLC0415

        file = PostingsFile(path)
        return {"pinned": [[0, file.layout.lists_offset]], "pivots": file.list_pivots()}

    def merge(
        self,
        plan: IndexPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> IndexStats:
        """Merge the postings of all parts, term by term."""
        from rag_model.index.postings.merge import merge_parts  # noqa: PLC0415

        with open_parts(plan, trained, enumerate(scattered)) as part_readers:
            n_total_rows = sum(part.n for part in part_readers)
            if n_total_rows != plan.n:
                raise InputError(f"the pieces have {n_total_rows} rows, but the plan has {plan.n}: build them again")
            return merge_parts(part_readers, out, self.scale(plan, rows))


def estimate_decoded_bytes(n: int, file_bytes: int, max_postings: int = MAX_CACHED_POSTINGS) -> int:
    """Return an upper bound of the memory for the decoded lists that a search caches.

    Args:
        n: number of passages.
        file_bytes: size of the index file, in which a posting takes about a byte.
        max_postings: capacity of the cache.
    """
    return 0 if n > MAX_CACHED_ROWS else _DECODED_BYTES * min(file_bytes, max_postings)


def open_postings(files: IndexFiles, *, mapped: bool) -> "PostingsFile":
    """Open the file of an index, of which the local disk has all or only some byte ranges.

    Raises:
        InputError: the file is missing or damaged.
    """
    from rag_model.index.postings.file import PostingsFile  # noqa: PLC0415

    files.pin_ranges()
    return PostingsFile(files.index, mapped=mapped, ranges=files.ranges, outline=files.outline)


@contextmanager
def open_parts(plan: IndexPlan, trained: Path, pieces: Iterable[tuple[int, Opener]]) -> Iterator[list["PartReader"]]:
    """Open the pieces of parts; `pieces` has their part numbers.

    Raises:
        InputError: a piece is missing, damaged or from another build.
    """
    from rag_model.index.postings.part import PartReader  # noqa: PLC0415

    with ExitStack() as stack:
        part_readers = []
        for part_number, piece in pieces:
            name = f"the scattered piece of part {part_number}"
            part_readers.append(PartReader(piece, compute_stamp(plan, trained, "scattered", part_number), name))
            stack.callback(part_readers[-1].close)
        yield part_readers


def check_bm25_parameters(parameters: Mapping[str, Any]) -> None:
    """Check search parameters: `k1` (saturation of term frequencies) and `b` (normalization by
    length).

    Raises:
        UsageError: a parameter is unknown or out of range.
    """
    for name, value in parameters.items():
        if name not in _PARAMETER_LIMITS:
            raise UsageError(f"{name} is not a search parameter of BM25: it takes {' and '.join(_PARAMETER_LIMITS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _PARAMETER_LIMITS[name]:
            raise UsageError(f"{name} of BM25 is {value!r}: give a number from 0 to {_PARAMETER_LIMITS[name]:g}")


def check_impact_parameters(parameters: Mapping[str, Any]) -> None:
    """Check search parameters: `terms`, the number of query terms that are looked up.

    Raises:
        UsageError: a parameter is unknown or out of range.
    """
    for name, parameter in parameters.items():
        if name != "terms":
            raise UsageError(f"{name} is not a search parameter of this index: it takes terms")
        if type(parameter) is not int or not 1 <= parameter <= MAX_TERMS:
            raise UsageError(f"terms is {parameter!r}: give a whole number from 1 to {MAX_TERMS:,}")
