"""The outcomes of flows as plain values, for the command line and the Prefect UI."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self

from flows.command.reply import Reply
from flows.stage import run_flow
from rag_model.corpus.records import Plan
from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import BookwheelError, GateRefusedError, RefusedError
from rag_model.evaluation.answers.collapse import CollapsedError

if TYPE_CHECKING:
    from prefect import Flow

Parameters = ParamSpec("Parameters")


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """The outcome of a build."""

    snapshot: str | None  # full id; None after a dry run
    ref: str
    number: int | None  # number of the new entry in the ref's log; None: the ref did not move
    counts: dict[str, Any]  # numbers of articles, of passages by origin, of dropped pages by reason
    metrics: dict[str, Any]  # metrics by index, such as recall against exact search
    # whether the gate was passed, and each check
    gate: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    report: str | None = None  # URL of the HTML report
    warnings: list[str] = field(default_factory=list)  # sentences about trends in recent builds

    @classmethod
    def from_plan(cls, plan: Plan, size: int, ref: str) -> Self:
        """Return the outcome of a dry run, with the parts and bytes that a build would read."""
        dropped_counts = {"dropped": dict(plan.dropped)} if plan.dropped else {}
        return cls(None, ref, None, {"parts": len(plan.parts), "bytes": size, **dropped_counts}, {})


def build_and_reply(
    format_outcome: Callable[[BuildOutcome], str],
    build_flow: "Flow[Parameters, BuildOutcome]",
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Reply:
    """Run a flow that builds a snapshot; reply with its outcome, even if the gate refused it."""
    refusal = ""
    try:
        outcome = run_flow(build_flow, *args, **kwargs)
    except GateRefusedError as error:
        outcome, refusal = error.outcome, str(error)
    return Reply(asdict(outcome), format_outcome(outcome), refusal)


@dataclass(frozen=True, slots=True)
class TakedownOutcome:
    """The outcome of a takedown."""

    record: int | None  # number of the record; None if all pages were in earlier records
    # ids of the replaced snapshots, with the ids of their replacements; "": no page was left
    replaced: dict[str, str]
    moves: int  # number of refs that moved
    # ids of old snapshots that a running writer still needs; the next takedown retires them
    waiting: tuple[str, ...]
    # ids of new snapshots and moves of refs that are unsigned, because no trusted key had signed
    # the old snapshots
    unsigned: tuple[str, ...]
    # ids of evaluations of these snapshots; they were deleted because their rows contain passages
    evaluations: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**asdict(self), "replaced": {old_id: new_id or None for old_id, new_id in self.replaced.items()}}


@dataclass(frozen=True, slots=True)
class EvaluateOutcome:
    """The outcome of an evaluation of a model."""

    snapshot: str  # full id
    model: str  # full id, or the folder that was named
    retriever: str  # expression
    n: int  # number of questions
    k: int  # number of passages for each question
    metrics: dict[str, float]  # Success@k first, then the measures of the answers
    # 95 % confidence intervals of metrics and ranks, by resampling questions; some have none
    intervals: dict[str, tuple[float, float]]
    ranks: dict[str, float]  # of the first passage with an answer, and of the evidence
    collapse: dict[str, float]  # metrics that show a retrieval collapse
    judged_by: str  # how relevance was judged: answers, pages or passages
    refusal: str  # how retrieval has collapsed, in one sentence; empty if it has not
    # results of each condition of the ablations; the first is the normal answer from passages
    ablations: list[dict[str, Any]] = field(default_factory=list)
    # milliseconds per question, by stage of retrieval
    search: dict[str, float] = field(default_factory=dict)
    # milliseconds per question, by stage of retrieval and then of answering
    stages: dict[str, float] = field(default_factory=dict)
    # the abstention threshold and its effect, and the areas under the risk-coverage curves
    abstaining: dict[str, Any] | None = None
    abstained: str = ""  # the effect of the threshold in one sentence
    # the routing rule of the reader `auto` and its effect; None: no reader is `auto`
    routing: dict[str, Any] | None = None
    # sentences about the ablations: which reader they use, and why some were omitted
    notes: tuple[str, ...] = ()
    # whether retrieval is worth its cost, in one sentence; empty: answers without passages were not
    # measured
    worth: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    report: str | None = None  # the HTML report
    evaluation: str | None = None  # full id of the record in the store; None: not recorded
    unrecorded: str = ""  # why the evaluation is not recorded, in one sentence; empty if it is
    reader: str = "marginal"  # name of the reader; the first one if there are several
    # means per question: seconds, and tokens read and written
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def model_label(self) -> str:
        """The first 12 digits of the model's id, its folder's name, or its name at an endpoint."""
        if self.model.startswith(ENDPOINT_PREFIX):
            return self.model
        return Path(self.model).name if Path(self.model).is_absolute() else self.model[:12]


@dataclass(frozen=True, slots=True)
class CompareOutcome:
    """The outcome of a comparison of retrievers."""

    snapshot: str  # full id
    k: int  # number of passages per question that were measured
    n: int  # number of questions
    judged_by: str  # answers, pages or passages
    measure: str  # the measure that decides between retrievers
    # results by expression, in the given order: metrics, differences, stages, groups
    comparisons: dict[str, dict[str, Any]]
    advice: str  # recommendation of a retriever, in one sentence
    notes: tuple[str, ...] = ()  # sentences about the questions
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    report: str | None = None  # the HTML report
    evaluation: str | None = None  # full id of the record in the store; None: not recorded
    unrecorded: str = ""  # why the evaluation is not recorded, in one sentence

    @property
    def first_retriever(self) -> str:
        """The retriever with which the others are compared."""
        return next(iter(self.comparisons))

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values; the first retriever's results are at the top level.

        If there are several retrievers, `retrievers` maps each expression to its metrics, and
        `compared` maps it to all results.
        """
        retriever, comparisons = self.first_retriever, self.comparisons
        metrics = {name: comparison["metrics"] for name, comparison in comparisons.items()}
        return {
            **{field_.name: getattr(self, field_.name) for field_ in fields(self) if field_.name != "comparisons"},
            "notes": list(self.notes),
            "retriever": retriever,
            # the former name of the key `retriever`, which scripts may still read
            "index": retriever,
            **comparisons[retriever],
            **({"retrievers": metrics, "compared": comparisons} if len(comparisons) > 1 else {}),
        }


class CollapseRefusedError(CollapsedError):
    """Retrieval has collapsed, or the model does not use its passages.

    `outcome` has all results.
    """


@dataclass(frozen=True, slots=True)
class ReleaseOutcome:
    """The outcome of a release."""

    ref: str
    snapshot: str  # full id of the candidate
    number: int | None  # number of the current entry in the ref's log; None: candidate refused
    evaluation: str  # full id of the candidate's evaluation
    # full id of the evaluation of the version that the ref named before; None: nothing was compared
    present: str | None
    # full id, or the folder, of the answering model; None: only retrieval was measured
    model: str | None
    figures: dict[str, str]  # metrics of the candidate, with their intervals
    gate: dict[str, Any]  # whether the gate was passed, and each check
    done: dict[str, bool]  # by step, whether it ran; False: its inputs were unchanged
    seconds: dict[str, float] = field(default_factory=dict)  # by stage

    @property
    def is_unchanged(self) -> bool:
        """Whether no step had to run."""
        return not any(self.done.values())

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**asdict(self), "nothing_new": self.is_unchanged}


class ReleaseRefusedError(RefusedError):
    """The candidate is built and evaluated, but the ref did not move; `outcome` describes it."""

    @classmethod
    def from_reason(cls, outcome: ReleaseOutcome, reason: str) -> Self:
        """Return the error for a candidate that is refused for a reason."""
        commands = f"`show evaluation:{outcome.evaluation[:12]}`"
        if outcome.present and outcome.present != outcome.evaluation:
            commands += f" or `diff evaluation:{outcome.present[:12]} evaluation:{outcome.evaluation[:12]}`"
        return cls(f"{outcome.ref} did not move to snapshot {outcome.snapshot[:12]}: {reason}; see {commands}", outcome)


@dataclass(frozen=True, slots=True)
class ReproduceOutcome:
    """The outcome of a reproduction: the table, and the libraries that it was measured on."""

    reproduction: str
    snapshots: dict[str, str]  # full id of each library's snapshot
    lines: list[dict[str, Any]]  # values in percent, each with its row, data, measure and verdict
    summary: str  # the number of values with each verdict, as text
    notes: tuple[str, ...]  # sentences about the sample, the libraries and the data
    new: int  # number of new evaluations; earlier runs recorded the others
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    evaluation: str | None = None  # full id of the recorded table; None: it is not recorded
    unrecorded: str = ""  # why the table is not recorded, in one sentence
    report: str | None = None  # URL of the table's page


class ReproductionRefusedError(RefusedError):
    """A value differs from the published value; `outcome` has the whole table."""


class ReproductionIncompleteError(BookwheelError):
    """A row could not be measured; `outcome` has the table with all other rows."""
