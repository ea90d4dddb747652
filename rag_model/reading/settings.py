"""The settings of readers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import UsageError
from rag_model.generate.decoding import DecodingSettings
from rag_model.reading.confidence import Signal, Threshold
from rag_model.reading.prompts import PromptSettings
from rag_model.reading.reader import ReaderName


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Settings of a reader; the defaults are those of the RAG paper for open-domain questions."""

    reader: ReaderName | None = None  # None: `concat` for an endpoint, else `marginal`
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    concat: PromptSettings = field(default_factory=PromptSettings)  # for the reader `concat`
    # Label -> the word of one token that stands for it; empty: the model writes its answers.
    labels: Mapping[str, str] = field(default_factory=dict)
    threshold: Threshold | None = None  # withhold answers below it; None: give every answer
    signal: Signal | None = None  # to measure without a threshold; None: that of the threshold

    @property
    def required_signal(self) -> Signal | None:
        """The signal whose score every answer must have; None: no signal is required."""
        return self.signal if self.threshold is None else self.threshold.signal

    def reader_for(self, model: str) -> ReaderName:
        """Return the name of the reader for a model.

        Raises:
            UsageError: the settings need likelihoods or spans, which a model behind an endpoint
                does not give, or labels are given for another reader than `marginal`.
        """
        behind = model.startswith(ENDPOINT_PREFIX)
        if self.labels and (behind or self.reader not in (None, "marginal")):
            raise UsageError("labels are chosen by their likelihood over all passages: give --reader marginal")
        if behind and self.reader == "extractive":
            raise UsageError(f"{model} generates answers and finds no spans: leave --reader extractive out")
        if behind and self.reader == "marginal":
            raise UsageError(
                f"{model} does not give the likelihood of a text, so its answers cannot be "
                "marginalised: leave --reader marginal out"
            )
        if behind and self.required_signal == "passages":
            raise UsageError(
                f"{model} does not give the likelihood of a text, which a threshold for `passages` "
                "needs: choose one for `retrieval` or `likelihood`"
            )
        return self.reader or ("concat" if behind else "marginal")
