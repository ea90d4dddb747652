"""Measure an encoder's ranking during training: a dev set, its passages, and all scores between them."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.errors import UsageError
from rag_model.evaluation.questions.match import Answers
from rag_model.training.data.examples import Example
from rag_model.training.loop.task import Measures

CUTOFFS = (1, 5, 20)  # passages
_AT_ONCE = 256  # questions scored together


class Ranking:
    """Dev questions, and the pool of passages to rank: a corpus, and all passages of the examples."""

    def __init__(self, examples: Sequence[Example], corpus: Sequence[Passage] = ()) -> None:
        """Build the pool, with equal passages once.

        Raises:
            UsageError: there is no example, or no passage at all.
        """
        named = [passage for one in examples for passage in (*one.positives, *one.negatives)]
        self.examples = tuple(examples)
        self.pool = tuple({passage.hash: passage for passage in (*corpus, *named)}.values())
        self.rows = {passage.hash: row for row, passage in enumerate(self.pool)}
        self.with_positives = [place for place, one in enumerate(examples) if one.positives]
        if not self.examples or not self.pool:
            raise UsageError("the dev set has no example or no passage to rank: give a dev file with passages")

    def measure(self, asked: Vectors, read: Vectors) -> Measures:
        """Return `average_rank` and `Success@k`, from (n, d) vectors of the examples and (m, d) vectors of the pool.

        `average_rank` is the mean rank of the examples' first positive in the whole pool, from 1; examples without one
        are left out. `Success@k`: the share of examples with a passage that holds an answer (DPR's token match; if the
        example has no answers, one of its positives) among their first k.
        """
        # (b, d) @ (d, m) -> (b, m)
        return self.measure_scores(asked[at : at + _AT_ONCE] @ read.T for at in range(0, len(asked), _AT_ONCE))

    def measure_scores(self, blocks: Iterable[Vectors]) -> Measures:
        """Return what `measure` does, from scores, (b, m) a block of examples, in order; m is the pool."""
        firsts, ranks = list[int | None](), list[int]()
        every = (own for block in blocks for own in block)
        for example, own in zip(self.examples, every, strict=True):
            firsts.append(self._first_answer(example, own))
            if example.positives:
                ranks.append(int((own > own[self.rows[example.positives[0].hash]]).sum()) + 1)
        success = {
            f"Success@{k}": sum(first is not None and first <= k for first in firsts) / len(firsts) for k in CUTOFFS
        }
        return {**({"average_rank": sum(ranks) / len(ranks)} if ranks else {}), **success}

    def successes(self, asked: Vectors, read: Vectors, k: int) -> npt.NDArray[np.bool_]:
        """Return (n,) bool: whether an example has a passage with an answer among its first `k`; k at most 20."""
        firsts = [self._first_answer(example, own @ read.T) for example, own in zip(self.examples, asked, strict=True)]
        return np.array([first is not None and first <= k for first in firsts])

    def _first_answer(self, example: Example, scores: Vectors) -> int | None:
        """Return the rank, from 1, of the first passage that answers; None if none of the first 20 does."""
        depth = min(CUTOFFS[-1], len(scores))
        best = np.argpartition(-scores, depth - 1)[:depth]  # (m,) -> (depth,)
        ranked = [self.pool[row] for row in best[np.argsort(-scores[best], kind="stable")]]
        return first_answer(example, ranked)


def first_answer(example: Example, ranked: Sequence[Passage]) -> int | None:
    """Return the rank, from 1, of the first passage that answers the example's question, or None."""
    answers, known = Answers(example.answers), {passage.hash for passage in example.positives}
    for rank, passage in enumerate(ranked, start=1):
        if answers.are_in(passage.text) if example.answers else passage.hash in known:
            return rank
    return None
