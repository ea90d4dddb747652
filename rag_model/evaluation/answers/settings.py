"""The settings of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import AblationSettings
from rag_model.evaluation.answers.collapse import COLLAPSE_LIMITS, CollapseLimits
from rag_model.evaluation.bootstrap import DEFAULT_RESAMPLING, Resampling
from rag_model.evaluation.measures.measure import AnswerKind, JudgedBy
from rag_model.generate.decoding import DecodingSettings
from rag_model.reading.confidence import Signal, Threshold
from rag_model.reading.reader import ReaderName
from rag_model.reading.routing import Route
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.retrieve.expression import choose_expression


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The settings of an evaluation; defaults as in the RAG paper's open-domain tables."""

    kind: AnswerKind = "spans"  # of the answers; selects the measures
    k: int | None = None  # passages per answer; None: as many as in training
    depth: int = 20  # passages to which retrieval is measured
    judged_by: JudgedBy | None = None  # what counts as relevant; None: chosen by the questions
    # Expression such as rrf(hnsw, ivfpq); None: the snapshot's default.
    retriever: str | None = None
    index: str | None = None  # name of an index, or `exact`: the short form of `retriever`
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    readers: tuple[ReaderName, ...] = ()  # the first has the ablations; empty: the model's default
    concat: PromptSettings = field(default_factory=PromptSettings)  # for the reader `concat`
    ablations: AblationSettings | None = None  # None: only the open book
    limits: CollapseLimits = COLLAPSE_LIMITS  # beyond which retrieval counts as collapsed
    resampling: Resampling = DEFAULT_RESAMPLING  # of the intervals
    # Label -> the word of one token that stands for it; empty: the model writes its answers.
    labels: Mapping[str, str] = field(default_factory=dict)
    risk: float | None = None  # choose a threshold at this maximum risk; None: choose no threshold
    threshold: Threshold | None = None  # measure this threshold; None: measure no threshold
    route: Route | None = None  # of the reader `auto`; None: the default route, or a choice
    choose_route: bool = False  # choose the route on these questions

    def __post_init__(self) -> None:
        if min(self.depth, 1 if self.k is None else self.k) < 1:
            raise UsageError(f"the evaluation has k = {self.k} and depth = {self.depth}: give at least 1 for each")
        if len(set(self.readers)) < len(self.readers):
            raise UsageError(f"a reader is named twice in {', '.join(self.readers)}: name each reader once")
        if self.labels and self.kind != "labels":
            raise UsageError(f"labels are given, but the answers are {self.kind}: add --answers labels")
        if self.risk is not None and not 0 <= self.risk < 1:
            raise UsageError(f"the risk is {self.risk}: give a share of wrong answers from 0 to below 1")
        if self.risk is not None and self.threshold is not None:
            raise UsageError(
                "both a risk and a threshold are given: give a risk to choose a threshold, or a threshold to measure"
            )
        if (self.route is not None or self.choose_route) and "auto" not in self.readers:
            raise UsageError("a route chooses between the weights and passages: give --reader auto too")
        if self.route is not None and self.choose_route:
            raise UsageError("both a route and its choice are given: give --route to measure it, or --choose-route")
        choose_expression(self.index, self.retriever)

    @property
    def expression(self) -> str | None:
        """The expression of the retriever to measure; None: the snapshot's default."""
        return choose_expression(self.index, self.retriever)

    def reader_settings(self, model: str) -> dict[ReaderName, ReaderSettings]:
        """Return the settings of each reader by its name, in order.

        `auto` is followed by the reader that it reads passages with.

        Raises:
            UsageError: a reader does not suit the model of this name.
        """
        # The reader `auto` compares likelihoods, which an endpoint only gives if it is asked for them.
        signal: Signal | None = "likelihood" if "auto" in self.readers else None
        signal = signal if self.threshold is None else self.threshold.signal
        reader_settings = [
            ReaderSettings(reader, self.decoding, self.concat, self.labels, signal=signal)
            for reader in self.readers or (None,)
        ]
        by_name: dict[ReaderName, ReaderSettings] = {}
        for settings in reader_settings:
            name = settings.reader_for(model)
            if settings.reader == "auto":
                by_name["auto"] = replace(settings, route=self.route)
            by_name.setdefault(name, replace(settings, reader=name))
        return by_name

    def search_depth(self, k: int) -> int:
        """Return the passages to retrieve per question to answer from `k`."""
        return max(self.depth, self.ablations.search_depth(k) if self.ablations else k)
