"""Several retrievers on the same questions: figures beside each other, for all questions and for groups of them.

Every retriever is compared with the first, question by question, so the interval of a difference is as narrow as the
questions allow. Groups are the sources of the questions, and those that share few words with their passage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rag_model.errors import MissingExtraError
from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling, mean_intervals
from rag_model.evaluation.questions.files import QuestionSet
from rag_model.evaluation.retrieval.gold import MOST_SHARED, gold_texts, low_overlap, unknown
from rag_model.evaluation.retrieval.judging import Judge, ranks_of
from rag_model.evaluation.retrieval.staged import Staged, StageFigures
from rag_model.store.versions.snapshot import Snapshot

LOW_OVERLAP = f"at most {MOST_SHARED} shared stems"
_ENGLISH = ("", "en")  # languages whose words are stemmed; "" where the corpus names none


@dataclass(frozen=True, slots=True)
class Groups:
    """Subsets of the questions, and what should be said of them."""

    places: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by name, in the report's order
    notes: tuple[str, ...] = ()


def groups_of(snapshot: Snapshot, asked: QuestionSet, judge: Judge) -> Groups:
    """Return the groups of a set of questions: by source, and those with little overlap if passages are judged.

    Raises:
        InputError: the questions name passages or pages, none of which the snapshot holds.
    """
    places: dict[str, list[int]] = {}
    for place, question in enumerate(asked.questions):
        if question.source:
            places.setdefault(f"source {question.source}", []).append(place)
    if judge.by == "answers":
        return Groups(places)
    texts, notes = gold_texts(snapshot, judge), []
    if lost := unknown(judge, texts):
        some = f"{lost:,} of {len(asked.questions):,} questions"
        notes.append(f"{some} name no {judge.by} that this snapshot holds; they count as missed")
    if str(snapshot.manifest.content.corpus.get("language") or "") in _ENGLISH:
        try:
            places[LOW_OVERLAP] = low_overlap(asked.questions, judge.grades, texts)
        except MissingExtraError as missing:
            notes.append(f"questions with {LOW_OVERLAP} are not reported apart: {missing}")
    return Groups({name: some for name, some in places.items() if some}, tuple(notes))


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """The figures of a retriever over a group of questions."""

    n: int
    figures: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]  # to the first retriever; empty for the first

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        differences = {"differences": _plain(self.differences)} if self.differences else {}
        return {"n": self.n, **_split(self.figures), **differences}


@dataclass(frozen=True, slots=True)
class Standing:
    """One retriever beside the first."""

    staged: Staged
    all: GroupFigures
    ranks: Mapping[str, float]  # RR@k of answers, and KILT's page measures
    stages: Sequence[Mapping[str, Estimate]]  # of each stage of `staged`
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)

    @property
    def expression(self) -> str:
        """The retriever."""
        return self.staged.expression

    @property
    def metrics(self) -> dict[str, float]:
        """The measures of the whole, but for those of `ranks`."""
        return {name: one.value for name, one in self.all.figures.items() if name not in self.ranks}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values: metrics, intervals, ranks, stages, groups and costs."""
        whole = self.staged.whole
        stages = [_stage_json(one, some) for one, some in zip(self.staged.stages, self.stages, strict=True)]
        told = self.all.to_json()
        return {
            "metrics": self.metrics,
            "intervals": told["intervals"],
            "ranks": dict(self.ranks),
            **({"differences": told["differences"]} if "differences" in told else {}),
            "milliseconds": whole.total_milliseconds,
            "bytes": whole.total_bytes,
            "timed": self.staged.timed,
            "encoder": {"milliseconds": self.staged.encoder_milliseconds, "bytes": self.staged.encoder_bytes},
            "stages": stages,
            "groups": {name: one.to_json() for name, one in self.groups.items()},
        }


def _stage_json(stage: StageFigures, figures: Mapping[str, Estimate]) -> dict[str, Any]:
    costs = ("milliseconds", "total_milliseconds", "bytes", "total_bytes")
    return {"stage": stage.name, **_split(figures), **{name: getattr(stage, name) for name in costs}}


def _split(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    metrics = {name: one.value for name, one in figures.items()}
    return {"metrics": metrics, "intervals": {name: (one.low, one.high) for name, one in figures.items()}}


def _plain(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: asdict(one) for name, one in figures.items()}


def compare(
    measured: Sequence[Staged], judge: Judge, k: int, groups: Groups, resampling: Resampling = RESAMPLING
) -> list[Standing]:
    """Return each retriever beside the first, in order; all were asked the same questions to depth `k`."""
    first, n = measured[0].whole.values, len(measured[0].outcomes)
    everything = range(n)
    standings = []
    for place, staged in enumerate(measured):
        before = first if place else None
        own = staged.whole.values
        columns = {f"{i} {name}": some for i, one in enumerate(staged.stages) for name, some in one.values.items()}
        drawn = mean_intervals(columns, resampling)
        standings.append(
            Standing(
                staged,
                _over(own, before, everything, resampling),
                _ranks(staged, judge, k),
                [{name: drawn[f"{i} {name}"] for name in one.values} for i, one in enumerate(staged.stages)],
                {name: _over(own, before, some, resampling) for name, some in groups.places.items()},
            )
        )
    return standings


def _over(
    own: Mapping[str, Sequence[float]],
    first: Mapping[str, Sequence[float]] | None,
    places: Sequence[int],
    resampling: Resampling,
) -> GroupFigures:
    mine = {name: [some[place] for place in places] for name, some in own.items()}
    figures = mean_intervals(mine, resampling)
    if first is None:
        return GroupFigures(len(places), figures, {})
    lost = {
        name: [new - first[name][place] for new, place in zip(some, places, strict=True)] for name, some in mine.items()
    }
    return GroupFigures(len(places), figures, mean_intervals(lost, resampling))


def _ranks(staged: Staged, judge: Judge, k: int) -> dict[str, float]:
    return ranks_of(staged.outcomes, k) if judge.by == "answers" else {}
