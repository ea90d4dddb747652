"""The settings of readers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import UsageError
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.rag_folder import is_rag_folder
from rag_model.reading.confidence import Signal, Threshold
from rag_model.reading.prompts import PromptSettings
from rag_model.reading.reader import ReaderName
from rag_model.reading.routing import Route


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
    route: Route | None = None  # of the reader `auto`; None: the default route

    @property
    def required_signal(self) -> Signal | None:
        """The signal whose score every answer must have; None: no signal is required."""
        return self.signal if self.threshold is None else self.threshold.signal

    def reader_for(self, model: str) -> ReaderName:
        """Return the name of the reader for a model; for `auto`, the one that it reads passages with.

        Raises:
            UsageError: the settings need likelihoods or spans, which a model behind an endpoint
                does not give, labels are given for another reader than `marginal`, or settings of a
                threshold or a prompt do not apply to `auto`.
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
        if self.reader == "auto":
            return self._select_passage_reader(model)
        return self.reader or ("concat" if behind else "marginal")

    def _select_passage_reader(self, model: str) -> ReaderName:
        """Return the reader of passages behind `auto`: `marginal` for a RAG model, else `concat`."""
        if self.required_signal in ("retrieval", "passages"):
            raise UsageError(
                f"a threshold for `{self.required_signal}` needs passages, and an answer from the weights has "
                "none: choose a threshold for `likelihood`, or leave --reader auto out"
            )
        folder = Path(model)
        if model.startswith(ENDPOINT_PREFIX) or (folder.is_dir() and not is_rag_folder(folder)):
            return "concat"
        if self.concat != PromptSettings():
            raise UsageError(
                f"model {model} reads each passage separately, without a prompt of all passages: leave --order, "
                "--budget, --prompt and --cite out, or give --reader concat"
            )
        return "marginal"
