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
from rag_model.retrieve.expression import RetrieverChoice, choose_expression


@dataclass(frozen=True, slots=True)
class EvaluationSettings(RetrieverChoice):
    """The settings of an evaluation. The defaults reproduce the RAG paper's tables on open-domain
    questions.
    """

    kind: AnswerKind = "spans"  # kind of the answers, which selects the measures
    k: int | None = None  # number of passages per answer; None means as many as in training
    depth: int = 20  # maximum number of passages per question in retrieval measures
    # how the relevance of passages is judged; None means that it depends on the question file
    judged_by: JudgedBy | None = None
    # Retriever expression such as rrf(hnsw, ivfpq); None means the snapshot's default.
    retriever: str | None = None
    index: str | None = None  # name of an index, or `exact`; a short form of `retriever`
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    # Names of readers; the first reader is used for ablations. Empty means the model's default.
    readers: tuple[ReaderName, ...] = ()
    # settings of the reader `concat`
    concat: PromptSettings = field(default_factory=PromptSettings)
    # settings of the ablations; None means only the open book
    ablations: AblationSettings | None = None
    # limits beyond which retrieval is considered collapsed
    limits: CollapseLimits = COLLAPSE_LIMITS
    resampling: Resampling = DEFAULT_RESAMPLING  # settings of the confidence intervals
    # Word that the model generates for each label; if empty, the model generates free text.
    labels: Mapping[str, str] = field(default_factory=dict)
    # maximum risk for the choice of a threshold; if None, no threshold is chosen
    risk: float | None = None
    threshold: Threshold | None = None  # threshold to measure; if None, no threshold is measured
    # routing rule of the reader `auto`; None means the default, or the result of `choose_route`
    route: Route | None = None
    choose_route: bool = False  # whether to choose the routing rule on these questions

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

    def build_reader_settings(self, model: str) -> dict[ReaderName, ReaderSettings]:
        """Return the settings of each reader by its name, in order.

        The reader `auto` is followed by the reader that it uses to answer from passages.

        Raises:
            UsageError: a reader cannot use the model with this name.
        """
        # The reader `auto` compares likelihoods, which an endpoint only returns if it is asked to.
        signal: Signal | None = "likelihood" if "auto" in self.readers else None
        signal = signal if self.threshold is None else self.threshold.signal
        reader_settings = [
            ReaderSettings(reader, self.decoding, self.concat, self.labels, signal=signal)
            for reader in self.readers or (None,)
        ]
        settings_by_reader: dict[ReaderName, ReaderSettings] = {}
        for one_reader_settings in reader_settings:
            name = one_reader_settings.reader_for(model)
            if one_reader_settings.reader == "auto":
                settings_by_reader["auto"] = replace(one_reader_settings, route=self.route)
            settings_by_reader.setdefault(name, replace(one_reader_settings, reader=name))
        return settings_by_reader

    def search_depth(self, k: int) -> int:
        """Return the number of passages to retrieve per question, if answers use `k` passages."""
        return max(self.depth, self.ablations.search_depth(k) if self.ablations else k)
