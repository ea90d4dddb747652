"""Check the layout of a faiss file, every header and count, before faiss opens it.

faiss trusts what it reads: it allocates by a file's counts, maps any file that "on disk" lists
name, and uses ids and sizes as they are. A downloaded file may be hostile. So a file is opened only
if it has a layout that bookwheel builds, each count fits the bytes that exist, and the file ends
where its last array does.

The check reads headers, the sizes of inverted lists, and the levels of a graph: 12 bytes per node,
and the links of the few nodes above the bottom level. faiss itself checks that links are nodes, and
search checks that ids are rows.

Levels need the check because faiss's walk down the levels assumes that a node linked at level l has
a list at level l. If the node has no such list, faiss reads beyond its lists. Trial queries do not
detect this, because only some queries reach such a link.

Source: `faiss/impl/index_read.cpp`.
"""

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rag_model.arrays import RowLists

_BLOCK_NODES = 1 << 18  # number of nodes that are checked at once; they take a few megabytes
_MAX_LINKS = 1 << 12  # maximum slots of a node at one level; bookwheel's graphs have up to 256

Require = Callable[[object], None]  # raises an error if its argument is false
_HEADER = "iqqqBi"  # fields after the fourcc: d, n, two unused fields, is_trained, metric
MAX_DIM = 1 << 20  # faiss's own limit
_MAX_TRANSFORMS = 16  # maximum transforms in a chain; bookwheel writes one
FLAT_FOURCCS = (b"IxFI", b"IxF2", b"IxFl")
_GRAPH_FOURCCS = (b"IHNf", b"IHNs")  # HNSW over vectors, and over scalar codes
_IVF_FOURCCS = (b"IwFl", b"IwSQ", b"IwSq", b"IwPQ", b"Iwrq", b"Iwrr")
_INDEX_FOURCCS = (*FLAT_FOURCCS, *_GRAPH_FOURCCS, *_IVF_FOURCCS, b"IxPT", b"IxRF", b"IxSQ")
_TRANSFORM_FOURCCS = (b"LTra", b"rrot", b"PcAm", b"Pcam")
# Bits per component, by faiss's number of the scalar type.
_SCALAR_BITS = {0: 8, 1: 4, 2: 8, 3: 4, 4: 16, 5: 8, 6: 6, 7: 16, 8: 8}


def check_slots(slots: npt.NDArray[np.int32], require: Require) -> None:
    """Require plausible numbers of slots for links.

    `slots`, (levels + 1,): `slots[i]` is the number of a node's slots on the levels below i.
    """
    require(len(slots) > 1 and slots[0] == 0)
    slot_counts = np.diff(slots.astype(np.int64))
    require(bool(((slot_counts > 0) & (slot_counts <= _MAX_LINKS)).all()))


def check_levels(
    levels: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    links: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    walk_from: tuple[int, int],
    require: Require,
) -> None:
    """Require that each node has the slots of its levels, and that links of a level lead only to
    nodes of that level.

    Memory holds 2 bytes per node, and 16 per node above the bottom level.

    Args:
        levels: (n,) counted from 1, possibly mapped.
        offsets: (n + 1,) the start of each node's slots.
        links: the links of all nodes and levels, -1 where empty.
        slots: (levels + 1,) number of a node's slots below each level, as for `check_slots`.
        walk_from: the entry point and its level, counted from 0.
        require: raises an error if its argument is false.
    """
    node_levels, level_ends = np.empty(len(levels), np.int16), slots.astype(np.int64)
    upper_nodes, start_arrays = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    require(offsets[0] == 0 and offsets[-1] == len(links))
    for first_node in range(0, len(levels), _BLOCK_NODES):
        block_levels = levels[first_node : first_node + _BLOCK_NODES]
        require(block_levels.min() >= 1 and block_levels.max() < len(slots))
        node_levels[first_node : first_node + _BLOCK_NODES] = block_levels
        first_slots = offsets[first_node : first_node + _BLOCK_NODES + 1]
        require(bool((np.diff(first_slots) == level_ends[block_levels]).all()))
        high_positions = np.flatnonzero(block_levels > 1)
        upper_nodes.append(first_node + high_positions)
        start_arrays.append(np.asarray(first_slots[high_positions]))
    entry_point, top_level = walk_from
    require(entry_point < 0 or node_levels[entry_point] == top_level + 1)
    for level, targets in _iter_upper_links(
        node_levels, links, level_ends, np.concatenate(upper_nodes), np.concatenate(start_arrays)
    ):
        linked_nodes = targets[targets >= 0]
        require(bool((linked_nodes < len(node_levels)).all()) and bool((node_levels[linked_nodes] > level).all()))


def _iter_upper_links(
    node_levels: npt.NDArray[np.int16], links: npt.NDArray[np.int32], level_ends: Any, nodes: Any, node_starts: Any
) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """Yield each level above the bottom, once for each block of its nodes, with their links."""
    top_level = int(node_levels[nodes].max(initial=0))
    for level in range(1, top_level):
        first_slots = node_starts[node_levels[nodes] > level] + level_ends[level]  # (u,)
        slot_offsets = np.arange(level_ends[level + 1] - level_ends[level])
        for i in range(0, len(first_slots), _BLOCK_NODES // 16):
            # (b, 1) + (w,) -> (b, w)
            yield level, links[first_slots[i : i + _BLOCK_NODES // 16, None] + slot_offsets]


class UnsupportedIndexError(ValueError):
    """A faiss file of a type that bookwheel does not search."""


def check_layout(file: BinaryIO, size: int) -> None:
    """Check a file of `size` bytes that is open at its beginning.

    Raises:
        UnsupportedIndexError: bookwheel does not search this type of index; the message names it.
        ValueError: the file is truncated, too long, or not a faiss index.
    """
    reader = _LayoutReader(file, size)
    reader.read_index(_INDEX_FOURCCS)
    reader.require(reader.offset == size)


def find_row_lists(path: Path) -> RowLists | None:
    """Return the lists of row numbers in a file: a graph's bottom links, or inverted lists.

    Returns None if the file is not a faiss file of a type that bookwheel builds.
    """
    with path.open("rb") as file, suppress(ValueError, struct.error):
        reader = _LayoutReader(file, path.stat().st_size)
        reader.read_index(_INDEX_FOURCCS)
        return reader.locate_lists() if reader.locate_lists else None
    return None


def _locate_links(start_byte: int, n_links: int, offsets: npt.NDArray[np.int64]) -> RowLists:
    return RowLists(start_byte, "<i4", 0, True, np.full(len(offsets) - 1, n_links), 4 * (np.diff(offsets) - n_links))


def _locate_inverted_lists(start_byte: int, code_bytes: int, n_lists: int, list_numbers: Any, sizes: Any) -> RowLists:
    list_lengths = np.zeros(n_lists, np.int64)
    list_lengths[list_numbers] = sizes
    return RowLists(start_byte, "<i8", code_bytes, False, list_lengths, np.zeros(n_lists, np.int64))


class _LayoutReader:
    """Reads a faiss file field by field, checks each field, and remembers its position."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.offset = file, size, 0
        # Returns the row lists of the outermost index that was read; None if it has none.
        self.locate_lists: Callable[[], RowLists] | None = None

    def require(self, condition: object) -> None:
        if not condition:
            raise ValueError(f"invalid bytes near offset {self.offset:,}")

    def read_index(self, allowed_fourccs: tuple[bytes, ...]) -> tuple[int, int]:
        """Read past an index; return its dimensions and its number of vectors."""
        (fourcc,) = self._read_struct("4s")
        if fourcc not in allowed_fourccs:
            is_faiss_index = fourcc.isalnum() and fourcc[:1] == b"I"
            raise UnsupportedIndexError(fourcc.decode()) if is_faiss_index else ValueError("no faiss index")
        d, n = self._read_index_header()
        self._get_reader(fourcc)(fourcc, d, n)
        return d, n

    def _get_reader(self, fourcc: bytes) -> Callable[[bytes, int, int], None]:
        if fourcc in _GRAPH_FOURCCS:
            return self._read_graph_index
        if fourcc in _IVF_FOURCCS:
            return self._read_ivf_index
        return {
            b"IxPT": self._read_pretransform_index,
            b"IxRF": self._read_refine_index,
            b"IxSQ": self._read_scalar_index,
        }.get(fourcc, self._read_flat_index)

    def _read_index_header(self) -> tuple[int, int]:
        d, n, _, _, is_trained, metric_code = self._read_struct(_HEADER)
        self.require(0 <= d <= MAX_DIM and n >= 0 and is_trained in (0, 1) and metric_code >= 0)
        if metric_code > 1:
            raise UnsupportedIndexError(f"metric {metric_code}")
        return d, n

    def _read_flat_index(self, fourcc: bytes, d: int, n: int) -> None:
        self.require(self._skip_array(4) == n * d)

    def _read_scalar_index(self, fourcc: bytes, d: int, n: int) -> None:
        code_bytes = self._read_scalar_codec(d)
        self.require(self._skip_array(1) == n * code_bytes)

    def _read_graph_index(self, fourcc: bytes, d: int, n: int) -> None:
        self._skip_array(8)
        slots = self._read_array("<i4", max_count=1 << 10)
        check_slots(slots, self.require)
        levels, offsets, links = self._map_array("<i4"), self._map_array("<i8"), self._map_array("<i4")
        self.require(len(levels) == n and len(offsets) == n + 1)
        self.locate_lists = partial(_locate_links, self.offset - links.nbytes, int(slots[1]), offsets)
        entry_point, top_level, _, _, _ = self._read_struct("iiiii")
        self.require(-1 <= entry_point < max(n, 1) and -1 <= top_level < len(slots) and (n == 0) == (entry_point < 0))
        check_levels(levels, offsets, links, slots, (entry_point, top_level), self.require)
        self.require(self.read_index(FLAT_FOURCCS if fourcc == b"IHNf" else (b"IxSQ",)) == (d, n))

    def _read_pretransform_index(self, fourcc: bytes, d: int, n: int) -> None:
        (n_transforms,) = self._read_struct("i")
        self.require(0 <= n_transforms <= _MAX_TRANSFORMS)
        for _ in range(n_transforms):
            in_dim, out_dim = self._read_transform()
            self.require(in_dim == d)
            d = out_dim
        self.require(self.read_index(_IVF_FOURCCS) == (d, n))

    def _read_transform(self) -> tuple[int, int]:
        """Read past a linear transform; return its input and output dimensions."""
        (fourcc,) = self._read_struct("4s")
        if fourcc not in _TRANSFORM_FOURCCS:
            raise UnsupportedIndexError(fourcc.decode("latin-1"))
        if fourcc in (b"PcAm", b"Pcam"):
            self._read_struct("f?i" if fourcc == b"PcAm" else "ff?i")
            for _ in range(3):
                self._skip_array(4)
        (has_bias,) = self._read_struct("?")
        matrix_size, bias_size = self._skip_array(4), self._skip_array(4)
        in_dim, out_dim, _ = self._read_struct("ii?")
        self.require(0 < in_dim <= MAX_DIM and 0 < out_dim <= MAX_DIM and matrix_size == in_dim * out_dim)
        self.require(bias_size == out_dim if has_bias else bias_size in (0, out_dim))
        return int(in_dim), int(out_dim)

    def _read_refine_index(self, fourcc: bytes, d: int, n: int) -> None:
        self.require(self.read_index((*_IVF_FOURCCS, b"IxPT")) == (d, n))
        self.require(self.read_index((*FLAT_FOURCCS, b"IxSQ")) == (d, n))
        (refine_factor,) = self._read_struct("f")
        self.require(1 <= refine_factor < 1 << 20)

    def _read_ivf_index(self, fourcc: bytes, d: int, n: int) -> None:
        n_lists, _ = self._read_struct("QQ")
        self.require(self.read_index((*FLAT_FOURCCS, b"IHNf")) == (d, n_lists))
        (direct_map_type,) = self._read_struct("b")
        if direct_map_type in (1, 2):
            raise UnsupportedIndexError(f"{fourcc.decode()} with a direct map")
        self.require(direct_map_type == 0 and self._skip_array(8) == 0)
        code_bytes = self._read_codec(fourcc, d)
        (storage_fourcc,) = self._read_struct("4s")
        if storage_fourcc != b"ilar":
            raise UnsupportedIndexError(f"lists {storage_fourcc.decode('latin-1')!r}")
        self.require(self._read_struct("QQ") == (n_lists, code_bytes))
        list_numbers, list_sizes = self._read_sizes(n_lists)
        self.require(list_sizes.sum() == n)
        self.locate_lists = partial(_locate_inverted_lists, self.offset, code_bytes, n_lists, list_numbers, list_sizes)
        self._skip_bytes(n * (code_bytes + 8))

    def _read_codec(self, fourcc: bytes, d: int) -> int:
        """Read past the codec of lists; return the bytes per code."""
        if fourcc == b"IwFl":
            return 4 * d
        if fourcc in (b"IwSQ", b"IwSq"):
            code_bytes = self._read_scalar_codec(d)
            self.require(self._read_struct("Q") == (code_bytes,))
            if fourcc == b"IwSq":
                self._read_struct("?")
            return code_bytes
        return self._read_product_codec(d) if fourcc == b"IwPQ" else self._read_rabitq_codec(fourcc, d)

    def _read_scalar_codec(self, d: int) -> int:
        scalar_type, _, _, code_dim, code_bytes = self._read_struct("iifQQ")
        self.require(scalar_type in _SCALAR_BITS and code_dim == d)
        self.require(code_bytes == -(-_SCALAR_BITS[scalar_type] * d // 8))
        self._skip_array(4)
        return int(code_bytes)

    def _read_product_codec(self, d: int) -> int:
        _, code_bytes = self._read_struct("?Q")
        code_dim, n_pieces, bits = self._read_struct("QQQ")
        self.require(code_dim == d and 0 < n_pieces <= d and 0 < bits <= 16 and code_bytes == -(-n_pieces * bits // 8))
        self.require(self._skip_array(4) == d << bits)
        return int(code_bytes)

    def _read_rabitq_codec(self, fourcc: bytes, d: int) -> int:
        code_dim, code_bytes, _ = self._read_struct("QQi")
        (bits,) = self._read_struct("Q") if fourcc == b"Iwrr" else (1,)
        list_code_bytes, _, query_bits = self._read_struct("Q?B")
        self.require(code_dim == d and 0 < bits <= 9 and query_bits <= 8)
        self.require(code_bytes == list_code_bytes and 0 < code_bytes <= 8 * d + 64)
        return int(code_bytes)

    def _read_sizes(self, n_lists: int) -> tuple[Any, Any]:
        """Read the sizes of the inverted lists; return the list numbers and the sizes."""
        (sizes_fourcc,) = self._read_struct("4s")
        if sizes_fourcc == b"full":
            list_sizes = self._read_array("<u8")
            self.require(len(list_sizes) == n_lists)
            list_numbers = slice(None)
        else:
            self.require(sizes_fourcc == b"sprs")
            size_pairs = self._read_array("<u8")
            self.require(len(size_pairs) % 2 == 0)
            list_numbers, list_sizes = size_pairs[::2], size_pairs[1::2]  # (2 m,) -> (m,), (m,)
            self.require(bool((list_numbers < n_lists).all()) and len(np.unique(list_numbers)) == len(list_numbers))
        # With this bound, the sum of the sizes does not overflow.
        self.require(bool((list_sizes <= self._size).all()))
        return list_numbers, list_sizes

    def _skip_array(self, value_bytes: int) -> int:
        """Skip an array of `value_bytes` per value; return its length."""
        (n_values,) = self._read_struct("Q")
        self._skip_bytes(n_values * value_bytes)
        return int(n_values)

    def _map_array(self, dtype: str) -> npt.NDArray[Any]:
        """Skip an array; return it memory-mapped if the file is on disk."""
        (n_values,) = self._read_struct("Q")
        start_byte = self.offset
        self._skip_bytes(n_values * np.dtype(dtype).itemsize)
        if not n_values:
            return np.empty(0, dtype)
        if isinstance(self._file, io.BytesIO):
            return np.frombuffer(self._file.getbuffer(), dtype, n_values, start_byte)
        return np.memmap(self._file, dtype, "r", start_byte, (n_values,))

    def _read_array(self, dtype: str, max_count: int | None = None) -> Any:
        (n_values,) = self._read_struct("Q")
        start_byte, value_bytes = self.offset, np.dtype(dtype).itemsize
        self.require(max_count is None or n_values <= max_count)
        self._skip_bytes(n_values * value_bytes)
        self._file.seek(start_byte)
        return np.frombuffer(self._file.read(n_values * value_bytes), dtype)

    def _skip_bytes(self, n_bytes: int) -> None:
        self.require(n_bytes <= self._size - self.offset)
        self.offset += n_bytes

    def _read_struct(self, layout: str) -> tuple[Any, ...]:
        field_struct = struct.Struct("<" + layout.removeprefix("<"))
        start_byte = self.offset
        self._skip_bytes(field_struct.size)
        self._file.seek(start_byte)
        return field_struct.unpack(self._file.read(field_struct.size))
