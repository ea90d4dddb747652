"""Deltas of files with lists of row numbers: the links of a graph, and inverted lists.

A deleted or inserted passage shifts the row numbers of all later passages, so nearly every number
in such a file changes although few lists do. A *row delta* stores for each row of the target which
row of the base it was. Renumbering the base's lists with this mapping *predicts* the target's
lists. The delta then stores only the differences from the prediction: the inserted numbers with
their slots, and the removed numbers. A list keeps the order of its numbers. A predicted number is
dropped if its list has no slot left for it.

The bytes between and around the lists are stored as a splice (`delta_files`). A row delta consists
of the splice, a compressed block with the head and the arrays, and their sizes. An array stores the
lowest bytes of all its numbers first and the highest last, because most of the highest are zero.

A delta contains no data of rows that the target file does not have.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from rag_model.arrays import RowLists, Rows, concatenated_ranges, find_runs
from rag_model.atomic_write import atomic_write
from rag_model.errors import InputError
from rag_model.store.pulling.delta_files import (
    apply_splice,
    map_bytes,
    pack_planes,
    unpack_file,
    unpack_planes,
    write_packed,
    write_splice,
)
from rag_model.untrusted_text import parse_json

# Increase with every change of the layout: it is part of the memo key.
VERSION = 1
# Sizes of the splice, of the head with the arrays, and of the bytes outside of each file's lists.
_SIZES = struct.Struct("<QQQQ")
_HEAD = struct.Struct("<I")  # number of bytes of the head
_MAX_HEAD = 1 << 12  # bytes
# bytes of lists that are processed at once; the memory is about 24 times as much
_BLOCK_BYTES = 1 << 20
Bools = NDArray[np.bool_]
Numbers = NDArray[Any]  # rows, or the positions of lists; four or eight bytes each
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileWithLists:
    """The first `size` bytes of a file, and the lists of row numbers in them."""

    path: Path
    lists: RowLists
    size: int

    def write_rest(self, out: Path) -> int:
        """Write the bytes outside of the lists, and return their number."""
        numbers, data = np.flatnonzero(self.lists.gaps), map_bytes(self.path).data
        ends, gaps = self.lists.starts[numbers + 1].tolist(), self.lists.gaps[numbers].tolist()
        with out.open("wb") as file:
            file.write(data[: self.lists.start])
            file.writelines(data[end - gap : end] for end, gap in zip(ends, gaps, strict=True))
            file.write(data[self.lists.end : max(self.lists.end, self.size)])
            return file.tell()


@dataclass(frozen=True, slots=True)
class _Edits:
    """The differences between the target's lists and the predicted ones."""

    inserted_slots: Rows  # (i,) ascending positions among the slots of all lists
    inserted_rows: Rows  # (i,) row numbers; -1 for an empty slot that precedes a filled one
    removed: Rows  # (r,) ascending positions among the predicted numbers of all lists
    codes: Bytes  # (i, code_bytes) codes of the inserted slots

    @classmethod
    def concatenate(cls, edits: Sequence[Self], code_bytes: int) -> Self:
        """Join the edits of consecutive blocks."""
        no_rows, no_codes = np.zeros(0, np.int64), np.zeros((0, code_bytes), np.uint8)
        return cls(
            *(
                np.concatenate([start, *(getattr(part, name) for part in edits)])
                for name, start in zip(cls.__slots__, (no_rows, no_rows, no_rows, no_codes), strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive lists of the target, and the numbers that are predicted for them."""

    first: int
    last: int
    lengths: Rows  # (m,) number of slots of each list
    slot_lists: Numbers  # (s,) list number of each slot, from 0
    predicted: Numbers  # (p,) predicted row numbers, in the order of the lists
    lists: Numbers  # (p,) list number of each predicted number, from 0
    codes: Bytes  # (p, code_bytes) code of each predicted number

    def select(self, slots: Bools, predicted: Bools) -> "_Block":
        """Return the block with only the slots and predicted numbers that the masks select."""
        return replace(
            self,
            slot_lists=self.slot_lists[slots],
            predicted=self.predicted[predicted],
            lists=self.lists[predicted],
            codes=self.codes[predicted],
        )

    def place(self, inserted: Bools, removed: Bools) -> tuple[Bools, Bools]:
        """Return masks of the slots that get a predicted number, and of the numbers that get a slot.

        The numbers fill the slots in order. `inserted`, (s,), masks the slots that are taken, and
        `removed`, (p,), the numbers that are not used.
        """
        count = len(self.lengths)
        number_counts = np.bincount(self.lists[~removed], minlength=count)
        slot_counts = np.bincount(self.slot_lists[~inserted], minlength=count)
        is_filled, is_placed = np.zeros_like(inserted), np.zeros_like(removed)
        is_filled[~inserted] = concatenated_ranges(slot_counts) < np.repeat(number_counts, slot_counts)
        is_placed[~removed] = concatenated_ranges(number_counts) < np.repeat(slot_counts, number_counts)
        return is_filled, is_placed


class _Prediction:
    """Predicts the lists of a target from those of a base file, by renumbering their rows."""

    def __init__(self, file: BinaryIO, base: RowLists, target: RowLists, base_rows: Rows) -> None:
        """Predict the lists of `target` from those in `file`.

        Raises:
            ValueError: the files cannot be compared.
        """
        present = base_rows[base_rows >= 0]
        base_count = len(base.lengths) if base.by_row else int(base.lengths.sum())
        row_count = len(target.lengths) if target.by_row else int(target.lengths.sum())
        if (base.by_row, base.dtype, base.code_bytes) != (target.by_row, target.dtype, target.code_bytes):
            raise ValueError("their lists are of different types")
        if row_count != len(base_rows) or not (base.by_row or len(base.lengths) == len(target.lengths)):
            raise ValueError("the numbers of rows or lists differ")
        if len(present) and (present[-1] >= base_count or (np.diff(present) <= 0).any()):
            raise ValueError("the rows of the base do not ascend, or are not in the base")
        self.target, self.row_count, self.is_new = target, row_count, np.append(base_rows < 0, False)
        self._reader, self._base = _ListReader(file, base), base
        # the last item is for empty slots
        self._target_rows = np.full(base_count + 1, -1, target.dtype)
        self._target_rows[present] = np.flatnonzero(base_rows >= 0)
        self._base_lists = base_rows if base.by_row else np.arange(len(base.lengths))

    def iter_blocks(self) -> Iterator[_Block]:
        """Yield the lists of the target in order."""
        starts, first = self.target.starts, 0
        while first < len(self.target.lengths):
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK_BYTES, "right")) - 1)
            lengths = self.target.lengths[first:last]
            slot_lists = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            yield _Block(first, last, lengths, slot_lists, *self._predict(first, last))
            first = last

    def _predict(self, first: int, last: int) -> tuple[Numbers, Numbers, Bytes]:
        base_lists = self._base_lists[first:last]
        present = np.flatnonzero(base_lists >= 0)
        numbers = base_lists[present]
        low, high = (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)
        slots, codes = self._reader.read(low, high)
        if len(numbers) < high - low:
            is_chosen = np.zeros(high - low, np.bool_)
            is_chosen[numbers - low] = True
            chosen_slots = np.repeat(is_chosen, self._base.lengths[low:high])
            slots, codes = slots[chosen_slots], codes[chosen_slots]
        if len(slots) and not -1 <= slots.min() <= slots.max() < len(self._target_rows) - 1:
            raise ValueError("a list of the base has a row that the base does not have")
        rows = self._target_rows.take(slots)
        is_live = np.flatnonzero(rows >= 0)
        lists = np.repeat(present.astype(np.int32), self._base.lengths[numbers])
        return rows.take(is_live), lists.take(is_live), codes[is_live]


class _ListReader:
    """Reads lists of row numbers from a file."""

    def __init__(self, file: BinaryIO, lists: RowLists) -> None:
        """Read the lists that are located in `file`."""
        self._file, self._lists = file, lists

    def read(self, first: int, last: int) -> tuple[Numbers, Bytes]:
        """Return the slots of lists [first, last) and their codes, (s,) and (s, code_bytes)."""
        lists = self._lists
        start, end = int(lists.starts[first]), int(lists.starts[last])
        self._file.seek(start)
        data = np.frombuffer(self._file.read(end - start), np.uint8)
        if len(data) != end - start:
            raise ValueError("the file is cut short")
        lengths, gaps, dtype = lists.lengths[first:last], lists.gaps[first:last], np.dtype(lists.dtype)
        if not lists.code_bytes:
            slots = data.view(dtype)
            if gaps.any():
                slots = slots[_mask_slots(lengths, gaps // dtype.itemsize)]
            return slots, np.zeros((len(slots), 0), np.uint8)
        slots, codes = np.empty(int(lengths.sum()), dtype), np.empty((int(lengths.sum()), lists.code_bytes), np.uint8)
        done = 0
        for begin, length in zip((lists.starts[first:last] - start).tolist(), lengths.tolist(), strict=True):
            middle = begin + length * lists.code_bytes
            codes[done : done + length] = data[begin:middle].reshape(length, lists.code_bytes)
            slots[done : done + length] = np.frombuffer(data[middle : begin + length * lists.slot_bytes], dtype)
            done += length
        return slots, codes


def _mask_slots(lengths: Rows, gaps: Rows) -> Bools:
    """Return a mask that is True for slots and False for gaps; each list is followed by its gap."""
    counts = np.stack([lengths, gaps], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(lengths)), counts)


def write_row_delta(base: FileWithLists, target: FileWithLists, base_rows: Rows, out: Path) -> None:
    """Write the delta from one file to another.

    Needs about 40 bytes of memory for each row and each list.

    Args:
        base: the file of the previous snapshot.
        target: the file that the delta produces.
        base_rows: (n,) the base's row of each row of the target, ascending, or -1.
        out: the file to write.

    Raises:
        InputError: the lists of the files cannot be compared.
        OSError: `out` cannot be written.
    """
    rest_paths = [out.with_name(f"{out.name}.{name}") for name in ("base", "target")]
    splice, arrays = (out.with_name(f"{out.name}.{name}") for name in ("splice", "arrays"))
    base.write_rest(rest_paths[0])
    target.write_rest(rest_paths[1])
    write_splice(rest_paths[0], rest_paths[1], splice)
    try:
        with base.path.open("rb") as base_file, target.path.open("rb") as target_file:
            prediction = _Prediction(base_file, base.lists, target.lists, base_rows)
            reader = _ListReader(target_file, target.lists)
            blocks = prediction.iter_blocks()
            edits = _collect_edits(prediction, ((block, *reader.read(block.first, block.last)) for block in blocks))
        _write_arrays(arrays, base.lists, target.lists, base_rows, edits)
    except (ValueError, IndexError) as error:
        raise InputError(f"{target.path} cannot be compared with {base.path}: {error}") from error
    sizes = [path.stat().st_size for path in (splice, arrays, *rest_paths)]
    write_packed(arrays, sizes[1], out, splice.read_bytes())
    with out.open("ab") as file:
        file.write(_SIZES.pack(*sizes))


def _collect_edits(prediction: _Prediction, blocks: Iterator[tuple[_Block, Numbers, Bytes]]) -> _Edits:
    edits, slot_count, predicted_count = list[_Edits](), 0, 0
    for block, slots, codes in blocks:
        inserted, removed = _compare(block, slots, codes, prediction.is_new)
        inserted_slots = np.flatnonzero(inserted)
        edits.append(
            _Edits(
                inserted_slots + slot_count,
                slots[inserted_slots].astype(np.int64),
                np.flatnonzero(removed) + predicted_count,
                codes[inserted_slots],
            )
        )
        slot_count, predicted_count = slot_count + len(slots), predicted_count + len(block.predicted)
    return _Edits.concatenate(edits, prediction.target.code_bytes)


def _compare(block: _Block, slots: Numbers, codes: Bytes, is_new: Bools) -> tuple[Bools, Bools]:
    """Return masks of the inserted slots, (s,), and of the removed predicted numbers, (p,)."""
    is_changed = _find_changed_lists(block, slots, codes)
    in_changed, predicted_in_changed = is_changed.take(block.slot_lists), is_changed.take(block.lists)
    inserted, removed = np.zeros_like(in_changed), np.zeros_like(predicted_in_changed)
    if is_changed.any():
        inserted[in_changed], removed[predicted_in_changed] = _find_edits(
            block.select(in_changed, predicted_in_changed), slots[in_changed], codes[in_changed], is_new
        )
    return inserted, removed


def _find_changed_lists(block: _Block, slots: Numbers, codes: Bytes) -> Bools:
    """Return a mask of the lists that differ from the predicted ones: (m,). In a graph they are
    few.
    """
    edges = np.arange(len(block.lengths) + 1, dtype=np.int32)
    is_filled = slots >= 0
    filled_lists = block.slot_lists[is_filled]
    counts, predicted_counts = (np.diff(np.searchsorted(lists, edges)) for lists in (filled_lists, block.lists))
    is_changed: Bools = counts != predicted_counts
    same, predicted_same = ~is_changed.take(filled_lists), ~is_changed.take(block.lists)
    differs = slots[is_filled][same] != block.predicted[predicted_same]
    if codes.shape[1]:
        differs |= (codes[is_filled][same] != block.codes[predicted_same]).any(axis=1)
    is_changed[filled_lists[same][differs]] = True
    last_filled = block.slot_lists[1:][is_filled[1:] & ~is_filled[:-1] & (np.diff(block.slot_lists) == 0)]
    is_changed[last_filled] = True  # an empty slot precedes another one
    return is_changed


def _find_edits(block: _Block, slots: Numbers, codes: Bytes, is_new: Bools) -> tuple[Bools, Bools]:
    """Return masks of the inserted slots and of the removed predicted numbers of changed lists.

    In most of these lists only new rows are inserted, and nothing is removed, so that is tried first.
    """
    inserted, removed = is_new[slots] & (slots >= 0), np.zeros(len(block.predicted), np.bool_)
    is_wrong = _find_wrong_lists(block, slots, inserted, removed)
    if is_wrong.any():
        in_wrong, predicted_in_wrong = np.flatnonzero(is_wrong[block.slot_lists]), np.flatnonzero(is_wrong[block.lists])
        keys = _pair_with_lists(block.slot_lists[in_wrong], slots[in_wrong], len(is_new))
        predicted_keys = _pair_with_lists(
            block.lists[predicted_in_wrong], block.predicted[predicted_in_wrong], len(is_new)
        )
        is_predicted, is_present = _match_values(keys, predicted_keys)
        inserted[in_wrong] = ~is_predicted & (slots[in_wrong] >= 0)
        removed[predicted_in_wrong] = ~is_present
        # Lists with another order or with repeated numbers are stored as a whole.
        is_wrong = _find_wrong_lists(block, slots, inserted, removed)
        inserted |= is_wrong[block.slot_lists]
        removed |= is_wrong[block.lists]
    if codes.shape[1]:
        filled, placed = block.place(inserted, removed)
        differs = (codes[filled] != block.codes[placed]).any(axis=1)
        inserted[np.flatnonzero(filled)[differs]] = True
        removed[np.flatnonzero(placed)[differs]] = True
    return inserted, removed


def _pair_with_lists(lists: Numbers, rows: Numbers, row_count: int) -> Rows:
    """Return one unique number for each pair of a list and a row; a row may be -1."""
    numbers: Rows = lists.astype(np.int64) * row_count + rows + 1
    return numbers


def _match_values(values: Rows, others: Rows) -> tuple[Bools, Bools]:
    """Return a mask of the values that occur in `others`, and one of the others that occur in
    `values`.

    Of equal others only the first one is marked.
    """
    order = np.argsort(others)
    sorted_others = np.append(others[order], np.iinfo(np.int64).max)
    positions = np.searchsorted(sorted_others, values)
    is_in_others: Bools = sorted_others[positions] == values
    is_in_values = np.zeros(len(others), np.bool_)
    is_in_values[order[positions[is_in_others]]] = True
    return is_in_others, is_in_values


def _find_wrong_lists(block: _Block, slots: Numbers, inserted: Bools, removed: Bools) -> Bools:
    """Return a mask of the lists that these edits would not reproduce: (m,)."""
    is_wrong = np.zeros(len(block.lengths), np.bool_)
    filled, placed = block.place(inserted, removed)
    is_wrong[block.slot_lists[filled != (~inserted & (slots >= 0))]] = True
    is_wrong[block.slot_lists[filled][slots[filled] != block.predicted[placed]]] = True
    return is_wrong


def _write_arrays(path: Path, base: RowLists, target: RowLists, base_rows: Rows, edits: _Edits) -> None:
    run_starts, run_lengths = find_runs(base_rows)
    # New rows come first, because most of the inserted numbers are new rows.
    order = np.argsort(base_rows >= 0, kind="stable")
    ranks = np.empty(len(order) + 1, np.int64)
    ranks[order], ranks[-1] = np.arange(len(order)), len(order)
    arrays = [
        *(array for lists in (base, target) for array in (lists.lengths, lists.gaps)),
        run_lengths,
        base_rows[run_starts] + 1,
        np.diff(edits.inserted_slots, prepend=0),
        ranks[edits.inserted_rows],
        np.diff(edits.removed, prepend=0),
    ]
    head = json.dumps(
        {
            "starts": [base.start, target.start],
            "lists": [target.dtype, target.code_bytes, target.by_row],
            "counts": [len(array) for array in arrays],
        }
    ).encode()
    with path.open("wb") as file:
        file.write(_HEAD.pack(len(head)) + head)
        for array in arrays:
            file.write(pack_planes(array))
        file.write(np.ascontiguousarray(edits.codes).data)


def _read_arrays(path: Path, max_rows: int) -> tuple[RowLists, RowLists, Rows, _Edits]:
    data = path.read_bytes()
    (length,) = _HEAD.unpack_from(data)
    if length > _MAX_HEAD:
        raise ValueError("the head is too long")
    offset = _HEAD.size + length
    head = parse_json(data[_HEAD.size : offset])
    arrays = []
    for count in head["counts"]:
        if type(count) is not int or count < 0:
            raise ValueError("the length of an array is invalid")
        array, offset = unpack_planes(data, count, offset)
        arrays.append(array)
    base_lengths, base_gaps, lengths, gaps, counts, firsts, slots, ranks, removed = arrays
    dtype, code_bytes, by_row = head["lists"]
    base_start, start = head["starts"]
    if dtype not in ("<i4", "<i8") or any(type(n) is not int or n < 0 for n in (code_bytes, base_start, start)):
        raise ValueError("the type of the lists is unknown")
    if len(base_lengths) != len(base_gaps) or len(lengths) != len(gaps) or len(slots) != len(ranks):
        raise ValueError("the lengths of the arrays differ")
    base = RowLists(base_start, dtype, code_bytes, bool(by_row), base_lengths, base_gaps)
    target = RowLists(start, dtype, code_bytes, bool(by_row), lengths, gaps)
    row_count = len(lengths) if by_row else int(lengths.sum())
    if counts.sum() != row_count or row_count > max_rows or len(counts) != len(firsts):
        raise ValueError("the number of rows is wrong")
    is_new = np.repeat(firsts == 0, counts)
    base_rows = np.where(is_new, -1, np.repeat(firsts - 1, counts) + concatenated_ranges(counts))
    order = np.append(np.argsort(~is_new, kind="stable"), -1)
    codes = np.frombuffer(data, np.uint8, len(slots) * code_bytes, offset).reshape(len(slots), code_bytes)
    if offset + codes.size != len(data):
        raise ValueError("the data does not end after the codes")
    return base, target, base_rows, _Edits(np.cumsum(slots), order[ranks], np.cumsum(removed), codes)


def apply_row_delta(base: Path, delta: Path, size: int, out: Path) -> None:
    """Write the `size` bytes that a delta produces from a base file.

    Raises:
        InputError: the delta is damaged, or belongs to other files.
        OSError: `out` cannot be written.
    """
    message = f"{delta} does not turn {base} into {size:,} bytes: fetch the whole file"
    base_size, delta_size = base.stat().st_size, delta.stat().st_size
    with delta.open("rb") as file:
        file.seek(max(0, delta_size - _SIZES.size))
        rest_of_file = file.read()
    sizes = _SIZES.unpack(rest_of_file) if len(rest_of_file) == _SIZES.size else (delta_size + 1, 0, 0, 0)
    limits = delta_size, 4 * (size + base_size) + _MAX_HEAD, base_size, size
    if any(number > limit for number, limit in zip(sizes, limits, strict=True)):
        raise InputError(message)
    splice_bytes, array_bytes, base_rest, rest_bytes = sizes
    arrays, base_rest_path, rest = (out.with_name(name) for name in ("arrays", "base-rest", "rest"))
    unpack_file(delta, array_bytes, arrays, splice_bytes)
    try:
        base_lists, lists, base_rows, edits = _read_arrays(arrays, size)
        _find_end(lists, rest_bytes, size)
        base_end = _find_end(base_lists, base_rest, base_size)
        FileWithLists(base, base_lists, base_end).write_rest(base_rest_path)
        apply_splice(base_rest_path, delta, rest_bytes, rest)
        with base.open("rb") as base_file, rest.open("rb") as rest_file:
            prediction = _Prediction(base_file, base_lists, lists, base_rows)
            with atomic_write(out) as temporary, temporary.open("wb") as file:
                _copy_bytes(rest_file, file, lists.start)
                _write_edited(prediction, edits, rest_file, file)
                _copy_bytes(rest_file, file, size)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise InputError(message) from error


def _find_end(lists: RowLists, rest_bytes: int, size: int) -> int:
    """Return the total bytes of the lists and of the rest, which must be at most `size`."""
    end = rest_bytes + int(lists.lengths.sum()) * lists.slot_bytes
    if not lists.end <= end <= size:
        raise ValueError("the lists are outside of the file")
    return end


def _write_edited(prediction: _Prediction, edits: _Edits, rest: BinaryIO, out: BinaryIO) -> None:
    """Write the lists of the target, and the gaps between them, which come from `rest`."""
    lists, slot_count, predicted_count = prediction.target, 0, 0
    for block in prediction.iter_blocks():
        count = int(block.lengths.sum())
        inserted, removed = np.zeros(count, np.bool_), np.zeros(len(block.predicted), np.bool_)
        low, high = np.searchsorted(edits.inserted_slots, (slot_count, slot_count + count))
        places = edits.inserted_slots[low:high] - slot_count
        inserted[places] = True
        first, last = np.searchsorted(edits.removed, (predicted_count, predicted_count + len(removed)))
        removed[edits.removed[first:last] - predicted_count] = True
        filled, placed = block.place(inserted, removed)
        slots = np.full(count, -1, lists.dtype)
        codes = np.zeros((count, lists.code_bytes), np.uint8)
        slots[places], codes[places] = edits.inserted_rows[low:high], edits.codes[low:high]
        slots[filled], codes[filled] = block.predicted[placed], block.codes[placed]
        _write_block(lists, block, slots, codes, rest, out)
        slot_count, predicted_count = slot_count + count, predicted_count + len(removed)


def _write_block(lists: RowLists, block: _Block, slots: Numbers, codes: Bytes, rest: BinaryIO, out: BinaryIO) -> None:
    gaps = lists.gaps[block.first : block.last]
    if lists.code_bytes:
        begins = np.cumsum(block.lengths) - block.lengths
        for begin, length, gap in zip(begins.tolist(), block.lengths.tolist(), gaps.tolist(), strict=True):
            out.write(codes[begin : begin + length].data)
            out.write(slots[begin : begin + length].data)
            out.write(rest.read(gap))
        return
    width = slots.itemsize
    items = np.empty(len(slots) + int(gaps.sum()) // width, slots.dtype)
    is_slot = _mask_slots(block.lengths, gaps // width)
    items[is_slot] = slots
    items[~is_slot] = np.frombuffer(rest.read(int(gaps.sum())), slots.dtype)
    out.write(items.data)


def _copy_bytes(source: BinaryIO, out: BinaryIO, size: int) -> None:
    """Copy at most `size` bytes."""
    while size > 0 and (block := source.read(min(_BLOCK_BYTES, size))):
        out.write(block)
        size -= len(block)
