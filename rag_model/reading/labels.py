"""Label claims: the reader's answer is the label whose token is most likely, over all passages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rag_model.errors import UsageError
from rag_model.generate.generator import Generator
from rag_model.generate.labels import label_log_p, label_tokens
from rag_model.generate.rag import Rag
from rag_model.reading.answer import Answer, Support, Usage
from rag_model.reading.marginal import MarginalReader
from rag_model.reading.stages import ASSEMBLY, Marks
from rag_model.retrieve.retriever import Hit, Retriever


class LabelReader(MarginalReader):
    """A `MarginalReader` that chooses among labels (`generate.labels`)."""

    def __init__(
        self,
        retriever: Retriever | None,
        rag: Rag,
        labels: Mapping[str, str],
        batch: int = 8,
        passages: int | None = None,
    ) -> None:
        """Choose among `labels`; each has the word, of one token, that the model was trained to say for it.

        Raises:
            UsageError: there are fewer than two labels, or a word is not one token.
        """
        if len(labels) < 2:
            raise UsageError(f"{len(labels)} labels leave nothing to choose: give at least two")
        super().__init__(retriever, rag, batch=batch, passages=passages)
        self._labels = dict(labels)
        self._tokens = label_tokens(rag.generator, list(labels.values()))

    @property
    def decides(self) -> dict[str, Any]:
        """Return the labels and their words."""
        return {"labels": self._labels}

    @torch.inference_mode()
    def _read(
        self, generator: Generator, questions: Sequence[str], hits: Sequence[Sequence[Hit]], marks: Marks
    ) -> list[Answer]:
        """Label claims together that have equally many passages."""
        contexts = generator.contexts(questions, [[hit.passage for hit in some] for some in hits])
        prior = self.rag.prior(torch.tensor([self._logits(some) for some in hits], device=contexts.tokens.device))
        marks.end(ASSEMBLY)
        joint = prior[..., None] + label_log_p(generator, contexts, self._tokens)  # (b, k) -> (b, k, 1) -> (b, k, l)
        total = joint.logsumexp(1)  # (b, l)
        best = total.argmax(1).tolist()
        read = contexts.mask.view(len(questions), -1).sum(1).tolist()  # (b k, s) -> (b, k s) -> (b,)
        names, weights = list(self._labels), prior.exp().tolist()
        answers = []
        for row, (question, some) in enumerate(zip(questions, hits, strict=True)):
            log_p = total[row, best[row]]
            posterior = (joint[row, :, best[row]] - log_p).exp().tolist()
            support = tuple(Support(*one) for one in zip(some, weights[row], posterior, strict=True))
            usage = Usage(read[row], 1)
            answers.append(Answer(question, names[best[row]], float(log_p), support, usage=usage))
        return answers
