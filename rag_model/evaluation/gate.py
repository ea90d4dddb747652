"""The checks before a ref moves to a new snapshot (`check_snapshot`) or release (`check_release`).

A snapshot passes if each index has enough recall against exact search, retrievers reach their
minimum metrics on the user's questions, most of the parent snapshot's passages are still there, the
vector space of the encoder has not changed, and the snapshot is not older than the one it replaces.
A release passes if its metrics reach their minimums and are not worse than those of the served
snapshot. Every check reports the observed and the required value. The flows measure these values,
and this module only compares them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.measures.measure import JudgedBy
from rag_model.evaluation.records import MeasureComparison
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.quality.results import RecallFloor, Recalls, compute_p5
from rag_model.store.versions.evaluation_manifest import MetricValue

MetricMap = Mapping[str, MetricValue]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class QuestionFloor:
    """The minimum metric of a retriever on a question file: `[gate.questions.NAME]` in a recipe."""

    file: str  # path, URL or BEIR folder of the questions, as for `evaluate`
    floor: float  # minimum of the mean of the measure over the questions
    # name of the measure, such as RR@k, or nDCG@k and R@k for judged pages
    measure: str = "Success@20"
    retriever: str = ""  # retriever expression; empty means the snapshot's default
    # how the relevance of passages is judged; None means that it depends on the question file
    judged_by: JudgedBy | None = None
    patterns: bool = False  # whether the answers are regular expressions

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise UsageError(f"the floor of {self.measure} is {self.floor}: give a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class GateRecipe:
    """The thresholds of a snapshot's checks; the defaults suit a nightly build of real dumps."""

    k: int = 20  # number of hits over which recall is computed, as in DPR
    queries: int = 256  # number of sampled queries; with 256, the mean recall is exact to about .01
    seed: int = 0  # random seed of the sample
    # Minimum recall by index name; it overrides the default of the kind of index.
    floors: Mapping[str, RecallFloor] = field(default_factory=dict)
    # Minimum metrics on question files of the user, by name.
    questions: Mapping[str, QuestionFloor] = field(default_factory=dict)
    # Maximum share of the parent snapshot's passages that may be missing. The edits of a month
    # remove far fewer passages of Wikipedia.
    max_passage_loss: float = 0.1
    # whether the vector space must stay the same, because services keep their question encoder
    same_space: bool = True

    def __post_init__(self) -> None:
        if self.k < 1 or self.queries < 1:
            raise UsageError(f"the gate has k = {self.k} and queries = {self.queries}: give at least 1 for each")
        if not 0 <= self.max_passage_loss <= 1:
            raise UsageError(f"max_passage_loss is {self.max_passage_loss}: give a number from 0 to 1")

    def floor(self, index: str, factory: str) -> RecallFloor:
        """Return the minimum recall of an index; by default, it depends on the kind of index."""
        return self.floors.get(index) or get_kind_for_factory(factory).floor(factory)


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """The properties of a snapshot that the gate compares with those of its parent snapshot."""

    passages: int  # number of passages
    space: str | None  # digest of the encoder's vector space; None without embeddings
    # Time of the newest revision, ISO 8601 in UTC; if empty, the source has no revisions.
    newest_revision: str


@dataclass(frozen=True, slots=True)
class IndexRecalls:
    """The recall of one index on the sampled queries."""

    factory: str  # factory string, such as HNSW32 or IVF1024,PQ48np,Refine(vectors)
    recalls: Recalls  # recall of each query with the default search parameters


@dataclass(frozen=True, slots=True)
class RetrieverScore:
    """The metric of a retriever on a question file."""

    retriever: str  # retriever expression
    estimate: Estimate  # value of the measure that the `QuestionFloor` names


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One check with its result."""

    name: str  # name of the checked value
    passed: bool  # whether the check passed
    observed: str  # observed value
    wanted: str  # required value
    why: str  # what a failure means, and what to do about it


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """The decision of the gate; it passes if every check passed."""

    passed: bool
    checks: tuple[GateCheck, ...]

    @property
    def reason(self) -> str:
        """A sentence with the failed checks; empty if every check passed."""
        failed_checks = [f"{c.name} is {c.observed}, wanted {c.wanted}" for c in self.checks if not c.passed]
        return "; ".join(failed_checks)


def check_snapshot(
    recipe: GateRecipe,
    summary: SnapshotSummary,
    recalls: Mapping[str, IndexRecalls],
    parent: SnapshotSummary | None = None,
    scores: Mapping[str, RetrieverScore] | None = None,
) -> GateVerdict:
    """Decide whether a ref may move to a snapshot.

    Args:
        recipe: the thresholds.
        summary: the properties of the new snapshot.
        recalls: the recall@k of each sampled query against exact search, by index name.
        parent: the properties of the ref's current snapshot; None if the ref is new.
        scores: the metrics to compare with `recipe.questions`, by the same names.
    """
    checks = [_check_passages(summary), *_check_recall(recipe, recalls), *_check_question_floors(recipe, scores or {})]
    if parent is not None:
        checks += _check_parent(recipe, summary, parent)
    return GateVerdict(all(check.passed for check in checks), tuple(checks))


def _check_passages(summary: SnapshotSummary) -> GateCheck:
    return GateCheck(
        "passages",
        summary.passages > 0,
        f"{summary.passages:,}",
        "at least 1",
        "The build produced no passages: the counts of the dropped pages give the reasons.",
    )


def _check_recall(recipe: GateRecipe, recalls: Mapping[str, IndexRecalls]) -> Iterator[GateCheck]:
    for index, index_recalls in recalls.items():
        recall_floor = recipe.floor(index, index_recalls.factory)
        failure_explanation = (
            f"The {index} index misses passages that exact search finds: raise efSearch or nprobe, "
            "or build it with more links, more cells or longer codes."
        )
        for name, recall, minimum in (
            ("mean", float(index_recalls.recalls.mean()), recall_floor.mean),
            ("5th percentile", compute_p5(index_recalls.recalls), recall_floor.p5),
        ):
            yield GateCheck(
                f"{index} recall@{recipe.k}, {name}",
                recall >= minimum,
                f"{recall:.3f}",
                f"at least {minimum:.3f}",
                failure_explanation,
            )


def _check_question_floors(recipe: GateRecipe, scores: Mapping[str, RetrieverScore]) -> Iterator[GateCheck]:
    for name, score in scores.items():
        question_floor = recipe.questions[name]
        yield GateCheck(
            f"{question_floor.measure} of {score.retriever} on the questions {name}",
            score.estimate.value >= question_floor.floor,
            str(score.estimate),
            f"at least {question_floor.floor:.3f}",
            f"The retriever is below its floor on {question_floor.file}: look at its stages with `evaluate`.",
        )


def _check_parent(recipe: GateRecipe, summary: SnapshotSummary, parent: SnapshotSummary) -> Iterator[GateCheck]:
    lost_share = max(0, parent.passages - summary.passages) / max(1, parent.passages)
    yield GateCheck(
        "passages lost since the parent",
        lost_share <= recipe.max_passage_loss,
        f"{lost_share:.1%} ({parent.passages:,} to {summary.passages:,})",
        f"at most {recipe.max_passage_loss:.1%}",
        "The dump is truncated, the cleaner drops too much, or --limit is set.",
    )
    if recipe.same_space:
        yield GateCheck(
            "encoder space",
            summary.space == parent.space,
            "the parent's"
            if summary.space == parent.space
            else f"{_abbreviate(summary.space)}, the parent's is {_abbreviate(parent.space)}",
            "the parent's",
            "Services that follow the ref would refuse the snapshot: publish it under another ref, "
            "or allow a new space.",
        )
    yield GateCheck(
        "newest revision",
        summary.newest_revision >= parent.newest_revision,
        summary.newest_revision or "unknown (imported passages have no dates: publish them under another ref)",
        f"{parent.newest_revision or 'none'} or later",
        "The dump is older than the one it would replace: move the ref by hand if you want this.",
    )


def _abbreviate(space: str | None) -> str:
    return "none" if space is None else space.removeprefix("sha256:")[:12]


@dataclass(frozen=True, slots=True)
class ReleaseCriteria:
    """The requirements for a release: minimum metrics, and metrics that are not worse than those of
    the served snapshot.

    The difference of a metric is computed for each question. The candidate is not worse if the
    lower bound of the confidence interval of the mean difference is at least minus the tolerance
    (test of non-inferiority, Piaggio et al. 2012). With few questions the interval is wide, so more
    questions or a larger tolerance are needed. A candidate with the same answers has a difference
    of 0 for every question, and passes with any tolerance.
    """

    # minimum value of each measure, from 0 to 1, by the name of the measure
    floors: Mapping[str, float] = field(default_factory=dict)
    tolerance: float | None = 0.02  # maximum loss, from 0 to 1; None switches the comparison off
    # measures to compare; empty means only the measure that decides on correctness, such as EM
    measures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the floors and the tolerance are between 0 and 1."""
        for name, floor in self.floors.items():
            if not 0 <= floor <= 1:
                raise UsageError(f"the floor of {name} is {floor}: give a number from 0 to 1")
        if self.tolerance is not None and not 0 <= self.tolerance <= 1:
            raise UsageError(
                f"the tolerance is {self.tolerance}: give a number from 0 to 1, or none to skip the comparison"
            )

    def check_measures(self, metrics: Mapping[str, object]) -> None:
        """Check that an evaluation has every measure in `floors` and `measures`.

        Raises:
            UsageError: a measure is missing.
        """
        for name in (*self.floors, *self.measures):
            _get_measure(metrics, name)


def check_release(
    criteria: ReleaseCriteria,
    metrics: MetricMap,
    comparisons: Mapping[str, MeasureComparison] | None,
    headline: str,
    collapse_reason: str = "",
    withdrawn_version: str = "",
) -> GateVerdict:
    """Decide whether a ref may move to the evaluated candidate.

    Args:
        criteria: the requirements.
        metrics: the metrics of the candidate.
        comparisons: the comparison with the ref's current snapshot, by measure; None if the ref is
            new or nothing was compared.
        headline: the measure to compare if `criteria` names none.
        collapse_reason: the reason why retrieval is considered collapsed; empty if it is not.
        withdrawn_version: the earlier version of the ref, such as latest@3, that named the
            candidate before the ref was moved back; empty if there is none.

    Raises:
        UsageError: a required measure was not measured.
    """
    checks = [
        *_check_floors(criteria, metrics),
        *_check_no_loss(criteria, comparisons, headline),
        *_check_collapse(collapse_reason),
        *_check_not_withdrawn(withdrawn_version),
    ]
    return GateVerdict(all(check.passed for check in checks), tuple(checks))


def _check_floors(criteria: ReleaseCriteria, metrics: MetricMap) -> Iterator[GateCheck]:
    for name, floor in criteria.floors.items():
        metric = _get_measure(metrics, name)
        yield GateCheck(
            name,
            metric.value >= floor,
            str(metric),
            f"at least {floor:.3f}",
            "The candidate is below its floor: look at its report.",
        )


def _check_no_loss(
    criteria: ReleaseCriteria, comparisons: Mapping[str, MeasureComparison] | None, headline: str
) -> Iterator[GateCheck]:
    if comparisons is None or criteria.tolerance is None:
        return
    for name in criteria.measures or (headline,):
        comparison = _get_measure(comparisons, name)
        lower_bound = comparison.difference.value if comparison.difference.low is None else comparison.difference.low
        yield GateCheck(
            f"{name} against the present one",
            lower_bound >= -criteria.tolerance,
            f"{comparison.difference.value:+z.3f}{_format_interval(comparison)}, "
            f"from {comparison.before.value:.3f} to {comparison.after.value:.3f}",
            f"{'' if comparison.difference.low is None else 'a lower bound of '}{-criteria.tolerance:+z.3f} or more",
            "The candidate may be worse than the served one: compare the two with `diff`, or add questions.",
        )


def _check_collapse(collapse_reason: str) -> Iterator[GateCheck]:
    if collapse_reason:
        explanation = "The model does not use its passages: train it longer, or look at its ablations."
        yield GateCheck("use of passages", False, collapse_reason, "no collapse", explanation)


def _check_not_withdrawn(withdrawn_version: str) -> Iterator[GateCheck]:
    """Refuse a snapshot that was rolled back, because a schedule must not undo the rollback."""
    if withdrawn_version:
        explanation = (
            "The ref was moved away from this snapshot: release a new one, or move the ref by hand with `tag`."
        )
        observed_text = f"a snapshot that the ref left after {withdrawn_version}"
        yield GateCheck("the candidate", False, observed_text, "a snapshot that the ref never left", explanation)


def _get_measure(values_by_name: Mapping[str, ValueT], name: str) -> ValueT:
    if name not in values_by_name:
        raise UsageError(f"{name!r} was not measured: choose from {', '.join(values_by_name)}")
    return values_by_name[name]


def _format_interval(comparison: MeasureComparison) -> str:
    low, high = comparison.difference.low, comparison.difference.high
    return "" if low is None or high is None else f" [{low:+z.3f}, {high:+z.3f}]"
