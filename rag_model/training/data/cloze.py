"""Inverse cloze: a sentence of a passage as the question, and the passage without it (Lee et al. 2019, ORQA)."""

import random
import re
from dataclasses import replace

from rag_model.corpus.chunkers.sentence_ends import ends_sentence
from rag_model.corpus.records import Passage

_WORD = re.compile(r"\S+")


def sentences_in(text: str) -> list[tuple[int, int]]:
    """Return the characters of a text's sentences, ascending; together they have all of its words."""
    words = list(_WORD.finditer(text))
    found: list[tuple[int, int]] = []
    start = 0
    for place, word in enumerate(words):
        last = place + 1 == len(words)
        if last or ends_sentence(word[0], words[place + 1][0]):
            found.append((words[start].start(), word.end()))
            start = place + 1
    return found


def inverse_cloze(passage: Passage, removed: float, dice: random.Random) -> tuple[str, Passage] | None:
    """Return a sentence of the passage, and the passage, in `removed` of all cases without it; None: it has only one.

    Mostly without, so that words alone do not find it; sometimes with it, so that words are learned too.
    """
    spans = sentences_in(passage.text)
    if len(spans) < 2:
        return None
    start, end = dice.choice(spans)
    if dice.random() >= removed:
        return passage.text[start:end], passage
    rest = " ".join((passage.text[:start] + passage.text[end:]).split())
    return passage.text[start:end], replace(passage, text=rest, hash=Passage.hash_of(passage.title, rest))
