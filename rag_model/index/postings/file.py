"""The file of an index of terms: lengths of passages, lists of postings, the dictionary of terms; mapped for search.

| offset | bytes | what |
| --- | --- | --- |
| 0 | 8 | `BWPOST1` and a line feed |
| 8 | 64 | eight int64: passages n, terms, postings, total length of all passages, size of the lists, size of the |
|   |    | dictionary, groups of the dictionary, scale |
| 72 | 2 n | length of each passage, uint16 |
|    |     | lists of the terms, in their order (`lists`), and 8 zero bytes |
|    |     | dictionary (`dictionary`) |
|    | 16 g | groups of the dictionary, int64 |

Each begins at a multiple of 8; bytes before it are 0. The scale says what weights are: 0, how often a passage holds a
term; else `scale` units are a weight of 1.

Nothing in it depends on statistics of the corpus but the three sums n, postings of a term and total length, which are
added up when parts are merged. So BM25's weights are computed when a question is asked. Terms are words in UTF-8, or
numbers of an encoder's vocabulary (`part.numbered`).
"""

import mmap
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError
from rag_model.index.postings.packing import PADDING

MAGIC = b"BWPOST1\n"
_HEADER = struct.Struct("<8s8q")
AT_LENGTHS = _HEADER.size  # where the lengths of passages begin
_MOST_ROWS = 1 << 32
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the header of a file says."""

    n: int  # passages
    terms: int
    postings: int
    total_length: int  # sum of the lengths of all passages
    lists: int  # bytes
    dictionary: int  # bytes
    groups: int
    scale: int = 0  # units in a weight of 1; 0: weights are frequencies

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(MAGIC, *astuple(self))

    @classmethod
    def unpack(cls, file: Bytes) -> Self:
        """Read the header of a whole file.

        Raises:
            ValueError: it is none, or not of a file of this size.
        """
        if len(file) < _HEADER.size:
            raise ValueError("too short")
        magic, *numbers = _HEADER.unpack(file[: _HEADER.size].tobytes())
        if magic != MAGIC or min(numbers) < 0 or numbers[0] >= _MOST_ROWS:
            raise ValueError("no header")
        layout = cls(*numbers)
        if layout.size != len(file):
            raise ValueError("truncated")
        return layout

    @property
    def at_lists(self) -> int:
        """Where the lists begin."""
        return _aligned(AT_LENGTHS + 2 * self.n)

    @property
    def at_dictionary(self) -> int:
        """Where the dictionary begins."""
        return _aligned(self.at_lists + self.lists + PADDING)

    @property
    def at_groups(self) -> int:
        """Where the groups begin."""
        return _aligned(self.at_dictionary + self.dictionary)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.at_groups + 16 * self.groups


def _aligned(place: int) -> int:
    return -(-place // 8) * 8


class PostingsFile:
    """A file that is open for reading; its arrays are mapped, or without `mapped` loaded."""

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        """Open a file.

        Raises:
            InputError: it is missing, truncated or no such file.
        """
        self.path = path
        try:
            data = _read(path, mapped=mapped)
            layout = Layout.unpack(data)
        except FileNotFoundError as missing:
            raise InputError(f"there is no index file {path}: build or pull it first") from missing
        except (OSError, ValueError) as broken:
            raise InputError(f"{path} is not a complete index of terms: fetch or build it again") from broken
        self.layout = layout
        self.lengths = data[AT_LENGTHS : AT_LENGTHS + 2 * layout.n].view("<u2")
        self.lists = data[layout.at_lists : layout.at_dictionary]  # padded
        self.dictionary = data[layout.at_dictionary : layout.at_dictionary + layout.dictionary]
        self.groups = data[layout.at_groups :].view("<i8").reshape(-1, 2)  # (2 g,) -> (g, 2)

    @property
    def mean_length(self) -> float:
        """The mean length of a passage; 1 where no passage has a term."""
        return self.layout.total_length / self.layout.n if self.layout.total_length else 1.0

    def of_another_kind(self, what: str) -> InputError:
        """Return the error of a file that holds something else."""
        return InputError(f"{self.path} is an index of {what}: fetch or build it again")

    def damaged(self) -> InputError:
        """Return the error of a file whose bytes make no sense."""
        return InputError(f"{self.path} is damaged: fetch or build it again")


def _read(path: Path, *, mapped: bool) -> Bytes:
    with path.open("rb") as file:
        if mapped:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return np.frombuffer(file.read(), np.uint8)
