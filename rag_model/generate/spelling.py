"""Tokenise texts of which some spans come from elsewhere: a special token's name in these is spelled as text.

Otherwise a passage with `<|im_end|>` in it would end the user's message, and one with `</s>` the input.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

Span = tuple[int, int]  # characters [first, end)


@dataclass(frozen=True, slots=True)
class Spelled:
    """A text's tokens; the lists have one entry a token."""

    ids: list[int]
    offsets: Sequence[Span]  # the characters that it stands for
    added: Sequence[int]  # 1: the tokenizer added it around the text


def spelled(tokenizer: Any, texts: Sequence[str], foreign: Sequence[Sequence[Span]], *, special: bool) -> list[Spelled]:
    """Tokenise each text; with `special`, the tokenizer adds its special tokens around it.

    In the spans of `foreign` the name of a special token is cut in two behind its first character, and the text on both
    sides is tokenised apart. Texts without such names are tokenised as a whole.
    """
    found = tokenizer(
        list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False
    )  # not verbose: the caller cuts what is too long
    names = tuple(
        sorted(str(one) for one in tokenizer.added_tokens_decoder.values() if one.special and len(str(one)) > 1)
    )
    rows: list[Spelled] = []
    for text, spans, ids, encoding in zip(texts, foreign, found["input_ids"], found.encodings, strict=True):
        whole = Spelled(ids, encoding.offsets, encoding.special_tokens_mask)
        cuts = sorted({cut for cut in _cuts(text, names) if any(first < cut <= end for first, end in spans)})
        rows.append(_in_pieces(tokenizer, text, cuts, whole) if cuts else whole)
    return rows


def _cuts(text: str, names: tuple[str, ...]) -> Iterator[int]:
    """Yield the place behind the first character of each special token's name; names may overlap."""
    if any(name in text for name in names):
        for found in _pattern(names).finditer(text):
            yield found.start() + 1


@lru_cache(maxsize=16)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"(?={'|'.join(map(re.escape, names))})")


def _in_pieces(tokenizer: Any, text: str, cuts: Sequence[int], whole: Spelled) -> Spelled:
    """Tokenise the text between `cuts`, and put what the tokenizer adds around the whole text around it again."""
    before, after = _around(whole)
    pieces = list(pairwise([0, *cuts, len(text)]))
    found = tokenizer([text[first:end] for first, end in pieces], add_special_tokens=False, verbose=False)
    ids, offsets = list(before), [(0, 0)] * len(before)
    for (start, _), encoding in zip(pieces, found.encodings, strict=True):
        ids += encoding.ids
        offsets += [(start + first, start + end) for first, end in encoding.offsets]
    added = [1] * len(before) + [0] * (len(ids) - len(before)) + [1] * len(after)
    return Spelled([*ids, *after], [*offsets, *[(0, 0)] * len(after)], added)


def _around(whole: Spelled) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer added before a text, and behind it."""
    said = [place for place, added in enumerate(whole.added) if not added]
    first, last = (said[0], said[-1]) if said else (len(whole.ids), len(whole.ids))
    return whole.ids[:first], whole.ids[last + 1 :]
