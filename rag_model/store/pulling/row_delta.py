"""Deltas of files with lists of row numbers: the links of a graph, and inverted lists.

A deleted or inserted passage shifts the row numbers of all later passages, so nearly every number
in such a file changes, although few lists refer to other passages than before. A *row delta*
stores, for each row of the target, its row number in the base. Renumbering the base's lists with
this mapping *predicts* the target's lists. The delta then stores only the differences from the
prediction: the inserted numbers with their slots, and the removed numbers. The other numbers of a
list keep their order. A predicted number is dropped if its list has no slot left for it.

The bytes between and around the lists are stored as a splice (`delta_files`). A row delta consists
of the splice, a compressed block with the head and the arrays, and their sizes. An array stores the
lowest bytes of all its numbers first and the highest bytes last, because most of these are zero.

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

from rag_model.arrays import RowLists, Rows, concatenate_ranges, find_runs
from rag_model.atomic_write import atomic_write
from rag_model.errors import InputError
from rag_model.store.pulling.delta_files import (
    apply_splice,
    map_bytes,
    pack_byte_planes,
    pack_file,
    unpack_byte_planes,
    unpack_file,
    write_splice,
)
from rag_model.untrusted_text import parse_json

# Increase with every change of the layout: it is part of the memo key.
VERSION = 1
# Bytes of the splice, of the head with the arrays, and of each file outside of its lists.
_SIZES = struct.Struct("<QQQQ")
_HEAD = struct.Struct("<I")  # field with the number of bytes of the head
_MAX_HEAD_BYTES = 1 << 12
# bytes of lists that are processed at a time, in about 24 times as much memory
_BLOCK_BYTES = 1 << 20
Bools = NDArray[np.bool_]
Numbers = NDArray[Any]  # row numbers or list numbers, of four or eight bytes each
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileWithLists:
    """The first `size` bytes of a file, and the lists of row numbers in them."""

    path: Path
    lists: RowLists
    size: int

    def write_rest(self, out: Path) -> int:
        """Write the bytes outside of the lists, and return their number."""
        list_numbers, file_data = np.flatnonzero(self.lists.gaps), map_bytes(self.path).data
        ends, gaps = self.lists.starts[list_numbers + 1].tolist(), self.lists.gaps[list_numbers].tolist()
        with out.open("wb") as file:
            file.write(file_data[: self.lists.start])
            file.writelines(file_data[end - gap : end] for end, gap in zip(ends, gaps, strict=True))
            file.write(file_data[self.lists.end : max(self.lists.end, self.size)])
            return file.tell()


@dataclass(frozen=True, slots=True)
class _SlotEdits:
    """The differences between the lists of the target and the predicted lists."""

    inserted_positions: Rows  # (i,) ascending positions among the slots of all lists
    inserted_rows: Rows  # (i,) row numbers; -1 for an empty slot that precedes a filled slot
    removed_positions: Rows  # (r,) ascending positions among the predicted numbers of all lists
    codes: Bytes  # (i, code_bytes) codes of the inserted slots

    @classmethod
    def concatenate(cls, edits: Sequence[Self], code_bytes: int) -> Self:
        """Join the edits of consecutive blocks."""
        no_rows, no_codes = np.zeros(0, np.int64), np.zeros((0, code_bytes), np.uint8)
        return cls(
            *(
                np.concatenate([empty, *(getattr(block_edits, name) for block_edits in edits)])
                for name, empty in zip(cls.__slots__, (no_rows, no_rows, no_rows, no_codes), strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class _ListBlock:
    """Consecutive lists of the target, and the numbers that are predicted for them."""

    first: int  # list number of the block's first list
    end: int  # list number after that of the block's last list
    lengths: Rows  # (m,) number of slots of each list
    slot_lists: Numbers  # (s,) list number of each slot, counted from `first`
    predicted_rows: Numbers  # (p,) predicted row numbers, in the order of the lists
    predicted_lists: Numbers  # (p,) list number of each predicted number, counted from `first`
    predicted_codes: Bytes  # (p, code_bytes) code of each predicted number

    def select(self, slot_mask: Bools, predicted_mask: Bools) -> "_ListBlock":
        """Return the block with only the slots and predicted numbers that the masks select."""
        return replace(
            self,
            slot_lists=self.slot_lists[slot_mask],
            predicted_rows=self.predicted_rows[predicted_mask],
            predicted_lists=self.predicted_lists[predicted_mask],
            predicted_codes=self.predicted_codes[predicted_mask],
        )

    def mask_placed_rows(self, is_inserted: Bools, is_removed: Bools) -> tuple[Bools, Bools]:
        """Return masks of the slots that get a predicted number, and of the numbers that get a
        slot.

        `is_inserted`, (s,), masks slots that have an inserted number, and `is_removed`, (p,), masks
        predicted numbers that are dropped. The other predicted numbers fill the other slots in
        order.
        """
        n_lists = len(self.lengths)
        numbers_per_list = np.bincount(self.predicted_lists[~is_removed], minlength=n_lists)
        slots_per_list = np.bincount(self.slot_lists[~is_inserted], minlength=n_lists)
        is_filled, is_placed = np.zeros_like(is_inserted), np.zeros_like(is_removed)
        is_filled[~is_inserted] = concatenate_ranges(slots_per_list) < np.repeat(numbers_per_list, slots_per_list)
        is_placed[~is_removed] = concatenate_ranges(numbers_per_list) < np.repeat(slots_per_list, numbers_per_list)
        return is_filled, is_placed


class _Prediction:
    """Predicts the lists of a target by renumbering the rows in the lists of a base file."""

    def __init__(self, file: BinaryIO, base: RowLists, target: RowLists, base_rows: Rows) -> None:
        """Predict the lists of `target` from the base's lists in `file`.

        Raises:
            ValueError: the files cannot be compared.
        """
        present_rows = base_rows[base_rows >= 0]
        n_base_rows = len(base.lengths) if base.by_row else int(base.lengths.sum())
        n_rows = len(target.lengths) if target.by_row else int(target.lengths.sum())
        if (base.by_row, base.dtype, base.code_bytes) != (target.by_row, target.dtype, target.code_bytes):
            raise ValueError("their lists are of different types")
        if n_rows != len(base_rows) or not (base.by_row or len(base.lengths) == len(target.lengths)):
            raise ValueError("the numbers of rows or lists differ")
        if len(present_rows) and (present_rows[-1] >= n_base_rows or (np.diff(present_rows) <= 0).any()):
            raise ValueError("the rows of the base do not ascend, or are not in the base")
        # The last item of `is_new` is for empty slots, whose row number is -1.
        self.target, self.is_new = target, np.append(base_rows < 0, False)
        self._reader, self._base = _ListReader(file, base), base
        # the target's row of each base row, -1 if it was removed; the last item is for empty slots
        self._target_rows = np.full(n_base_rows + 1, -1, target.dtype)
        self._target_rows[present_rows] = np.flatnonzero(base_rows >= 0)
        # the base's list of each list of the target; -1 for the list of a new row
        self._base_lists = base_rows if base.by_row else np.arange(len(base.lengths))

    def iter_blocks(self) -> Iterator[_ListBlock]:
        """Yield the lists of the target in order."""
        starts, first = self.target.starts, 0
        while first < len(self.target.lengths):
            end = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK_BYTES, "right")) - 1)
            lengths = self.target.lengths[first:end]
            slot_lists = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            yield _ListBlock(first, end, lengths, slot_lists, *self._predict(first, end))
            first = end

    def _predict(self, first: int, end: int) -> tuple[Numbers, Numbers, Bytes]:
        """Predict the row numbers in the target's lists [first, end), and their codes."""
        base_lists = self._base_lists[first:end]
        present_lists = np.flatnonzero(base_lists >= 0)
        list_numbers = base_lists[present_lists]
        low, high = (int(list_numbers[0]), int(list_numbers[-1]) + 1) if len(list_numbers) else (0, 0)
        slots, codes = self._reader.read(low, high)
        if len(list_numbers) < high - low:
            is_chosen = np.zeros(high - low, np.bool_)
            is_chosen[list_numbers - low] = True
            is_chosen_slot = np.repeat(is_chosen, self._base.lengths[low:high])
            slots, codes = slots[is_chosen_slot], codes[is_chosen_slot]
        if len(slots) and not -1 <= slots.min() <= slots.max() < len(self._target_rows) - 1:
            raise ValueError("a list of the base has a row that the base does not have")
        rows = self._target_rows.take(slots)
        live_positions = np.flatnonzero(rows >= 0)
        slot_lists = np.repeat(present_lists.astype(np.int32), self._base.lengths[list_numbers])
        return rows.take(live_positions), slot_lists.take(live_positions), codes[live_positions]


class _ListReader:
    """Reads lists of row numbers from a file."""

    def __init__(self, file: BinaryIO, lists: RowLists) -> None:
        """Read the lists that are located in `file`."""
        self._file, self._lists = file, lists

    def read(self, first: int, end: int) -> tuple[Numbers, Bytes]:
        """Return the (s,) slots of the lists [first, end), and their (s, code_bytes) codes."""
        lists = self._lists
        start_byte, end_byte = int(lists.starts[first]), int(lists.starts[end])
        self._file.seek(start_byte)
        data = np.frombuffer(self._file.read(end_byte - start_byte), np.uint8)
        if len(data) != end_byte - start_byte:
            raise ValueError("the file is cut short")
        lengths, gaps, dtype = lists.lengths[first:end], lists.gaps[first:end], np.dtype(lists.dtype)
        if not lists.code_bytes:
            slots = data.view(dtype)
            if gaps.any():
                slots = slots[_mask_slots(lengths, gaps // dtype.itemsize)]
            return slots, np.zeros((len(slots), 0), np.uint8)
        slots, codes = np.empty(int(lengths.sum()), dtype), np.empty((int(lengths.sum()), lists.code_bytes), np.uint8)
        n_read = 0
        for list_start, length in zip((lists.starts[first:end] - start_byte).tolist(), lengths.tolist(), strict=True):
            codes_end = list_start + length * lists.code_bytes
            codes[n_read : n_read + length] = data[list_start:codes_end].reshape(length, lists.code_bytes)
            slots[n_read : n_read + length] = np.frombuffer(
                data[codes_end : list_start + length * lists.slot_bytes], dtype
            )
            n_read += length
        return slots, codes


def _mask_slots(lengths: Rows, gaps: Rows) -> Bools:
    """Return a mask that is True for slots and False for gaps; each list is followed by its gap."""
    lengths_and_gaps = np.stack([lengths, gaps], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(lengths)), lengths_and_gaps)


def write_row_delta(base: FileWithLists, target: FileWithLists, base_rows: Rows, out: Path) -> None:
    """Write the delta from one file to another.

    The function needs about 40 bytes of memory for each row and each list.

    Args:
        base: the file of the previous snapshot.
        target: the file that the delta produces.
        base_rows: (n,) the base's row of each target row, ascending; -1 for new rows.
        out: the file to write.

    Raises:
        InputError: the lists of the files cannot be compared.
        OSError: `out` cannot be written.
    """
    rest_paths = [out.with_name(f"{out.name}.{name}") for name in ("base", "target")]
    splice_path, arrays_path = (out.with_name(f"{out.name}.{name}") for name in ("splice", "arrays"))
    base.write_rest(rest_paths[0])
    target.write_rest(rest_paths[1])
    write_splice(rest_paths[0], rest_paths[1], splice_path)
    try:
        with base.path.open("rb") as base_file, target.path.open("rb") as target_file:
            prediction = _Prediction(base_file, base.lists, target.lists, base_rows)
            reader = _ListReader(target_file, target.lists)
            blocks = prediction.iter_blocks()
            edits = _collect_edits(prediction, ((block, *reader.read(block.first, block.end)) for block in blocks))
        _write_arrays(arrays_path, base.lists, target.lists, base_rows, edits)
    except (ValueError, IndexError) as error:
        raise InputError(f"{target.path} cannot be compared with {base.path}: {error}") from error
    file_sizes = [path.stat().st_size for path in (splice_path, arrays_path, *rest_paths)]
    pack_file(arrays_path, file_sizes[1], out, splice_path.read_bytes())
    with out.open("ab") as file:
        file.write(_SIZES.pack(*file_sizes))


def _collect_edits(prediction: _Prediction, blocks: Iterator[tuple[_ListBlock, Numbers, Bytes]]) -> _SlotEdits:
    edits, slot_offset, prediction_offset = list[_SlotEdits](), 0, 0
    for block, slots, codes in blocks:
        is_inserted, is_removed = _compare_lists(block, slots, codes, prediction.is_new)
        inserted_positions = np.flatnonzero(is_inserted)
        edits.append(
            _SlotEdits(
                inserted_positions + slot_offset,
                slots[inserted_positions].astype(np.int64),
                np.flatnonzero(is_removed) + prediction_offset,
                codes[inserted_positions],
            )
        )
        slot_offset, prediction_offset = slot_offset + len(slots), prediction_offset + len(block.predicted_rows)
    return _SlotEdits.concatenate(edits, prediction.target.code_bytes)


def _compare_lists(block: _ListBlock, slots: Numbers, codes: Bytes, is_new: Bools) -> tuple[Bools, Bools]:
    """Return masks of the inserted slots, (s,), and of the removed predicted numbers, (p,)."""
    is_changed = _find_changed_lists(block, slots, codes)
    is_changed_slot, is_changed_prediction = is_changed.take(block.slot_lists), is_changed.take(block.predicted_lists)
    is_inserted, is_removed = np.zeros_like(is_changed_slot), np.zeros_like(is_changed_prediction)
    if is_changed.any():
        is_inserted[is_changed_slot], is_removed[is_changed_prediction] = _find_edits(
            block.select(is_changed_slot, is_changed_prediction),
            slots[is_changed_slot],
            codes[is_changed_slot],
            is_new,
        )
    return is_inserted, is_removed


def _find_changed_lists(block: _ListBlock, slots: Numbers, codes: Bytes) -> Bools:
    """Return a mask, (m,), of the lists that differ from the predicted lists.

    Few lists of a graph differ, and edits are searched only in these.
    """
    list_bounds = np.arange(len(block.lengths) + 1, dtype=np.int32)
    is_filled = slots >= 0
    filled_lists = block.slot_lists[is_filled]
    lengths, predicted_lengths = (
        np.diff(np.searchsorted(lists, list_bounds)) for lists in (filled_lists, block.predicted_lists)
    )
    is_changed: Bools = lengths != predicted_lengths
    has_same_count, prediction_has_same_count = ~is_changed.take(filled_lists), ~is_changed.take(block.predicted_lists)
    is_different = slots[is_filled][has_same_count] != block.predicted_rows[prediction_has_same_count]
    if codes.shape[1]:
        is_different |= (codes[is_filled][has_same_count] != block.predicted_codes[prediction_has_same_count]).any(
            axis=1
        )
    is_changed[filled_lists[has_same_count][is_different]] = True
    lists_with_inner_gaps = block.slot_lists[1:][is_filled[1:] & ~is_filled[:-1] & (np.diff(block.slot_lists) == 0)]
    is_changed[lists_with_inner_gaps] = True  # lists in which an empty slot precedes a filled slot
    return is_changed


def _find_edits(block: _ListBlock, slots: Numbers, codes: Bytes, is_new: Bools) -> tuple[Bools, Bools]:
    """Return, for changed lists, masks of the inserted slots and of the removed predicted numbers.

    In most changed lists new rows are inserted and none is removed, so this case is tried first.
    """
    is_inserted, is_removed = is_new[slots] & (slots >= 0), np.zeros(len(block.predicted_rows), np.bool_)
    is_wrong = _find_wrong_lists(block, slots, is_inserted, is_removed)
    if is_wrong.any():
        wrong_slots = np.flatnonzero(is_wrong[block.slot_lists])
        wrong_predictions = np.flatnonzero(is_wrong[block.predicted_lists])
        list_row_pairs = _encode_list_row_pairs(block.slot_lists[wrong_slots], slots[wrong_slots], len(is_new))
        predicted_pairs = _encode_list_row_pairs(
            block.predicted_lists[wrong_predictions],
            block.predicted_rows[wrong_predictions],
            len(is_new),
        )
        is_predicted, is_present = _match_values(list_row_pairs, predicted_pairs)
        is_inserted[wrong_slots] = ~is_predicted & (slots[wrong_slots] >= 0)
        is_removed[wrong_predictions] = ~is_present
        # Lists with another order or with repeated numbers are stored as a whole.
        is_wrong = _find_wrong_lists(block, slots, is_inserted, is_removed)
        is_inserted |= is_wrong[block.slot_lists]
        is_removed |= is_wrong[block.predicted_lists]
    if codes.shape[1]:
        is_filled_slot, is_placed_number = block.mask_placed_rows(is_inserted, is_removed)
        is_different = (codes[is_filled_slot] != block.predicted_codes[is_placed_number]).any(axis=1)
        is_inserted[np.flatnonzero(is_filled_slot)[is_different]] = True
        is_removed[np.flatnonzero(is_placed_number)[is_different]] = True
    return is_inserted, is_removed


def _encode_list_row_pairs(lists: Numbers, rows: Numbers, n_rows: int) -> Rows:
    """Return one unique number for each pair of a list and a row; a row may be -1."""
    pair_keys: Rows = lists.astype(np.int64) * n_rows + rows + 1
    return pair_keys


def _match_values(values: Rows, others: Rows) -> tuple[Bools, Bools]:
    """Return a mask of the `values` that occur in `others`, and a mask of the `others` that occur
    in `values`.

    If some items of `others` are equal, only the first of them is marked.
    """
    sorted_positions = np.argsort(others)
    sorted_others = np.append(others[sorted_positions], np.iinfo(np.int64).max)
    positions = np.searchsorted(sorted_others, values)
    is_in_others: Bools = sorted_others[positions] == values
    is_in_values = np.zeros(len(others), np.bool_)
    is_in_values[sorted_positions[positions[is_in_others]]] = True
    return is_in_others, is_in_values


def _find_wrong_lists(block: _ListBlock, slots: Numbers, is_inserted: Bools, is_removed: Bools) -> Bools:
    """Return an (m,) mask of the lists that the masked insertions and removals do not produce."""
    is_wrong = np.zeros(len(block.lengths), np.bool_)
    is_filled_slot, is_placed_number = block.mask_placed_rows(is_inserted, is_removed)
    is_wrong[block.slot_lists[is_filled_slot != (~is_inserted & (slots >= 0))]] = True
    is_wrong[block.slot_lists[is_filled_slot][slots[is_filled_slot] != block.predicted_rows[is_placed_number]]] = True
    return is_wrong


def _write_arrays(path: Path, base: RowLists, target: RowLists, base_rows: Rows, edits: _SlotEdits) -> None:
    run_starts, run_lengths = find_runs(base_rows)
    # New rows come first, because most of the inserted numbers are new rows.
    new_rows_first = np.argsort(base_rows >= 0, kind="stable")
    ranks = np.empty(len(new_rows_first) + 1, np.int64)
    ranks[new_rows_first], ranks[-1] = np.arange(len(new_rows_first)), len(new_rows_first)
    arrays = [
        *(array for lists in (base, target) for array in (lists.lengths, lists.gaps)),
        run_lengths,
        base_rows[run_starts] + 1,
        np.diff(edits.inserted_positions, prepend=0),
        ranks[edits.inserted_rows],
        np.diff(edits.removed_positions, prepend=0),
    ]
    header = json.dumps(
        {
            "starts": [base.start, target.start],
            "lists": [target.dtype, target.code_bytes, target.by_row],
            "counts": [len(array) for array in arrays],
        }
    ).encode()
    with path.open("wb") as file:
        file.write(_HEAD.pack(len(header)) + header)
        for array in arrays:
            file.write(pack_byte_planes(array))
        file.write(np.ascontiguousarray(edits.codes).data)


def _read_arrays(path: Path, max_rows: int) -> tuple[RowLists, RowLists, Rows, _SlotEdits]:
    data = path.read_bytes()
    (header_bytes,) = _HEAD.unpack_from(data)
    if header_bytes > _MAX_HEAD_BYTES:
        raise ValueError("the head is too long")
    offset = _HEAD.size + header_bytes
    header = parse_json(data[_HEAD.size : offset])
    arrays = []
    for n_values in header["counts"]:
        if type(n_values) is not int or n_values < 0:
            raise ValueError("the length of an array is invalid")
        array, offset = unpack_byte_planes(data, n_values, offset)
        arrays.append(array)
    base_lengths, base_gaps, lengths, gaps, run_lengths, run_starts, slot_distances, ranks, removed_distances = arrays
    dtype, code_bytes, by_row = header["lists"]
    base_start, target_start = header["starts"]
    if dtype not in ("<i4", "<i8") or any(type(n) is not int or n < 0 for n in (code_bytes, base_start, target_start)):
        raise ValueError("the type of the lists is unknown")
    if len(base_lengths) != len(base_gaps) or len(lengths) != len(gaps) or len(slot_distances) != len(ranks):
        raise ValueError("the lengths of the arrays differ")
    base = RowLists(base_start, dtype, code_bytes, bool(by_row), base_lengths, base_gaps)
    target = RowLists(target_start, dtype, code_bytes, bool(by_row), lengths, gaps)
    n_rows = len(lengths) if by_row else int(lengths.sum())
    if run_lengths.sum() != n_rows or n_rows > max_rows or len(run_lengths) != len(run_starts):
        raise ValueError("the number of rows is wrong")
    is_new = np.repeat(run_starts == 0, run_lengths)
    base_rows = np.where(is_new, -1, np.repeat(run_starts - 1, run_lengths) + concatenate_ranges(run_lengths))
    row_order = np.append(np.argsort(~is_new, kind="stable"), -1)
    codes = np.frombuffer(data, np.uint8, len(slot_distances) * code_bytes, offset).reshape(
        len(slot_distances), code_bytes
    )
    if offset + codes.size != len(data):
        raise ValueError("the data does not end after the codes")
    return (
        base,
        target,
        base_rows,
        _SlotEdits(np.cumsum(slot_distances), row_order[ranks], np.cumsum(removed_distances), codes),
    )


def apply_row_delta(base: Path, delta: Path, size: int, out: Path) -> None:
    """Write the `size` bytes that a delta produces from a base file.

    Raises:
        InputError: the delta is damaged, or belongs to other files.
        OSError: `out` cannot be written.
    """
    error_message = f"{delta} does not turn {base} into {size:,} bytes: fetch the whole file"
    base_size, delta_size = base.stat().st_size, delta.stat().st_size
    with delta.open("rb") as file:
        file.seek(max(0, delta_size - _SIZES.size))
        footer = file.read()
    file_sizes = _SIZES.unpack(footer) if len(footer) == _SIZES.size else (delta_size + 1, 0, 0, 0)
    max_sizes = delta_size, 4 * (size + base_size) + _MAX_HEAD_BYTES, base_size, size
    if any(actual > limit for actual, limit in zip(file_sizes, max_sizes, strict=True)):
        raise InputError(error_message)
    splice_bytes, arrays_bytes, base_rest_bytes, rest_bytes = file_sizes
    arrays_path, base_rest_path, rest_path = (out.with_name(name) for name in ("arrays", "base-rest", "rest"))
    unpack_file(delta, arrays_bytes, arrays_path, splice_bytes)
    try:
        base_lists, target_lists, base_rows, edits = _read_arrays(arrays_path, size)
        _find_lists_end(target_lists, rest_bytes, size)
        base_end = _find_lists_end(base_lists, base_rest_bytes, base_size)
        FileWithLists(base, base_lists, base_end).write_rest(base_rest_path)
        apply_splice(base_rest_path, delta, rest_bytes, rest_path)
        with base.open("rb") as base_file, rest_path.open("rb") as rest_file:
            prediction = _Prediction(base_file, base_lists, target_lists, base_rows)
            with atomic_write(out) as temporary, temporary.open("wb") as file:
                _copy_bytes(rest_file, file, target_lists.start)
                _write_edited(prediction, edits, rest_file, file)
                _copy_bytes(rest_file, file, size)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise InputError(error_message) from error


def _find_lists_end(lists: RowLists, rest_bytes: int, file_size: int) -> int:
    """Return the sum of the lists' bytes and `rest_bytes`; it must be at most `file_size`."""
    lists_end = rest_bytes + int(lists.lengths.sum()) * lists.slot_bytes
    if not lists.end <= lists_end <= file_size:
        raise ValueError("the lists are outside of the file")
    return lists_end


def _write_edited(prediction: _Prediction, edits: _SlotEdits, rest: BinaryIO, out: BinaryIO) -> None:
    """Write the edited lists of the target, and between them the gaps, which are read from
    `rest`.
    """
    target_lists, slot_offset, prediction_offset = prediction.target, 0, 0
    for block in prediction.iter_blocks():
        n_slots = int(block.lengths.sum())
        is_inserted, is_removed = np.zeros(n_slots, np.bool_), np.zeros(len(block.predicted_rows), np.bool_)
        low, high = np.searchsorted(edits.inserted_positions, (slot_offset, slot_offset + n_slots))
        slot_positions = edits.inserted_positions[low:high] - slot_offset
        is_inserted[slot_positions] = True
        begin, end = np.searchsorted(edits.removed_positions, (prediction_offset, prediction_offset + len(is_removed)))
        is_removed[edits.removed_positions[begin:end] - prediction_offset] = True
        is_filled_slot, is_placed_number = block.mask_placed_rows(is_inserted, is_removed)
        slots = np.full(n_slots, -1, target_lists.dtype)
        codes = np.zeros((n_slots, target_lists.code_bytes), np.uint8)
        slots[slot_positions], codes[slot_positions] = edits.inserted_rows[low:high], edits.codes[low:high]
        slots[is_filled_slot], codes[is_filled_slot] = (
            block.predicted_rows[is_placed_number],
            block.predicted_codes[is_placed_number],
        )
        _write_block(target_lists, block, slots, codes, rest, out)
        slot_offset, prediction_offset = slot_offset + n_slots, prediction_offset + len(is_removed)


def _write_block(
    lists: RowLists, block: _ListBlock, slots: Numbers, codes: Bytes, rest: BinaryIO, out: BinaryIO
) -> None:
    gaps = lists.gaps[block.first : block.end]
    if lists.code_bytes:
        list_starts = np.cumsum(block.lengths) - block.lengths
        for list_start, length, gap in zip(list_starts.tolist(), block.lengths.tolist(), gaps.tolist(), strict=True):
            out.write(codes[list_start : list_start + length].data)
            out.write(slots[list_start : list_start + length].data)
            out.write(rest.read(gap))
        return
    slot_bytes = slots.itemsize
    words = np.empty(len(slots) + int(gaps.sum()) // slot_bytes, slots.dtype)
    slot_word_mask = _mask_slots(block.lengths, gaps // slot_bytes)
    words[slot_word_mask] = slots
    words[~slot_word_mask] = np.frombuffer(rest.read(int(gaps.sum())), slots.dtype)
    out.write(words.data)


def _copy_bytes(source: BinaryIO, out: BinaryIO, max_bytes: int) -> None:
    """Copy at most `max_bytes` from `source` to `out`."""
    while max_bytes > 0 and (block := source.read(min(_BLOCK_BYTES, max_bytes))):
        out.write(block)
        max_bytes -= len(block)
