"""Measure a RAG model's answers during training: some dev questions, with passages that were already retrieved."""

from collections.abc import Sequence

from rag_model.evaluation.answers.ablation import deranged
from rag_model.evaluation.answers.collapse import unchanged_share
from rag_model.evaluation.answers.measures import exact_match, token_f1
from rag_model.generate.decoding import Decoding
from rag_model.generate.rag import Rag
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.retriever import Hit
from rag_model.training.data.examples import Example


class Answering:
    """Dev questions to answer with a model."""

    def __init__(self, rag: Rag, dev: Sequence[Example], max_new_tokens: int, batch: int, seed: int) -> None:
        """Take the questions; there may be none. `seed`: of the permutation of passages between questions."""
        self._dev, self._seed = tuple(dev), seed
        self._reader = MarginalReader(None, rag, Decoding(max_new_tokens=max_new_tokens), batch=batch)

    def measure(self, hits: Sequence[list[Hit]]) -> dict[str, float]:
        """Return `EM`, `F1` and `unchanged`, from the hits of at least as many questions, in their order.

        `unchanged`: the share of answers that do not change with another question's passages; needs two questions or
        more.
        """
        if not self._dev:
            return {}
        questions, given = [one.question for one in self._dev], hits[: len(self._dev)]
        said = [answer.text for answer in self._reader.answer_from(questions, given)]
        pairs = [(text, one.answers) for text, one in zip(said, self._dev, strict=True)]
        measures = {
            "EM": sum(exact_match(*pair) for pair in pairs) / len(pairs),
            "F1": sum(token_f1(*pair) for pair in pairs) / len(pairs),
        }
        if len(said) > 1:
            shuffled = self._reader.answer_from(questions, deranged(given, self._seed))
            measures["unchanged"] = unchanged_share(said, [answer.text for answer in shuffled])
        return measures
