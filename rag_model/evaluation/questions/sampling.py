"""Questions drawn from a snapshot: one sentence from each of some sampled passages, drawn by seed.

The gate needs queries close to the passages, for any corpus and language and without a question file. A sentence of a
passage is encoded as a question, so that the question encoder is tested too.
"""

import random
import re
from collections.abc import Iterable

from rag_model.corpus.records import Passage

_END = re.compile(r"(?<=[.!?…])\s+(?=\S)|(?<=[。！？।؟])\s*")
_SHORTEST = 20  # characters; below it a sentence is a fragment such as "See p. 3."


def sample_rows(n: int, count: int, seed: int) -> list[int]:
    """Return `min(count, n)` distinct rows of `range(n)`, ascending; equal for equal arguments."""
    return sorted(random.Random(seed).sample(range(n), min(count, n)))


def sample_sentences(passages: Iterable[Passage], seed: int) -> list[str]:
    """Return one sentence of each passage, in order, chosen by the seed and the passage's `hash` alone."""
    return [_one_sentence(passage, seed) for passage in passages]


def _one_sentence(passage: Passage, seed: int) -> str:
    sentences = [piece.strip() for piece in _END.split(passage.text)]
    whole = [sentence for sentence in sentences if len(sentence) >= _SHORTEST]
    if not whole:
        return passage.text.strip() or passage.title
    return random.Random(f"{seed} {passage.hash}").choice(whole)
