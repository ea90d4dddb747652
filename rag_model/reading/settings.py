"""How passages are read: the settings of readers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rag_model.errors import UsageError
from rag_model.generate.decoding import Decoding
from rag_model.reading.confidence import Signal, Threshold
from rag_model.reading.prompts import Concat
from rag_model.reading.reader import ReaderName
from rag_model.reading.writers.writer import ENDPOINT


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """How passages are read; the defaults are those of the RAG paper for open-domain questions."""

    reader: ReaderName | None = None  # None: an endpoint's model in one prompt, every other as the paper does
    decoding: Decoding = field(default_factory=Decoding)
    concat: Concat = field(default_factory=Concat)  # of the reader `concat`
    labels: Mapping[str, str] = field(default_factory=dict)  # of claims, each with its word of one token; empty: none
    threshold: Threshold | None = None  # below which no answer is given; None: every answer is
    signal: Signal | None = None  # by which answers are measured, where none is withheld; None: the threshold's

    @property
    def scored_by(self) -> Signal | None:
        """The signal that every answer must tell; None: any will do."""
        return self.signal if self.threshold is None else self.threshold.signal

    def of(self, model: str) -> ReaderName:
        """Return the reader of a model by its name.

        Raises:
            UsageError: an endpoint's model is to be marginalised, or to find spans, or answers are to be withheld by
                the likelihood of given texts.
        """
        behind = model.startswith(ENDPOINT)
        if self.labels and (behind or self.reader not in (None, "marginal")):
            raise UsageError("labels are chosen by their likelihood over all passages: give --reader marginal")
        if behind and self.reader == "extractive":
            raise UsageError(f"{model} writes answers, and finds no spans: leave --reader extractive out")
        if behind and self.reader == "marginal":
            raise UsageError(
                f"{model} does not tell the likelihood of a given text, so its answers cannot be marginalised: leave "
                "--reader marginal out"
            )
        if behind and self.scored_by == "passages":
            raise UsageError(
                f"{model} does not tell the likelihood of a given text, so a threshold of `passages` says nothing of "
                "it: choose one of `retrieval` or `likelihood`"
            )
        return self.reader or ("concat" if behind else "marginal")
