"""One retriever on a set of questions, stage by stage: what each leg, fusion and rerank finds, and what it costs.

All questions are asked in batches for the quality. Then some are asked one by one, as people do, for the milliseconds:
a batch would share the work of several questions among the cores.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rag_model.errors import UsageError
from rag_model.evaluation.judging import Judge
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval import BATCH, Retrieved, matcher
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.indexes import encoder_sizes
from rag_model.retrieve.questions import Questions, check_questions
from rag_model.retrieve.watch import Stage, Watch

Tell = Callable[[int, int], None]  # questions done, number of questions
ENCODER = "question encoder"  # the stage's name where times and bytes are listed


@dataclass(frozen=True, slots=True)
class Timing:
    """How many questions are asked one by one to measure the time."""

    questions: int = 50  # spread evenly over the set; gives a mean to a few percent
    seconds: float = 10.0  # of one retriever; a slow one is asked fewer questions, at least one

    def __post_init__(self) -> None:
        if self.questions < 1 or self.seconds < 0:
            raise UsageError(f"the timing is {self}: give at least 1 question and no negative time")


TIMING = Timing()


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage of a retriever: its list of passages, measured, and its cost."""

    name: str  # as the expression has it, without depths
    values: Mapping[str, Sequence[float]]  # by measure, one a question, in order
    milliseconds: float  # a question, of this stage alone
    total_milliseconds: float  # a question, with its legs and the encoder
    bytes: int  # of the files that it reads and its legs do not
    total_bytes: int  # with its legs' files and the encoder's


@dataclass(frozen=True, slots=True)
class Staged:
    """The figures of one retriever."""

    expression: str
    stages: tuple[StageFigures, ...]  # parts before the whole, which is last
    encoder_milliseconds: float  # a question; 0 without an encoder
    encoder_bytes: int
    timed: int  # questions that were asked one by one
    outcomes: tuple[Retrieved, ...]  # of the whole, for run files

    @property
    def whole(self) -> StageFigures:
        """The retriever itself."""
        return self.stages[-1]


def measure_stages(
    retriever: SnapshotRetriever,
    expression: str,
    asked: Sequence[Question],
    judge: Judge,
    k: int,
    timing: Timing = TIMING,
    tell: Tell = lambda done, total: None,
) -> Staged:
    """Ask a retriever every question to depth `k`, and measure each of its stages.

    A stage that only some batches went through is left out.

    Raises:
        InputError: an answer is no regular expression, where they are patterns.
        UsageError: what `Retriever.search` refuses.
    """
    retriever.check_depth(k)
    check_questions([question.text for question in asked])
    names, watch = [*judge.measures(k), *judge.ranks(k)], Watch()
    values: dict[str, dict[str, list[float]]] = {}
    outcomes: list[Retrieved] = []
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        found = watch.ask(retriever, Questions([question.text for question in batch], watch), k)
        *_, whole = ranked = _ranked(retriever, found, watch.stages, batch, k, judge)
        for label, some in zip(labels(watch.stages), ranked, strict=True):
            kept = values.setdefault(label, {name: [] for name in names})
            for name, numbers in judge.values(some, names).items():
                kept[name].extend(numbers)
        outcomes += whole
        tell(len(outcomes), len(asked))
    costs = _timed(retriever, _spread(asked, timing.questions), k, timing.seconds)
    return _figures(retriever, expression, values, watch.stages, costs, tuple(outcomes))


def labels(stages: Sequence[Stage]) -> list[str]:
    """Return the stages' names; a name that occurs again gets its number: `hnsw`, `hnsw (2)`."""
    seen: Counter[str] = Counter()
    given = []
    for stage in stages:
        seen[stage.name] += 1
        given.append(stage.name if seen[stage.name] == 1 else f"{stage.name} ({seen[stage.name]})")
    return given


def _ranked(
    retriever: SnapshotRetriever,
    found: Found,
    stages: Sequence[Stage],
    batch: Sequence[Question],
    k: int,
    judge: Judge,
) -> list[list[Retrieved]]:
    """Return what each stage found for each question; passages are read once, and looked at once a question."""
    lists = [stage.found.cut(k) for stage in stages]
    known = {row: passage for stage in stages for row, passage in stage.found.passages.items()}
    passages = retriever.passages(np.concatenate([one.rows.ravel() for one in lists]), known)
    given = [retriever.hits(replace(one, below=(), products=None, passages=passages)) for one in lists[:-1]]
    given.append(retriever.hits(replace(found, passages=passages)))  # with its legs
    ranked: list[list[Retrieved]] = [[] for _ in given]
    for place, question in enumerate(batch):
        holds, seen = matcher(question, patterns=judge.patterns), dict[int, bool]()
        for some, hits in zip(ranked, given, strict=True):
            for hit in hits[place]:
                if hit.row not in seen:
                    seen[hit.row] = holds(hit.passage.text)
            some.append(Retrieved(question, tuple(hits[place]), tuple(seen[hit.row] for hit in hits[place])))
    return ranked


def _spread(asked: Sequence[Question], most: int) -> list[str]:
    places = np.linspace(0, len(asked) - 1, min(len(asked), most)).astype(int)
    return [asked[place].text for place in places]


@dataclass(frozen=True, slots=True)
class _Costs:
    questions: int
    encoding: float  # seconds
    spent: Mapping[str, float]  # seconds by label


def _timed(retriever: SnapshotRetriever, texts: Sequence[str], k: int, most: float) -> _Costs:
    watch, encoding, asked = Watch(), 0.0, 0
    spent: dict[str, float] = {}
    end = time.perf_counter() + most
    for text in texts:
        questions = Questions([text], watch)
        watch.ask(retriever, questions, k)
        asked, encoding = asked + 1, encoding + questions.seconds
        for label, stage in zip(labels(watch.stages), watch.stages, strict=True):
            spent[label] = spent.get(label, 0.0) + stage.seconds
        if time.perf_counter() > end:
            break
    return _Costs(asked, encoding, spent)


def _figures(
    retriever: SnapshotRetriever,
    expression: str,
    values: Mapping[str, Mapping[str, Sequence[float]]],
    stages: Sequence[Stage],
    costs: _Costs,
    outcomes: tuple[Retrieved, ...],
) -> Staged:
    own = dict(zip(map(id, stages), labels(stages), strict=True))
    each = 1000 / costs.questions
    encoder = encoder_sizes(retriever.snapshot, [one.name for one in stages if one.encoded and not one.legs])

    def figures(stage: Stage) -> StageFigures:
        parts = list(stage.every())
        below = {path for part in parts[:-1] for path in part.retriever.files}
        files = {path: size for part in parts for path, size in part.retriever.files.items()}
        seconds = sum(costs.spent.get(own[id(part)], 0.0) for part in parts)
        return StageFigures(
            own[id(stage)],
            values[own[id(stage)]],
            costs.spent.get(own[id(stage)], 0.0) * each,
            (seconds + (costs.encoding if stage.encoded else 0.0)) * each,
            sum(size for path, size in files.items() if path not in below),
            sum((files | (encoder if stage.encoded else {})).values()),
        )

    measured = [stage for stage in stages if _lengths(values[own[id(stage)]]) == {len(outcomes)}]
    return Staged(
        expression,
        tuple(figures(stage) for stage in measured),
        costs.encoding * each,
        sum(encoder.values()),
        costs.questions,
        outcomes,
    )


def _lengths(values: Mapping[str, Sequence[float]]) -> set[int]:
    return {len(some) for some in values.values()}
