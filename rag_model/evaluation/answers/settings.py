"""The settings of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import Ablations
from rag_model.evaluation.answers.collapse import LIMITS, Limits
from rag_model.evaluation.answers.scores import AnswerKind
from rag_model.evaluation.bootstrap import RESAMPLING, Resampling
from rag_model.evaluation.retrieval.judging import JudgedBy
from rag_model.generate.decoding import Decoding
from rag_model.reading.confidence import Threshold
from rag_model.reading.prompts import Concat
from rag_model.reading.reader import ReaderName
from rag_model.reading.settings import ReaderSettings
from rag_model.retrieve.expression import one_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The settings of an evaluation on a set of questions; defaults as in the RAG paper's open-domain tables."""

    kind: AnswerKind = "spans"  # of the answers: selects the measures
    k: int | None = None  # passages per answer; None: as many as in training
    depth: int = 20  # passages to which retrieval is measured
    judged_by: JudgedBy | None = None  # what is relevant; None: as the questions allow
    retriever: str | None = None  # an expression, such as rrf(hnsw, ivfpq); None: the snapshot's default
    index: str | None = None  # of the snapshot, or `exact`: the short form of `retriever`
    decoding: Decoding = field(default_factory=Decoding)
    readers: tuple[ReaderName, ...] = ()  # ways to read; ablations are of the first. None: the model's default
    concat: Concat = field(default_factory=Concat)  # of the reader `concat`
    ablations: Ablations | None = None  # None: only the open book
    limits: Limits = LIMITS  # beyond which retrieval counts as collapsed
    resampling: Resampling = RESAMPLING  # of the intervals
    labels: Mapping[str, str] = field(default_factory=dict)  # choose one by its word of one token; empty: write answers
    risk: float | None = None  # choose a threshold at this risk, at most; None: choose none
    threshold: Threshold | None = None  # measure this one; None: measure none

    def __post_init__(self) -> None:
        if min(self.depth, 1 if self.k is None else self.k) < 1:
            raise UsageError(f"k is {self.k} and depth {self.depth}: an evaluation needs at least 1 of each")
        if len(set(self.readers)) < len(self.readers):
            raise UsageError(f"readers are {', '.join(self.readers)}: name each once")
        if self.labels and self.kind != "labels":
            raise UsageError(f"labels are given, and the answers are {self.kind}: give --answers labels too")
        if self.risk is not None and not 0 <= self.risk < 1:
            raise UsageError(f"a risk of {self.risk} is no share of wrong answers: give one from 0 to below 1")
        if self.risk is not None and self.threshold is not None:
            raise UsageError("a threshold is chosen or measured: give a risk or a threshold, not both")
        one_of(self.index, self.retriever)

    @property
    def expression(self) -> str | None:
        """The retriever to measure, in one spelling; None: the snapshot's default."""
        return one_of(self.index, self.retriever)

    def reading(self, model: str) -> dict[ReaderName, ReaderSettings]:
        """Return the settings of each way to read, by its name, the first one first.

        Raises:
            UsageError: one does not go with the model of this name.
        """
        signal = None if self.threshold is None else self.threshold.signal
        given = [
            ReaderSettings(one, self.decoding, self.concat, self.labels, signal=signal)
            for one in self.readers or (None,)
        ]
        return {one.of(model): one for one in given}

    def deepest(self, k: int) -> int:
        """Return how many passages per question must be retrieved to answer from `k`."""
        return max(self.depth, self.ablations.depth(k) if self.ablations else k)
