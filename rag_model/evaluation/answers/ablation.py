"""Ablations: the same questions and model, with other passages or none, to find where answers are lost.

* *open book*: the k retrieved passages: the whole system;
* *closed book*: no passage: the knowledge in the weights alone; open minus closed is the gain from reading;
* *gold passage*: one that holds the answer: 1 minus this is the generator's loss, and this minus
  open book the retriever's;
* *shuffled passages*: another question's: a model that answers equally well does not use its passages (`collapse`);
* *k swept*: how many passages are needed (Lewis et al. 2020, figure 3);
* *BM25* and *frozen retriever*: the k passages of another retriever (`rivals`; table 6 of the paper);
* *whole corpus*: every passage, where all of them fit into one prompt: then nothing needs to be found;
* *another reader*: the same passages, read in another way.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rag_model.errors import UsageError
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import AnswerKind, Scored, compare, estimate, score
from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling
from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.retrieval.retrieved import Retrieved
from rag_model.retrieve.retriever import Hit

Some = TypeVar("Some", bound=Sequence[Hit])
OPEN, CLOSED, GOLD, SHUFFLED = "open book", "closed book", "gold passage", "shuffled passages"
BM25, FROZEN, WHOLE = "BM25", "frozen retriever", "whole corpus"


@dataclass(frozen=True, slots=True)
class Ablations:
    """Which conditions to measure; each costs as much as answering all the questions from its passages."""

    sweep: tuple[int, ...] = (1, 2, 5, 10, 20)  # passages; the paper's figure 3 goes up to 50
    gold_depth: int = 100  # depth of the search for a passage with the answer, as for DPR's positives
    seed: int = 0  # of the shuffle

    def __post_init__(self) -> None:
        if min([*self.sweep, self.gold_depth]) < 1:
            raise UsageError(f"ablations are {self}: give depths of at least 1")

    def depth(self, k: int) -> int:
        """Return how many passages per question must be retrieved for these ablations and for `k`."""
        return max(k, self.gold_depth, *self.sweep)


@dataclass(frozen=True, slots=True)
class Condition:
    """Questions, and the passages for each answer."""

    name: str
    k: int  # passages per question; 0: closed book
    questions: tuple[Question, ...]
    hits: tuple[tuple[Hit, ...], ...]  # of each question up to k: by words fewer may be found
    rival: str = ""  # the retriever that found them and weighs them, if not the model's own
    reader: str = ""  # of several readers, the one that answers; empty: the first


@dataclass(frozen=True, slots=True)
class Row:
    """One condition's figures."""

    name: str
    k: int
    scored: tuple[Scored, ...]
    figures: dict[str, Estimate]
    against: dict[str, Estimate]  # difference to the open book, over the questions of both; empty for the open book

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, without the single questions."""
        figures = {name: asdict(one) for name, one in self.figures.items()}
        against = {name: asdict(one) for name, one in self.against.items()}
        told = {"condition": self.name, "k": self.k, "n": len(self.scored), "metrics": figures}
        stages = {name: 1000 * seconds for name, seconds in self.stages.items()}
        return {**told, "against_open": against, "costs": self.costs, "stages": stages}

    @property
    def costs(self) -> dict[str, float]:
        """Return means a question, as far as they are known: `seconds` of answering, tokens `read` and `written`."""
        readings = [one.reading for one in self.scored]
        used = [one.usage for one in readings if one.usage is not None]
        found: dict[str, list[float]] = {
            "seconds": [one.seconds for one in readings if one.seconds is not None],
            "read": [one.prompt_tokens for one in used],
            "written": [one.new_tokens for one in used],
        }
        return {name: sum(values) / len(values) for name, values in found.items() if values}

    @property
    def stages(self) -> dict[str, float]:
        """Return the mean seconds a question of each stage of answering; empty where an answer has no such times."""
        each = [one.reading.stages for one in self.scored]
        names = dict.fromkeys(name for some in each for name in some) if all(each) else {}
        return {name: sum(some.get(name, 0.0) for some in each) / len(each) for name in names}


def open_book(outcomes: Sequence[Retrieved], k: int) -> Condition:
    """Return the questions with the first `k` retrieved passages, or all if fewer were found."""
    return _condition(OPEN, [(outcome.question, outcome.hits[:k]) for outcome in outcomes])


def conditions(outcomes: Sequence[Retrieved], k: int, ablations: Ablations) -> Iterator[Condition]:
    """Yield the conditions other than the open book at `k`; one without questions is left out.

    Args:
        outcomes: the retrieved passages, to the depth `ablations.depth(k)` or the whole corpus.
        k: passages of the open book and of the shuffled one.
        ablations: their settings.
    """
    yield _condition(CLOSED, [(outcome.question, ()) for outcome in outcomes])
    golds = [(outcome.question, _gold(outcome, ablations.gold_depth)) for outcome in outcomes]
    if found := [(question, (gold,)) for question, gold in golds if gold is not None]:
        yield _condition(GOLD, found)
    book = open_book(outcomes, k)
    if len(outcomes) > 1:
        yield Condition(SHUFFLED, book.k, book.questions, tuple(deranged(book.hits, ablations.seed)))
    for depth in ablations.sweep:
        swept = open_book(outcomes, depth)
        if swept.k == depth != book.k:
            yield Condition(f"{OPEN}, k = {depth}", depth, swept.questions, swept.hits)


def rival_book(name: str, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], k: int) -> Condition:
    """Return the questions with the first `k` passages that another retriever found."""
    pairs = [(question, tuple(found[:k])) for question, found in zip(questions, hits, strict=True)]
    return replace(_condition(name, pairs), rival=name)


def whole_book(questions: Sequence[Question], corpus: Sequence[Hit], reader: str = "") -> Condition:
    """Return the questions, each with every passage of the corpus; `reader` is not the first one's name."""
    book = _condition(WHOLE, [(question, tuple(corpus)) for question in questions])
    return replace(book, name=f"{reader}, {WHOLE}", reader=reader) if reader else book


def _condition(name: str, pairs: Sequence[tuple[Question, tuple[Hit, ...]]]) -> Condition:
    questions, hits = tuple(question for question, _ in pairs), tuple(hits for _, hits in pairs)
    return Condition(name, max(map(len, hits), default=0), questions, hits)


def _gold(outcome: Retrieved, depth: int) -> Hit | None:
    """Return the best passage of an evidence page, or, without evidence, the best that holds an answer."""
    pages = frozenset[str]().union(*outcome.question.evidence)
    for hit, found in zip(outcome.hits[:depth], outcome.has_answer, strict=False):
        if hit.passage.page_id in pages if pages else found:
            return hit
    return None


def deranged(hits: Sequence[Some], seed: int) -> list[Some]:
    """Give each question the passages of another one: one cycle through all questions, in an order drawn by seed.

    The order is drawn because neighbours in a file are often about one article, and share passages.
    """
    order = random.Random(seed).sample(range(len(hits)), len(hits))
    other = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [hits[other[place]] for place in range(len(hits))]


def measure(
    condition: Condition,
    answer: Callable[[Condition], Sequence[Reading]],
    kind: AnswerKind = "spans",
    book: Row | None = None,
    resampling: Resampling = RESAMPLING,
) -> Row:
    """Answer a condition's questions and measure the answers.

    Args:
        condition: questions and passages.
        answer: answers all of its questions, in order.
        kind: of the answers.
        book: the open book's row, for comparison.
        resampling: how the intervals are drawn.
    """
    readings = answer(condition)
    scored = tuple(score(one, said, kind) for one, said in zip(condition.questions, readings, strict=True))
    against = compare(scored, book.scored, resampling) if book else {}
    return Row(condition.name, condition.k, scored, estimate(scored, kind, resampling), against)
