"""The gate: the checks of a new snapshot before a ref moves to it. Each index has enough recall against exact search,
retrievers reach their floors on the user's questions, most of the parent's passages are still there, the encoder space
is the same, and the snapshot is not older than the one it replaces. Every check reports the observed and the wanted
value. This module only decides; the flow measures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.retrieval.judging import JudgedBy
from rag_model.index.quality.recall import Floor, Recalls, percentile5
from rag_model.index.registry import kind_for


@dataclass(frozen=True, slots=True)
class QuestionFloor:
    """What a retriever must reach on a file of questions: `[gate.questions.NAME]` of a recipe."""

    file: str  # as `evaluate` reads it: a path, a URL, or a BEIR folder
    floor: float  # of the mean over the questions
    measure: str = "Success@20"  # or RR@k; with relevant pages or passages also nDCG@k and R@k
    retriever: str = ""  # an expression; empty: the snapshot's default retriever
    judged_by: JudgedBy | None = None  # what is relevant; None: as the questions allow
    patterns: bool = False  # the answers are regular expressions

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise UsageError(f"the floor of {self.measure} is {self.floor}: give a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class GateRecipe:
    """How a snapshot is checked; the defaults suit a nightly run on real dumps."""

    k: int = 20  # DPR reports its retrievers at 20
    queries: int = 256  # gives the mean recall to about .01
    seed: int = 0
    floors: Mapping[str, Floor] = field(default_factory=dict)  # by index name, to replace the defaults
    questions: Mapping[str, QuestionFloor] = field(default_factory=dict)  # floors on files of the user, by name
    max_passage_loss: float = 0.1  # share of the parent's passages; a month of Wikipedia edits loses far less
    same_space: bool = True  # a ref's readers keep the encoder they already have

    def __post_init__(self) -> None:
        if self.k < 1 or self.queries < 1:
            raise UsageError(f"k is {self.k} and queries {self.queries}: the gate needs at least 1 of each")
        if not 0 <= self.max_passage_loss <= 1:
            raise UsageError(f"max_passage_loss is {self.max_passage_loss}: give a share from 0 to 1")

    def floor(self, index: str, factory: str) -> Floor:
        """Return the floor of an index: its own if one is set, else that of its kind."""
        return self.floors.get(index) or kind_for(factory).floor(factory)


@dataclass(frozen=True, slots=True)
class Vitals:
    """The values of a snapshot that the gate compares with its parent."""

    passages: int
    space: str | None  # digest of the encoder space; None = no embeddings
    newest_revision: str  # ISO 8601 UTC, so text order is time order; empty = the source has no revisions


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of one index on the sampled queries."""

    factory: str  # HNSW32, or with its refinement IVF1024,PQ48np,Refine(vectors)
    recalls: Recalls  # of each query, with the default search setting


@dataclass(frozen=True, slots=True)
class Reached:
    """What a retriever reached on a file of questions."""

    retriever: str
    estimate: Estimate  # of the floor's measure


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the snapshot, with its result."""

    name: str
    passed: bool
    observed: str
    wanted: str
    why: str  # what a failure means, and what to do


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision: passed if every check did."""

    passed: bool
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """One sentence naming the checks that failed; empty if none did."""
        failed = [f"{c.name} is {c.observed}, wanted {c.wanted}" for c in self.checks if not c.passed]
        return "; ".join(failed)


def judge(
    recipe: GateRecipe,
    now: Vitals,
    found: Mapping[str, Findings],
    parent: Vitals | None = None,
    reached: Mapping[str, Reached] | None = None,
) -> Verdict:
    """Decide whether a ref may move to a snapshot.

    Args:
        recipe: thresholds.
        now: the new snapshot.
        found: of each index, by name, the recall@k of each sampled query against exact search.
        parent: the ref's current snapshot; None for the first snapshot, which is not compared with one.
        reached: of each floor on questions, by name, what the retriever reached.
    """
    checks = [_holds_passages(now), *_finds(recipe, found), *_answers(recipe, reached or {})]
    if parent is not None:
        checks += _continues(recipe, now, parent)
    return Verdict(all(check.passed for check in checks), tuple(checks))


def _holds_passages(now: Vitals) -> Check:
    return Check(
        "passages",
        now.passages > 0,
        f"{now.passages:,}",
        "at least 1",
        "The dump gave no passages: see the reasons of the dropped pages.",
    )


def _finds(recipe: GateRecipe, found: Mapping[str, Findings]) -> Iterator[Check]:
    for index, findings in found.items():
        floor = recipe.floor(index, findings.factory)
        why = (
            f"The {index} index misses passages that exact search finds: raise efSearch or nprobe, "
            "or build it with more links, more cells or longer codes."
        )
        for name, seen, wanted in (
            ("mean", float(findings.recalls.mean()), floor.mean),
            ("5th percentile", percentile5(findings.recalls), floor.p5),
        ):
            yield Check(
                f"{index} recall@{recipe.k}, {name}",
                seen >= wanted,
                f"{seen:.3f}",
                f"at least {wanted:.3f}",
                why,
            )


def _answers(recipe: GateRecipe, reached: Mapping[str, Reached]) -> Iterator[Check]:
    for name, its in reached.items():
        wanted = recipe.questions[name]
        yield Check(
            f"{wanted.measure} of {its.retriever} on the questions {name}",
            its.estimate.value >= wanted.floor,
            str(its.estimate),
            f"at least {wanted.floor:.3f}",
            f"The retriever finds less than you asked for on {wanted.file}: look at its stages with `evaluate`.",
        )


def _continues(recipe: GateRecipe, now: Vitals, parent: Vitals) -> Iterator[Check]:
    lost = max(0, parent.passages - now.passages) / max(1, parent.passages)
    yield Check(
        "passages lost since the parent",
        lost <= recipe.max_passage_loss,
        f"{lost:.1%} ({parent.passages:,} to {now.passages:,})",
        f"at most {recipe.max_passage_loss:.1%}",
        "The dump is truncated, the cleaner drops too much, or --limit is set.",
    )
    if recipe.same_space:
        yield Check(
            "encoder space",
            now.space == parent.space,
            "the parent's"
            if now.space == parent.space
            else f"{_short(now.space)}, the parent's is {_short(parent.space)}",
            "the parent's",
            "Services that follow the ref would be refused: publish under another ref, or allow a new space.",
        )
    yield Check(
        "newest revision",
        now.newest_revision >= parent.newest_revision,
        now.newest_revision or "none",
        f"{parent.newest_revision or 'none'} or later",
        "The dump is older than the one it would replace: move the ref by hand if you want this.",
    )


def _short(space: str | None) -> str:
    return "none" if space is None else space.removeprefix("sha256:")[:12]
