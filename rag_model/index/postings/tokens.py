"""The tokens of many texts at once: each distinct one gets a number, so that it need be analysed only once.

A token is a word of ASCII letters and digits in lower case; or a run of characters up to white space that holds another
character, as it is. Analysing the tokens of a text one by one gives `Analyzer.terms` of the whole text: no rule of it
looks beyond ASCII white space, and a run of ASCII characters has no other words than these.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_model.index.files.pieces import Array
from rag_model.index.postings.compiled import bare

_APOSTROPHE, _UNDERSCORE, _S, _FEED, _ASCII = ord("'"), ord("_"), ord("s"), ord("\n"), 128
_LOWER = np.array([ord(chr(one).lower()) if one < 128 and chr(one).isalnum() else 0 for one in range(256)], np.uint8)
_WHITE = np.array([one in b" \t\n\r" for one in range(256)])
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a
_FOLD, _ONE = np.uint64(32), np.uint64(1)
_FEWEST = 1 << 12


class Tokens(NamedTuple):
    """Distinct tokens by number; a hash table finds them."""

    slots: npt.NDArray[np.int32]  # number of the token of each slot, -1: free; a power of two
    hashes: npt.NDArray[np.uint64]  # of each token
    ends: npt.NDArray[np.int64]  # where each token ends in `text`, with the line feed behind it; after a leading 0
    text: npt.NDArray[np.uint8]  # no token has a line feed
    known: npt.NDArray[np.int64]  # (1,): tokens


def no_tokens() -> Tokens:
    """Return an empty table."""
    return _table(_FEWEST, _FEWEST, np.zeros(1, np.int64))


def with_room(tokens: Tokens, size: int) -> Tokens:
    """Return the table with room for tokens of `size` more bytes, line feeds included: itself, or a larger one."""
    count = int(tokens.known[0])
    wanted, used = count + size // 2 + 2, int(tokens.ends[count])
    if wanted <= len(tokens.hashes) and used + size <= len(tokens.text):
        return tokens
    larger = _table(max(wanted, 2 * count), max(used + size, 2 * used), tokens.known)
    larger.hashes[:count] = tokens.hashes[:count]
    larger.ends[: count + 1] = tokens.ends[: count + 1]
    larger.text[:used] = tokens.text[:used]
    _fill(larger)
    return larger


def _table(most: int, size: int, count: npt.NDArray[np.int64]) -> Tokens:
    slots = np.full(1 << (2 * most - 1).bit_length(), -1, np.int32)
    return Tokens(
        slots, np.empty(most, np.uint64), np.zeros(most + 1, np.int64), np.empty(max(size, 1), np.uint8), count
    )


@bare
def _fill(tokens):
    """Enter all tokens into empty slots."""
    mask = np.uint64(len(tokens.slots) - 1)
    for number in range(tokens.known[0]):
        slot = tokens.hashes[number] & mask
        while tokens.slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        tokens.slots[slot] = number


@bare
def _number(slots, hashes, ends, text, known, size, hashed):
    """Return the number of the token in the `size` bytes behind the last known one; a new one is kept."""
    hashed ^= hashed >> _FOLD
    count = known[0]
    mask, begin = np.uint64(len(slots) - 1), ends[count]
    slot = hashed & mask
    while True:
        one = slots[slot]
        if one < 0:
            slots[slot], hashes[count], ends[count + 1] = count, hashed, begin + size + 1
            text[begin + size] = _FEED
            known[0] = count + 1
            return count
        if hashes[one] == hashed and ends[one + 1] - ends[one] == size + 1:
            at, i = ends[one], 0
            while i < size and text[at + i] == text[begin + i]:
                i += 1
            if i == size:
                return np.int64(one)
        slot = (slot + _ONE) & mask


@bare
def _words(data, first, last, slots, hashes, ends, text, known, out, at):
    """Put the numbers of the words of ASCII characters data[first:last] at out[at:]; return the place behind."""
    while first < last:
        byte = _LOWER[data[first]]
        if byte == 0:
            first += 1
            if data[first - 1] == _APOSTROPHE and first < last and _LOWER[data[first]] == _S:
                after = data[first + 1] if first + 1 < last else np.uint8(0)
                if _LOWER[after] == 0 and after != _UNDERSCORE:  # a possessive
                    first += 1
            continue
        begin, size, hashed = ends[known[0]], 0, _BASIS
        while byte != 0:
            text[begin + size] = byte
            size += 1
            hashed = (hashed ^ np.uint64(byte)) * _PRIME
            first += 1
            if first == last:
                break
            byte = _LOWER[data[first]]
        out[at] = _number(slots, hashes, ends, text, known, size, hashed)
        at += 1
    return at


@bare
def _runs(data, first, last, slots, hashes, ends, text, known, out, at):
    """Do as `_words` for any characters: runs with one beyond ASCII are tokens as they are."""
    while first < last:
        end, plain = first, True
        while end < last and not _WHITE[data[end]]:
            plain = plain and data[end] < _ASCII
            end += 1
        if plain:
            at = _words(data, first, end, slots, hashes, ends, text, known, out, at)
        else:
            begin, hashed = ends[known[0]], _BASIS
            for i in range(first, end):
                text[begin + i - first] = data[i]
                hashed = (hashed ^ np.uint64(data[i])) * _PRIME
            out[at] = _number(slots, hashes, ends, text, known, end - first, hashed)
            at += 1
        first = end + 1
    return at


@bare
def _scan(data, offsets, slots, hashes, ends, text, known, out, out_ends):
    at = 0
    for one in range(len(out_ends)):
        first, last, every = np.int64(offsets[one]), np.int64(offsets[one + 1]), np.uint8(0)
        for i in range(first, last):
            every |= data[i]
        if every < _ASCII:
            at = _words(data, first, last, slots, hashes, ends, text, known, out, at)
        else:
            at = _runs(data, first, last, slots, hashes, ends, text, known, out, at)
        out_ends[one] = at


def scan(data: Array, offsets: Array, tokens: Tokens, out: Array, ends: Array) -> None:
    """Number the tokens of some texts.

    Args:
        data: uint8, the texts one after another, UTF-8.
        offsets: (n + 1,) where each begins; the last one ends at the last.
        tokens: with room for all of their bytes, and one more for each text.
        out: int32, with room for as many tokens; filled with numbers, text after text.
        ends: (n,) int64, filled with the place where the tokens of each text end.
    """
    _scan(data, offsets, *tokens, out, ends)  # its arrays one by one: a record of them costs a third more
