"""Retrievers on a set of questions, stage by stage: what each leg, fusion and rerank finds, and what it costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.retrieval.judging import Judge
from rag_model.evaluation.retrieval.retrieved import BATCH, Retrieved, matcher
from rag_model.evaluation.retrieval.timing import Costs
from rag_model.retrieve.found import Found, SnapshotRetriever
from rag_model.retrieve.questions import Questions, check_questions
from rag_model.retrieve.stored import model_files
from rag_model.retrieve.watch import Stage, Watch, labels

Tell = Callable[[int, int], None]  # questions done, number of questions
ENCODER = "question encoder"  # the stage's name where times and bytes are listed
PASSAGES = "reading of passages"  # of the store, once it is known which: texts, and products that weigh them


class Batches:
    """Questions in batches, encoded once for all retrievers that share their encoders."""

    def __init__(self, asked: Sequence[Question]) -> None:
        """Hold the questions.

        Raises:
            UsageError: one is empty or no text.
        """
        check_questions([question.text for question in asked])
        self.n, self.watch = len(asked), Watch()
        split = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
        self.batches = [(batch, Questions([question.text for question in batch], self.watch)) for batch in split]

    @property
    def texts(self) -> list[str]:
        """The questions' texts."""
        return [question.text for batch, _ in self.batches for question in batch]


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of a retriever's stages, measured."""

    expression: str
    retriever: SnapshotRetriever
    values: Mapping[str, Mapping[str, Sequence[float]]]  # by label and measure, one a question, in order
    stages: tuple[Stage, ...]  # of the last batch, parts before the whole
    outcomes: tuple[Retrieved, ...]  # of the whole


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage of a retriever: its list of passages, measured, and its cost."""

    name: str  # as the expression has it, without depths
    values: Mapping[str, Sequence[float]]  # by measure, one a question, in order
    milliseconds: float  # a question, of this stage alone
    search_milliseconds: float  # a question, with its legs
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


def measure_lists(
    retriever: SnapshotRetriever,
    expression: str,
    asked: Batches,
    judge: Judge,
    k: int,
    tell: Tell = lambda done, total: None,
) -> Lists:
    """Ask a retriever every question to depth `k`, and measure the list of each of its stages.

    Raises:
        InputError: an answer is no regular expression, where they are patterns.
        UsageError: `k` is out of range.
    """
    retriever.check_depth(k)
    names = [*judge.measures(k), *judge.ranks(k)]
    values: dict[str, dict[str, list[float]]] = {}
    outcomes: list[Retrieved] = []
    for batch, questions in asked.batches:
        found = asked.watch.ask(retriever, questions, k)
        *_, whole = ranked = _ranked(retriever, found, asked.watch.stages, batch, k, judge)
        for label, some in zip(labels(asked.watch.stages), ranked, strict=True):
            kept = values.setdefault(label, {name: [] for name in names})
            for name, numbers in judge.values(some, names).items():
                kept[name].extend(numbers)
        outcomes += whole
        tell(len(outcomes), asked.n)
    return Lists(expression, retriever, values, asked.watch.stages, tuple(outcomes))


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


def staged(lists: Lists, costs: Costs) -> Staged:
    """Return the figures of a retriever's stages; one that only some questions went through is left out."""
    own = dict(zip(map(id, lists.stages), labels(lists.stages), strict=True))

    def figures(stage: Stage) -> StageFigures:
        parts = list(stage.every())
        below = {path for part in parts[:-1] for path in part.files}
        files = {path: size for part in parts for path, size in part.files.items()}
        spent = [costs.stages.get(own[id(part)], 0.0) for part in parts]
        return StageFigures(
            name=own[id(stage)],
            values=lists.values[own[id(stage)]],
            milliseconds=spent[-1],
            search_milliseconds=sum(spent),
            total_milliseconds=sum(spent) + costs.encoding(stage),
            bytes=sum(size for path, size in files.items() if path not in below),
            total_bytes=sum(files.values()) + _encoder_bytes(stage),
        )

    *_, whole = lists.stages
    asked = [stage for stage in lists.stages if _asked(lists.values[own[id(stage)]]) == len(lists.outcomes)]
    return Staged(
        lists.expression,
        tuple(map(figures, asked)),
        costs.encoding(whole),
        _encoder_bytes(whole),
        costs.questions,
        lists.outcomes,
    )


def _encoder_bytes(stage: Stage) -> int:
    return sum(sum(model_files(encoder).values()) for encoder in stage.encoders)


def _asked(values: Mapping[str, Sequence[float]]) -> int:
    return min(map(len, values.values()))
