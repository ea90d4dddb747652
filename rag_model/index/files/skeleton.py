"""The skeleton of a faiss file: every header and every count in it, read without faiss and before faiss opens it.

faiss trusts what it reads: it allocates what a count claims, maps whatever file "on disk" lists name, and searches by
ids and sizes as they are. A file from elsewhere may be hostile, so it is opened only if it is of a layout that
bookwheel builds, if each count fits the bytes that are there, and if the file ends where its last array does.

Headers, the sizes of inverted lists and the levels of a graph (`levels`) are read: twelve bytes a node, and the links
of the few above the bottom. The other arrays are checked elsewhere: faiss checks that links are nodes, `search` that
ids are rows.

Source: `faiss/impl/index_read.cpp`.
"""

import io
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rag_model.index.files.levels import check_levels, check_slots

_HEADER = "iqqqBi"  # d, n, two unused, trained, metric: behind the fourcc
_MOST_DIM = 1 << 20  # faiss's own bound
_MOST_CHAIN = 16  # transforms one after another; bookwheel writes one
_FLATS = (b"IxFI", b"IxF2", b"IxFl")
_GRAPHS = (b"IHNf", b"IHNs")  # over vectors, or over scalar codes
_LISTS = (b"IwFl", b"IwSQ", b"IwSq", b"IwPQ", b"Iwrq", b"Iwrr")
_TRANSFORMS = (b"LTra", b"rrot", b"PcAm", b"Pcam")
_SCALAR_BITS = {0: 8, 1: 4, 2: 8, 3: 4, 4: 16, 5: 8, 6: 6, 7: 16, 8: 8}  # a component, by faiss's number of the type


class ForeignError(ValueError):
    """The file is faiss's, but not of a kind that bookwheel searches."""


def check_skeleton(file: BinaryIO, size: int) -> None:
    """Check a file of `size` bytes that is open at its beginning.

    Raises:
        ForeignError: it holds a kind of index that bookwheel does not search; the message names it.
        ValueError: it is truncated, too long, or not a faiss index.
    """
    walk = _Walk(file, size)
    walk.index(_FLATS + _GRAPHS + _LISTS + (b"IxPT", b"IxRF", b"IxSQ"))
    walk.require(walk.at == size)


class _Walk:
    """A position in the file; every step moves it over one field."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.at = file, size, 0

    def require(self, good: object) -> None:
        if not good:
            raise ValueError(f"bytes that make no sense near offset {self.at:,}")

    def index(self, allowed: tuple[bytes, ...]) -> tuple[int, int]:
        """Pass over an index; return its dimensions and its number of vectors."""
        (kind,) = self._read("4s")
        if kind not in allowed:
            foreign = kind.isalnum() and kind[:1] == b"I"
            raise ForeignError(kind.decode()) if foreign else ValueError("no faiss index")
        d, n = self._header()
        self._body(kind)(kind, d, n)
        return d, n

    def _body(self, kind: bytes) -> Callable[[bytes, int, int], None]:
        if kind in _GRAPHS:
            return self._graph
        if kind in _LISTS:
            return self._lists
        return {b"IxPT": self._transformed, b"IxRF": self._refined, b"IxSQ": self._scalar}.get(kind, self._flat)

    def _header(self) -> tuple[int, int]:
        d, n, _, _, trained, metric = self._read(_HEADER)
        self.require(0 <= d <= _MOST_DIM and n >= 0 and trained in (0, 1) and metric >= 0)
        if metric > 1:
            raise ForeignError(f"metric {metric}")
        return d, n

    def _flat(self, kind: bytes, d: int, n: int) -> None:
        self.require(self._vector(4) == n * d)

    def _scalar(self, kind: bytes, d: int, n: int) -> None:
        width = self._scalar_codec(d)
        self.require(self._vector(1) == n * width)

    def _graph(self, kind: bytes, d: int, n: int) -> None:
        self._vector(8)
        slots = self._array("<i4", most=1 << 10)
        check_slots(slots, self.require)
        levels, offsets, links = self._view("<i4"), self._view("<i8"), self._view("<i4")
        self.require(len(levels) == n and len(offsets) == n + 1)
        entry, top, _, _, _ = self._read("iiiii")
        self.require(-1 <= entry < max(n, 1) and -1 <= top < len(slots) and (n == 0) == (entry < 0))
        check_levels(levels, offsets, links, slots, (entry, top), self.require)
        self.require(self.index(_FLATS if kind == b"IHNf" else (b"IxSQ",)) == (d, n))

    def _transformed(self, kind: bytes, d: int, n: int) -> None:
        (chain,) = self._read("i")
        self.require(0 <= chain <= _MOST_CHAIN)
        for _ in range(chain):
            self.require(self._transform() == d)
            d = self._wide
        self.require(self.index(_LISTS) == (d, n))

    def _transform(self) -> int:
        """Pass over a linear transform; return the dimensions that it takes, and keep those that it gives."""
        (kind,) = self._read("4s")
        if kind not in _TRANSFORMS:
            raise ForeignError(kind.decode("latin-1"))
        if kind in (b"PcAm", b"Pcam"):
            self._read("f?i" if kind == b"PcAm" else "ff?i")
            for _ in range(3):
                self._vector(4)
        (biased,) = self._read("?")
        matrix, bias = self._vector(4), self._vector(4)
        given, wide, _ = self._read("ii?")
        self.require(0 < given <= _MOST_DIM and 0 < wide <= _MOST_DIM and matrix == given * wide)
        self.require(bias == wide if biased else bias in (0, wide))
        self._wide = int(wide)
        return int(given)

    def _refined(self, kind: bytes, d: int, n: int) -> None:
        self.require(self.index((*_LISTS, b"IxPT")) == (d, n))
        self.require(self.index((*_FLATS, b"IxSQ")) == (d, n))
        (factor,) = self._read("f")
        self.require(1 <= factor < 1 << 20)

    def _lists(self, kind: bytes, d: int, n: int) -> None:
        lists, _ = self._read("QQ")
        self.require(self.index((*_FLATS, b"IHNf")) == (d, lists))
        (direct,) = self._read("b")
        self.require(direct == 0 and self._vector(8) == 0)
        width = self._codec(kind, d)
        (stored,) = self._read("4s")
        if stored != b"ilar":
            raise ForeignError(f"lists {stored.decode('latin-1')!r}")
        self.require(self._read("QQ") == (lists, width))
        self.require(self._sizes(lists) == n)
        self._skip(n * (width + 8))

    def _codec(self, kind: bytes, d: int) -> int:
        """Pass over the codec of lists; return the bytes of a code."""
        if kind == b"IwFl":
            return 4 * d
        if kind in (b"IwSQ", b"IwSq"):
            width = self._scalar_codec(d)
            self.require(self._read("Q") == (width,))
            if kind == b"IwSq":
                self._read("?")
            return width
        return self._product_codec(d) if kind == b"IwPQ" else self._bits_codec(kind, d)

    def _scalar_codec(self, d: int) -> int:
        form, _, _, wide, width = self._read("iifQQ")
        self.require(form in _SCALAR_BITS and wide == d and width == -(-_SCALAR_BITS[form] * d // 8))
        self._vector(4)
        return int(width)

    def _product_codec(self, d: int) -> int:
        _, width = self._read("?Q")
        wide, pieces, bits = self._read("QQQ")
        self.require(wide == d and 0 < pieces <= d and 0 < bits <= 16 and width == -(-pieces * bits // 8))
        self.require(self._vector(4) == d << bits)
        return int(width)

    def _bits_codec(self, kind: bytes, d: int) -> int:
        wide, width, _ = self._read("QQi")
        (bits,) = self._read("Q") if kind == b"Iwrr" else (1,)
        (again, _, kept) = self._read("Q?B")
        self.require(wide == d and width == again and 0 < bits <= 9 and kept <= 8 and 0 < width <= 8 * d + 64)
        return int(width)

    def _sizes(self, lists: int) -> int:
        """Pass over the sizes of inverted lists; return their sum."""
        (form,) = self._read("4s")
        if form == b"full":
            sizes = self._array("<u8")
            self.require(len(sizes) == lists)
        else:
            self.require(form == b"sprs")
            pairs = self._array("<u8")
            self.require(len(pairs) % 2 == 0)
            numbers, sizes = pairs[::2], pairs[1::2]  # (2 m,) -> (m,), (m,)
            self.require(bool((numbers < lists).all()) and len(np.unique(numbers)) == len(numbers))
        self.require(bool((sizes <= self._size).all()))  # so their sum does not overflow
        return int(sizes.sum())

    def _vector(self, width: int) -> int:
        """Pass over an array of `width` bytes a value; return its length."""
        (count,) = self._read("Q")
        self._skip(count * width)
        return int(count)

    def _view(self, dtype: str) -> npt.NDArray[Any]:
        """Pass over an array; return it mapped where the file is one of the disk."""
        (count,) = self._read("Q")
        start = self.at
        self._skip(count * np.dtype(dtype).itemsize)
        if not count:
            return np.empty(0, dtype)
        if isinstance(self._file, io.BytesIO):
            return np.frombuffer(self._file.getbuffer(), dtype, count, start)
        return np.memmap(self._file, dtype, "r", start, (count,))

    def _array(self, dtype: str, most: int | None = None) -> Any:
        (count,) = self._read("Q")
        start, width = self.at, np.dtype(dtype).itemsize
        self.require(most is None or count <= most)
        self._skip(count * width)
        self._file.seek(start)
        return np.frombuffer(self._file.read(count * width), dtype)

    def _skip(self, size: int) -> None:
        self.require(size <= self._size - self.at)
        self.at += size

    def _read(self, layout: str) -> tuple[Any, ...]:
        packed = struct.Struct("<" + layout.removeprefix("<"))
        start = self.at
        self._skip(packed.size)
        self._file.seek(start)
        return packed.unpack(self._file.read(packed.size))

    _wide = 0  # dimensions that the transform just passed gives
