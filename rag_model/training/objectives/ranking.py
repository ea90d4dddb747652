"""Evaluate a retriever during training: rank a pool of passages for each dev question."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.training.data.examples import Example
from rag_model.training.loop.task import Measures

CUTOFFS = (1, 5, 20)  # passages
_AT_ONCE = 256  # questions scored together


class RankingEvaluator:
    """Dev questions and the pool of passages that they rank: corpus and examples' passages."""

    def __init__(self, examples: Sequence[Example], corpus: Sequence[Passage] = ()) -> None:
        """Build the pool, in which equal passages occur once.

        Raises:
            UsageError: there is no example, or no passage.
        """
        example_passages = [passage for example in examples for passage in (*example.positives, *example.negatives)]
        self.examples = tuple(examples)
        self.questions = [example.question for example in examples]
        self.pool = tuple({passage.hash: passage for passage in (*corpus, *example_passages)}.values())
        self.rows = {passage.hash: row for row, passage in enumerate(self.pool)}
        self._own_rows = self._find_own_rows()
        self.with_positives = [index for index, example in enumerate(examples) if example.positives]
        if not self.examples or not self.pool:
            raise UsageError("the dev set has no example or no passage to rank: give a dev file with passages")

    def evaluate(self, question_vectors: Vectors, passage_vectors: Vectors) -> Measures:
        """Return `average_rank` and `Success@k` from (n, d) question and (m, d) pool vectors.

        `average_rank` is the mean rank, from 1, of the examples' first positive in the whole pool;
        examples without a positive are left out. `Success@k` is the share of examples with a
        passage among the first k that holds an answer (DPR's token match) or, if the example has no
        answers, that is one of its positives.
        """
        # (b, d) @ (d, m) -> (b, m)
        return self.evaluate_scores(
            question_vectors[start : start + _AT_ONCE] @ passage_vectors.T
            for start in range(0, len(question_vectors), _AT_ONCE)
        )

    def evaluate_scores(self, blocks: Iterable[Vectors]) -> Measures:
        """Return the measures of `evaluate` from (b, m) blocks of the examples' scores."""
        answer_ranks, positive_ranks = list[int | None](), list[int]()
        score_rows = (pool_scores for block in blocks for pool_scores in block)
        for index, (example, all_scores) in enumerate(zip(self.examples, score_rows, strict=True)):
            pool_scores = self._exclude_own_document(index, all_scores)
            answer_ranks.append(self._rank_of_first_answer(example, pool_scores))
            if example.positives:
                positive_ranks.append(int((pool_scores > pool_scores[self.rows[example.positives[0].hash]]).sum()) + 1)
        success = {
            f"Success@{k}": sum(answer_rank is not None and answer_rank <= k for answer_rank in answer_ranks)
            / len(answer_ranks)
            for k in CUTOFFS
        }
        return {**({"average_rank": sum(positive_ranks) / len(positive_ranks)} if positive_ranks else {}), **success}

    def successes(self, question_vectors: Vectors, passage_vectors: Vectors, k: int) -> npt.NDArray[np.bool_]:
        """Return (n,) bool: whether the first `k` passages of an example answer it; k <= 20."""
        answer_ranks = [
            self._rank_of_first_answer(example, self._exclude_own_document(index, question_vector @ passage_vectors.T))
            for index, (example, question_vector) in enumerate(zip(self.examples, question_vectors, strict=True))
        ]
        return np.array([answer_rank is not None and answer_rank <= k for answer_rank in answer_ranks])

    def _find_own_rows(self) -> dict[int, list[int]]:
        """Return the pool's rows of each example's own document, by the example's index."""
        own_documents = {
            index: example.own_document for index, example in enumerate(self.examples) if example.own_document
        }
        rows_by_page: dict[str, list[int]] = {}
        for row, passage in enumerate(self.pool if own_documents else ()):
            rows_by_page.setdefault(passage.page_id, []).append(row)
        return {
            index: [*rows_by_page.get(own.id, ()), *([self.rows[own.hash]] if own.hash in self.rows else [])]
            for index, own in own_documents.items()
        }

    def _exclude_own_document(self, index: int, scores: Vectors) -> Vectors:
        """Return the scores of an example, with -inf for its own document."""
        if not self._own_rows.get(index):
            return scores
        other_scores = scores.copy()
        other_scores[self._own_rows[index]] = -np.inf
        return other_scores

    def _rank_of_first_answer(self, example: Example, scores: Vectors) -> int | None:
        """Return the rank, from 1, of the first answering passage; None if it is above 20."""
        depth = min(CUTOFFS[-1], len(scores))
        top_rows = np.argpartition(-scores, depth - 1)[:depth]  # (m,) -> (depth,)
        ranked_passages = [self.pool[row] for row in top_rows[np.argsort(-scores[top_rows], kind="stable")]]
        return rank_of_first_answer(example, ranked_passages)


def rank_of_first_answer(example: Example, ranked_passages: Sequence[Passage]) -> int | None:
    """Return the rank, from 1, of the first passage that answers the question, or None."""
    answers, positive_hashes = AnswerMatcher(example.answers), {passage.hash for passage in example.positives}
    for rank, passage in enumerate(ranked_passages, start=1):
        if answers.match(passage.text) if example.answers else passage.hash in positive_hashes:
            return rank
    return None
