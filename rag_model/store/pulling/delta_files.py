"""The file formats of deltas: packed heads, splices and new rows of weighted terms.

A *packed head* is the compressed beginning of a file. A graph's links, for example, are numbers of
four bytes, many of them -1. A packed file is a sequence of blocks: the length of a zstd frame, in
four bytes, and the frame. Each frame decodes to 4 MiB, except the last, which may be shorter.

A *splice* describes a target file as stretches of a base file and the literal bytes between them,
as rsync does. As long as an index is not trained again, its inverted lists keep the codes of
unchanged vectors in the same order, with new codes between them. So nearly the whole file is in the
base, in about ten stretches per list. A splice begins with two numbers of eight bytes: how many
steps and how many literal bytes it has. The packed rest is the steps, each with three numbers of
eight bytes (number of literal bytes, start and length of a stretch), and the literal bytes.

*New rows of weighted terms* are used instead of a splice for an inverted index of such terms,
because after the first new row, every block of its postings begins with another posting. The puller
derives the new index from its old index and these rows. The file begins with three numbers of eight
bytes: how many runs, new rows and terms of new rows there are. The packed rest is: the length of
each run of rows; for each run, its first row in the base plus 1, or 0 if its rows are new; the
number of terms of each new row; the distance of each term from the previous term; the weights. All
but the weights are split into planes: first the lowest bytes of all numbers, then the next bytes.

Source: Tridgell, Mackerras. The rsync algorithm. TR-CS-96-05, Australian National University, 1996.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rag_model.arrays import Rows, concatenate_ranges, find_runs
from rag_model.atomic_write import atomic_write
from rag_model.corpus.ragged_file import MAX_TERMS, SparseVectors, compute_offsets
from rag_model.errors import InputError

# Increase with every change of the layout: it is part of the memo key of a packed head.
PACK_VERSION = 1
_PACK_BLOCK = 4 << 20  # bytes of a block; two blocks are in memory at a time
# zstd's level 9 compresses 272 bytes of graph per passage to 28.1 bytes; this level, which is ten
# times as fast, to 29.1 bytes.
HEAD_LEVEL = 1
_DEFAULT_LEVEL = 9  # compression level of zstd
_FRAME_LENGTH = struct.Struct("<I")
# Increase with every change of the layout: it is part of the memo key of a splice.
SPLICE_VERSION = 1
# Increase with every change of the layout: it is part of the memo key of new rows of terms.
TERMS_VERSION = 1
_TERMS_HEAD = struct.Struct("<QQQ")
_WORD = np.dtype("<u4")  # type of the numbers that are split into planes
Bytes = NDArray[np.uint8]
Stretch = tuple[int, int, int]  # offset in the target, offset in the base, length
_STRIDE = 256  # bytes between two offsets of the base at which a stretch may be found
_MATCH_BYTES = 32  # bytes of a window; windows with equal hashes are compared
_MAX_OFFSETS = 4  # maximum offsets in the base with the same hash; more frequent hashes are ignored
# odd numbers that mix the four words of a window into its hash
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
# bytes whose windows are looked up at a time, in about twelve times as much memory
_WINDOW_BYTES = 1 << 20
_COPY_BYTES = 1 << 20  # maximum bytes that are copied or compared at a time
_SPLICE_HEAD = struct.Struct("<QQ")
_STEP_BYTES = 24  # bytes of a step
_STEP_BATCH = 1 << 16  # maximum number of steps that are converted to Python integers at a time
_FILTER_SHIFT = np.uint64(40)  # leaves the first 24 bits of a hash


def pack_file(file: Path, size: int, out: Path, head: bytes = b"", level: int = _DEFAULT_LEVEL) -> None:
    """Write `head` to `out`, and then the first `size` bytes of `file`, compressed in blocks.

    Raises:
        OSError: `out` cannot be written, or the file cannot be read.
    """
    zstd_codec = pa.Codec("zstd", level)
    with file.open("rb") as source, atomic_write(out) as temporary, temporary.open("wb") as packed:
        packed.write(head)
        for offset in range(0, size, _PACK_BLOCK):
            frame = zstd_codec.compress(source.read(min(_PACK_BLOCK, size - offset)), asbytes=True)
            packed.write(_FRAME_LENGTH.pack(len(frame)) + frame)


def unpack_file(packed_path: Path, size: int, out: Path, head_bytes: int = 0) -> None:
    """Decompress the `size` bytes that follow the first `head_bytes` bytes of a packed file.

    Raises:
        InputError: the file is damaged, or has another size.
        OSError: `out` cannot be written.
    """
    with packed_path.open("rb") as source, atomic_write(out) as temporary, temporary.open("wb") as file:
        source.seek(head_bytes)
        for offset in range(0, size, _PACK_BLOCK):
            file.write(_decode_block(source, min(_PACK_BLOCK, size - offset)))


def _decode_block(source: BinaryIO, n_bytes: int) -> bytes:
    try:
        (frame_length,) = _FRAME_LENGTH.unpack(source.read(_FRAME_LENGTH.size))
        frame = source.read(min(frame_length, 2 * _PACK_BLOCK))
        return bytes(pa.Codec("zstd").decompress(frame, n_bytes, asbytes=True))
    except (struct.error, OSError, ValueError, pa.ArrowException) as error:  # zstd raises OSError
        raise InputError(f"{source.name} is not a packed file ({error}): fetch the whole file") from error


def write_splice(base: Path, target: Path, out: Path, expected_stretches: Iterable[Stretch] | None = None) -> None:
    """Write a splice that turns the file `base` into `target`; both are memory-mapped.

    `expected_stretches` yields all stretches that may be equal, in the order of the target; each is
    cut at the first byte that differs. Without them, the function searches equal stretches, which
    needs about 30 MB of memory, plus 1/16 of the base's size and 1/8 of the target's size.

    Raises:
        OSError: `out` cannot be written.
    """
    base_bytes, target_bytes = map_bytes(base), map_bytes(target)
    steps, offset = [], 0
    for target_start, base_start, length in _iter_stretches(base_bytes, target_bytes, expected_stretches):
        steps.append((target_start - offset, base_start, length))
        offset = target_start + length
    steps.append((len(target_bytes) - offset, 0, 0))
    raw_path, offset = out.with_name(f"{out.name}.raw"), 0
    with raw_path.open("wb") as file:
        file.write(np.array(steps, "<i8").tobytes())
        for n_literal_bytes, _, length in steps:
            file.write(target_bytes[offset : offset + n_literal_bytes].data)
            offset += n_literal_bytes + length
    raw_bytes = raw_path.stat().st_size
    pack_file(raw_path, raw_bytes, out, _SPLICE_HEAD.pack(len(steps), raw_bytes - len(steps) * _STEP_BYTES))
    raw_path.unlink()


def apply_splice(base: Path, splice: Path, size: int, out: Path) -> None:
    """Write the file of `size` bytes that a splice describes, with stretches of `base`.

    Raises:
        InputError: the splice is damaged, or belongs to other files.
        OSError: `out` cannot be written.
    """
    message = f"{splice} does not turn {base} into a file of {size:,} bytes: fetch the whole file"
    with splice.open("rb") as file:
        head = file.read(_SPLICE_HEAD.size)
    n_steps, literal_bytes = _SPLICE_HEAD.unpack(head) if len(head) == _SPLICE_HEAD.size else (0, 0)
    if not 0 < n_steps <= size // _MATCH_BYTES + 1 or literal_bytes > size:
        raise InputError(message)
    raw_path = out.with_name("raw")
    unpack_file(splice, n_steps * _STEP_BYTES + literal_bytes, raw_path, _SPLICE_HEAD.size)
    base_bytes, raw_data = map_bytes(base), map_bytes(raw_path)
    steps = raw_data[: n_steps * _STEP_BYTES].view("<i8").reshape(-1, 3)
    _check_splice(steps, len(base_bytes), literal_bytes, size, message)
    with atomic_write(out) as temporary, temporary.open("wb") as file:
        offset = n_steps * _STEP_BYTES
        for n_literal, base_start, length in chain.from_iterable(_iter_step_batches(steps)):
            for source_bytes in (raw_data[offset : offset + n_literal], base_bytes[base_start : base_start + length]):
                for copy_start in range(0, len(source_bytes), _COPY_BYTES):
                    file.write(source_bytes[copy_start : copy_start + _COPY_BYTES].data)
            offset += n_literal


def _iter_step_batches(steps: Rows) -> Iterator[list[list[int]]]:
    return (steps[i : i + _STEP_BATCH].tolist() for i in range(0, len(steps), _STEP_BATCH))


def _check_splice(steps: Rows, base_size: int, literal_bytes: int, size: int, message: str) -> None:
    """Check that the (m, 3) `steps` read no bytes outside of the files and produce `size` bytes."""
    max_offset, literal_sum, copied_sum = max(size, base_size), 0, 0
    for batch in np.array_split(steps, range(_STEP_BATCH, len(steps), _STEP_BATCH)):
        is_inside = (batch >= 0).all() and (batch <= max_offset).all() and (batch[:, 1:].sum(axis=1) <= base_size).all()
        literal_sum += sum(batch[:, 0].tolist())  # a Python integer, since sums may exceed 64 bits
        copied_sum += sum(batch[:, 2].tolist())
        if not is_inside or literal_sum > literal_bytes or literal_sum + copied_sum > size:
            raise InputError(message)
    if literal_sum != literal_bytes or literal_sum + copied_sum != size:
        raise InputError(message)


def _iter_stretches(base: Bytes, target: Bytes, expected_stretches: Iterable[Stretch] | None) -> Iterator[Stretch]:
    """Yield equal stretches, in the order of the target."""
    if expected_stretches is not None:
        for target_start, base_start, max_length in expected_stretches:
            common_length = _measure_common_prefix(
                target[target_start : target_start + max_length],
                base[base_start : base_start + max_length],
            )
            if common_length >= _MATCH_BYTES:
                yield target_start, base_start, common_length
        return
    target_offsets, base_offsets = _find_match_candidates(base, target)
    stretch_end = match_index = 0
    while match_index < len(target_offsets):
        target_start, base_start = int(target_offsets[match_index]), int(base_offsets[match_index])
        length = _measure_common_prefix(target[target_start:], base[base_start:])
        if length >= _MATCH_BYTES:
            n_backward = _measure_common_prefix(target[stretch_end:target_start][::-1], base[:base_start][::-1])
            yield target_start - n_backward, base_start - n_backward, length + n_backward
            stretch_end = target_start + length
        match_index = int(np.searchsorted(target_offsets, max(stretch_end, target_start + 1)))


def _find_match_candidates(base: Bytes, target: Bytes) -> tuple[Rows, Rows]:
    """Find windows with equal hashes; return their ascending offsets in the target and their
    offsets in the base, (m,) each.
    """
    # preallocated, since slices in a list would keep the arrays of all hashes in memory
    base_hashes = np.empty((len(base) + _STRIDE - 1) // _STRIDE, np.uint64)
    n_hashes = 0
    for offset in _compute_window_offsets(base):
        hashes = _compute_hashes(base[offset : offset + _WINDOW_BYTES + _MATCH_BYTES])[:_WINDOW_BYTES:_STRIDE]
        base_hashes[n_hashes : n_hashes + len(hashes)] = hashes
        n_hashes += len(hashes)
    base_hashes = base_hashes[:n_hashes]
    hash_order = np.argsort(base_hashes, kind="stable")
    base_hashes = base_hashes[hash_order]
    # Bytes that occur in many places are padding, which compresses well anyway.
    hash_counts = np.searchsorted(base_hashes, base_hashes, "right") - np.searchsorted(base_hashes, base_hashes)
    is_rare = hash_counts <= _MAX_OFFSETS
    base_hashes, hash_order = base_hashes[is_rare], hash_order[is_rare]
    # Whether a base hash has these first bits: this excludes nearly all offsets of the target.
    is_possible_prefix = np.zeros(1 << 24, np.bool_)
    is_possible_prefix[base_hashes >> _FILTER_SHIFT] = True
    target_offsets, base_offsets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for offset in _compute_window_offsets(target):
        hashes = _compute_hashes(target[offset : offset + _WINDOW_BYTES + _MATCH_BYTES])[:_WINDOW_BYTES]
        likely_offsets = np.flatnonzero(is_possible_prefix[hashes >> _FILTER_SHIFT])
        nearest_positions = np.minimum(
            np.searchsorted(base_hashes, hashes[likely_offsets]), max(0, len(base_hashes) - 1)
        )
        is_equal_hash = (
            base_hashes[nearest_positions] == hashes[likely_offsets] if len(base_hashes) else np.zeros(0, np.bool_)
        )
        target_offsets.append(likely_offsets[is_equal_hash] + offset)
        base_offsets.append(hash_order[nearest_positions[is_equal_hash]] * _STRIDE)
    return np.concatenate(target_offsets), np.concatenate(base_offsets)


def _compute_window_offsets(file_data: Bytes) -> range:
    return range(0, max(1, len(file_data)), _WINDOW_BYTES)


def _compute_hashes(file_data: Bytes) -> NDArray[np.uint64]:
    """Return the (m,) hashes of all windows of `_MATCH_BYTES` bytes."""
    hashes = np.empty(max(0, len(file_data) - _MATCH_BYTES + 1), np.uint64)
    for shift in range(min(8, len(hashes))):
        words = file_data[shift : shift + (len(file_data) - shift) // 8 * 8].view("<u8")  # (w,)
        n = len(words) - 3
        hash_sums = sum(((words[i : i + n] ^ (words[i : i + n] >> 29)) * factor for i, factor in enumerate(_FACTORS)))
        hashes[shift::8] = (hash_sums ^ (hash_sums >> np.uint64(32))) * _FACTORS[0]
    return hashes


def _measure_common_prefix(one: Bytes, other: Bytes) -> int:
    common_size, offset, chunk_bytes = min(len(one), len(other)), 0, 256
    while offset < common_size:
        end = min(common_size, offset + chunk_bytes)
        if (differing_offsets := np.flatnonzero(one[offset:end] != other[offset:end])).size:
            return offset + int(differing_offsets[0])
        offset, chunk_bytes = end, min(2 * chunk_bytes, _COPY_BYTES)
    return common_size


def map_bytes(path: Path) -> Bytes:
    """Return the bytes of a file, memory-mapped."""
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)


def pack_byte_planes(numbers: Rows) -> bytes:
    """Return first the lowest bytes of all `numbers`, which are below 2^32, then the next bytes,
    and so on. This order compresses better.

    Raises:
        ValueError: a number needs more than four bytes, or is negative.
    """
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= np.iinfo(_WORD).max:
        raise ValueError("a number is negative or needs more than four bytes")
    words = numbers.astype(_WORD).view(np.uint8).reshape(-1, _WORD.itemsize)  # (m,) -> (m, 4)
    return np.ascontiguousarray(words.T).tobytes()


def unpack_byte_planes(data: bytes, n: int, offset: int) -> tuple[Rows, int]:
    """Return the `n` numbers that were packed at an offset, and the offset after them.

    Raises:
        ValueError: `data` has too few bytes.
    """
    planes = np.frombuffer(data, np.uint8, n * _WORD.itemsize, offset).reshape(_WORD.itemsize, -1)
    words = np.ascontiguousarray(planes.T).reshape(-1).view(_WORD)  # (4, m) -> (m,)
    return words.astype(np.int64), offset + n * _WORD.itemsize


def write_new_terms(base_rows: Rows, new_rows: SparseVectors, out: Path) -> None:
    """Write the weighted terms of the new rows, and the row numbers in the base of the other rows.

    Args:
        base_rows: (n,) for each row of the target, its row in the base, or -1 if it is new; the
            rows of the base ascend.
        new_rows: the weighted terms of the new rows, in order.
        out: the file to write.

    Raises:
        OSError: `out` cannot be written.
    """
    run_starts, lengths = find_runs(base_rows)
    terms, first_terms = new_rows.terms.astype(np.int64), new_rows.offsets[:-1][np.diff(new_rows.offsets) > 0]
    term_gaps = np.diff(terms, prepend=0)
    term_gaps[first_terms] = terms[first_terms]
    arrays = lengths, base_rows[run_starts] + 1, np.diff(new_rows.offsets), term_gaps
    raw_path = out.with_name(f"{out.name}.raw")
    raw_path.write_bytes(b"".join((*map(pack_byte_planes, arrays), new_rows.weights.tobytes())))
    pack_file(raw_path, raw_path.stat().st_size, out, _TERMS_HEAD.pack(len(run_starts), len(new_rows), len(terms)))
    raw_path.unlink()


def read_new_terms(path: Path, size: int) -> tuple[Rows, SparseVectors]:
    """Read the result of `write_new_terms` for an index file of `size` bytes.

    Raises:
        InputError: the file is damaged, or belongs to another index.
        OSError: the disk has too little space to unpack the file.
    """
    message = f"{path} has no new rows of an index of {size:,} bytes: fetch the whole file"
    with path.open("rb") as file:
        header = file.read(_TERMS_HEAD.size)
    n_runs, n_rows, n_terms = _TERMS_HEAD.unpack(header) if len(header) == _TERMS_HEAD.size else (size + 1, 0, 0)
    # An index has at least two bytes per passage and a bit per posting.
    if max(n_runs, n_rows) > size or n_terms > 8 * size:
        raise InputError(message)
    raw_path = path.with_name(f"{path.name}.raw")
    unpack_file(path, _WORD.itemsize * (2 * n_runs + n_rows + n_terms) + n_terms, raw_path, _TERMS_HEAD.size)
    packed_bytes, arrays, offset = raw_path.read_bytes(), list[Rows](), 0
    raw_path.unlink()
    for n_values in (n_runs, n_runs, n_rows, n_terms):
        array, offset = unpack_byte_planes(packed_bytes, n_values, offset)
        arrays.append(array)
    lengths, starts, row_lengths, term_gaps = arrays
    weights = np.frombuffer(packed_bytes, np.uint8, n_terms, offset)
    is_new, offsets = starts == 0, compute_offsets(row_lengths)
    row_starts = offsets[:-1][row_lengths > 0]
    if lengths.sum() > size or lengths[is_new].sum() != n_rows or offsets[-1] != n_terms:
        raise InputError(message)
    gap_sums = np.concatenate([[0], np.cumsum(term_gaps)])
    term_numbers = gap_sums[1:] - np.repeat(gap_sums[row_starts], row_lengths[row_lengths > 0])
    is_first_term = np.zeros(n_terms, np.bool_)
    is_first_term[row_starts] = True
    is_valid = (term_gaps > 0) | is_first_term
    if not is_valid.all() or term_numbers.max(initial=0) >= MAX_TERMS or weights.min(initial=1) < 1:
        raise InputError(message)
    base_rows = np.where(np.repeat(is_new, lengths), -1, np.repeat(starts - 1, lengths) + concatenate_ranges(lengths))
    return base_rows, SparseVectors(term_numbers.astype(np.int32), weights, offsets)
