"""Masks: which wordpieces of a text are hidden, and the text around them that is read.

Salient spans (Guu et al. 2020, section 3.4) hide one name or date whole, so that the world's knowledge, and not the
sentence's, is asked for. Random masks are BERT's: single wordpieces.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_model.encoders.joint_tokens import JointTokens

if TYPE_CHECKING:
    from tokenizers import Encoding

Span = tuple[int, int]  # characters of a text: start, and end (exclusive)
_WORDS = re.compile(r"\w+")
_CLUE = 8  # wordpieces on each side of a mask: no two texts have so many in common by chance


@dataclass(frozen=True, slots=True)
class Masked:
    """A text x with masks, and the wordpieces y that they hide."""

    clues: tuple[str, ...]  # the words around each run of masks, with those that are hidden; see `words_of`
    question: str  # the same with masks, for a question encoder
    ids: tuple[int, ...]  # the same as wordpieces, without special tokens
    places: tuple[int, ...]  # of the masks in `ids`, ascending; none if the text has no wordpiece
    targets: tuple[int, ...]  # the hidden ids


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is read of a text, and how much of it is hidden."""

    window: int  # wordpieces that are read
    most: int  # wordpieces that are hidden at most
    share: float  # of the window's wordpieces, of random masks


def mask(
    text: str,
    pieces: "Encoding",
    spans: Sequence[Span] | None,
    dice: random.Random,
    tokens: JointTokens,
    limits: Limits,
) -> Masked:
    """Hide wordpieces of a text, and cut it to a window around them.

    `spans`: one of them is drawn and hidden; those of more than `most` wordpieces are drawn if there is no other, and
    of such a one the first `most` are hidden. None: a share of the window's wordpieces is drawn, at least one.
    """
    length, window, most = len(pieces.ids), limits.window, limits.most
    hidden = _span(pieces, spans, dice, most) if spans is not None else []
    start = _around(hidden, length, window) if hidden else dice.randint(0, max(0, length - window))
    end = min(start + window, length)
    if spans is None:
        count = min(most, max(1, round(limits.share * (end - start))), end - start)
        hidden = sorted(dice.sample(range(start, end), count))
    return _masked(text, pieces, (start, end), [place for place in hidden if start <= place < end], tokens)


def words_of(text: str) -> str:
    """Return the words of a text alone, in small letters: by these texts are compared."""
    return " ".join(_WORDS.findall(text.casefold()))


def _span(pieces: "Encoding", spans: Sequence[Span], dice: random.Random, most: int) -> list[int]:
    """Return the wordpieces of one of the spans."""
    found = [
        [at for at, (start, end) in enumerate(pieces.offsets) if start < span[1] and span[0] < end] for span in spans
    ]
    there = [some for some in found if some]
    fitting = [some for some in there if len(some) <= most] or there
    return dice.choice(fitting)[:most] if fitting else []


def _around(hidden: Sequence[int], length: int, window: int) -> int:
    """Return where a window begins whose middle is that of the masks, as far as the text's ends allow."""
    middle = (hidden[0] + hidden[-1]) // 2
    return max(0, min(middle - window // 2, length - window))


def _masked(text: str, pieces: "Encoding", read: Span, hidden: Sequence[int], tokens: JointTokens) -> Masked:
    start, end = read
    if start >= end:
        return Masked((), text, (), (), ())
    ids = list(pieces.ids[start:end])
    targets = tuple(pieces.ids[place] for place in hidden)
    for place in hidden:
        ids[place - start] = tokens.mask_id
    question, at = [], pieces.offsets[start][0]
    for place in hidden:
        begun, ended = pieces.offsets[place]
        question += [text[at:begun], f" {tokens.mask} "]
        at = ended
    question.append(text[at : pieces.offsets[end - 1][1]])
    asked = " ".join("".join(question).split())
    clues = _clues(text, pieces, hidden)
    return Masked(clues, asked, tuple(ids), tuple(place - start for place in hidden), targets)


def _clues(text: str, pieces: "Encoding", hidden: Sequence[int]) -> tuple[str, ...]:
    """Return the words around each run of masks: a passage that holds them gives the masks away."""
    runs: list[list[int]] = []
    for place in hidden:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    found = []
    for run in runs:
        first, last = max(0, run[0] - _CLUE), min(len(pieces.ids), run[-1] + 1 + _CLUE)
        found.append(words_of(text[pieces.offsets[first][0] : pieces.offsets[last - 1][1]]))
    return tuple(dict.fromkeys(clue for clue in found if clue))
