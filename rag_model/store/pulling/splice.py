"""A file as stretches of an earlier one and the bytes between them, as rsync finds them.

Inverted lists that were trained once keep the codes of the vectors that stayed, in the same order, between new ones.
So nearly all of such a file lies in the earlier one, in some ten stretches a list.

A file holds the number of steps and of the bytes between, eight bytes each, and then packed (`store.pulling.packed`):
the steps, three numbers of eight bytes (bytes between, then the start and the length of a stretch), and the bytes.

Source: Tridgell, Mackerras. The rsync algorithm. TR-CS-96-05, Australian National University, 1996.
"""

import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rag_model.errors import InputError
from rag_model.landing import landing
from rag_model.partition import Rows
from rag_model.store.pulling.packed import pack, unpack

VERSION = 1  # raise it with any change of the layout: puller and builder find a file by this number
Bytes = NDArray[np.uint8]
_STRIDE = 256  # bytes between two places of the earlier file at which a stretch is looked for
_KNOWN = 32  # bytes that are compared there
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
_WINDOW = 1 << 20  # bytes that are looked up at once, in memory a dozen times
_COPIED = 1 << 20
_HEAD = struct.Struct("<QQ")
_STEP = 24  # bytes
_AT_ONCE = 1 << 16  # steps as Python's numbers
_MARKED = np.uint64(40)


def write_splice(before: Path, after: Path, out: Path) -> None:
    """Write what makes a file of an earlier one; both are mapped.

    In memory are some 30 MB, a sixteenth of the earlier one and an eighth of the later.

    Raises:
        OSError: `out` cannot be written.
    """
    earlier, later = _mapped(before), _mapped(after)
    steps, at = [], 0
    for place, start, length in _stretches(earlier, later):
        steps.append((place - at, start, length))
        at = place + length
    steps.append((len(later) - at, 0, 0))
    raw, at = out.with_name(f"{out.name}.raw"), 0
    with raw.open("wb") as file:
        file.write(np.array(steps, "<i8").tobytes())
        for between, _, length in steps:
            file.write(later[at : at + between].data)
            at += between + length
    size = raw.stat().st_size
    pack(raw, size, out, _HEAD.pack(len(steps), size - len(steps) * _STEP))
    raw.unlink()


def apply_splice(before: Path, splice: Path, size: int, out: Path) -> None:
    """Write the file of `size` bytes that a splice makes of an earlier one.

    Raises:
        InputError: the splice is damaged, or belongs to other files.
        OSError: `out` cannot be written.
    """
    wrong = f"{splice} does not make a file of {size:,} bytes of {before}: fetch the whole file"
    with splice.open("rb") as file:
        head = file.read(_HEAD.size)
    count, between = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    if not 0 < count <= size // _KNOWN + 1 or between > size:
        raise InputError(wrong)
    raw = out.with_name("raw")
    unpack(splice, count * _STEP + between, raw, _HEAD.size)
    earlier, data = _mapped(before), _mapped(raw)
    steps = data[: count * _STEP].view("<i8").reshape(-1, 3)
    _check(steps, len(earlier), between, size, wrong)
    with landing(out) as temporary, temporary.open("wb") as file:
        at = count * _STEP
        for literal, start, length in chain.from_iterable(_by_some(steps)):
            for part in (data[at : at + literal], earlier[start : start + length]):
                for first in range(0, len(part), _COPIED):
                    file.write(part[first : first + _COPIED].data)
            at += literal


def _by_some(steps: Rows) -> Iterator[list[list[int]]]:
    return (steps[at : at + _AT_ONCE].tolist() for at in range(0, len(steps), _AT_ONCE))


def _check(steps: Rows, earlier: int, between: int, size: int, wrong: str) -> None:
    """Check (m, 3) steps: all within the files, and as many bytes as there are to be."""
    bound, literals, copied = max(size, earlier), 0, 0
    for some in np.array_split(steps, range(_AT_ONCE, len(steps), _AT_ONCE)):
        inside = (some >= 0).all() and (some <= bound).all() and (some[:, 1:].sum(axis=1) <= earlier).all()
        literals, copied = literals + sum(some[:, 0].tolist()), copied + sum(some[:, 2].tolist())  # may pass 64 bits
        if not inside or literals > between or literals + copied > size:
            raise InputError(wrong)
    if literals != between or literals + copied != size:
        raise InputError(wrong)


def _stretches(earlier: Bytes, later: Bytes) -> Iterator[tuple[int, int, int]]:
    """Yield place, start and length of the stretches of a later file that lie in an earlier one; places ascend."""
    places, starts = _alike(earlier, later)
    end = number = 0
    while number < len(places):
        place, start = int(places[number]), int(starts[number])
        length = _common(later[place:], earlier[start:])
        if length >= _KNOWN:
            back = _common(later[end:place][::-1], earlier[:start][::-1])
            yield place - back, start - back, length + back
            end = place + length
        number = int(np.searchsorted(places, max(end, place + 1)))


def _alike(earlier: Bytes, later: Bytes) -> tuple[Rows, Rows]:
    """Return the places of a later file, ascending, that may begin as the earlier one does at the starts."""
    known = np.empty((len(earlier) + _STRIDE - 1) // _STRIDE, np.uint64)  # filled: a list of slices keeps all hashes
    count = 0
    for at in _windows(earlier):
        hashes = _hashes(earlier[at : at + _WINDOW + _KNOWN])[:_WINDOW:_STRIDE]
        known[count : count + len(hashes)] = hashes
        count += len(hashes)
    known = known[:count]
    order = np.argsort(known, kind="stable")
    known = known[order]
    marks = np.zeros(1 << 24, np.bool_)  # by the first bits: nearly all places are sorted out by one look
    marks[known >> _MARKED] = True
    places, starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for at in _windows(later):
        hashes = _hashes(later[at : at + _WINDOW + _KNOWN])[:_WINDOW]
        likely = np.flatnonzero(marks[hashes >> _MARKED])
        found = np.minimum(np.searchsorted(known, hashes[likely]), max(0, len(known) - 1))
        same = known[found] == hashes[likely] if len(known) else np.zeros(0, np.bool_)
        places.append(likely[same] + at)
        starts.append(order[found[same]] * _STRIDE)
    return np.concatenate(places), np.concatenate(starts)


def _windows(data: Bytes) -> range:
    return range(0, max(1, len(data)), _WINDOW)


def _hashes(data: Bytes) -> NDArray[np.uint64]:
    """Return a hash of the `_KNOWN` bytes from each place on, as far as there are so many: (m,)."""
    hashes = np.empty(max(0, len(data) - _KNOWN + 1), np.uint64)
    for phase in range(min(8, len(hashes))):
        words = data[phase : phase + (len(data) - phase) // 8 * 8].view("<u8")  # (w,)
        count = len(words) - 3
        mixed = sum(
            ((words[i : i + count] ^ (words[i : i + count] >> 29)) * factor for i, factor in enumerate(_FACTORS))
        )
        hashes[phase::8] = (mixed ^ (mixed >> np.uint64(32))) * _FACTORS[0]
    return hashes


def _common(one: Bytes, other: Bytes) -> int:
    """Return the number of equal bytes at the beginning of both."""
    size, at, step = min(len(one), len(other)), 0, 256
    while at < size:
        end = min(size, at + step)
        if (differs := np.flatnonzero(one[at:end] != other[at:end])).size:
            return at + int(differs[0])
        at, step = end, min(2 * step, _COPIED)
    return size


def _mapped(path: Path) -> Bytes:
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
