"""Where the loss is: the same questions and model, with other passages or none.

* *open book*: the k passages retrieved: the system as it is;
* *closed book*: no passage: what the weights know alone, so that open minus closed is what reading adds;
* *gold passage*: one that holds the answer: what is lost between here and 1 is the generator's, and between the open
  book and here the retriever's;
* *shuffled passages*: another question's: a model that answers as well does not read (`collapse`);
* *k swept*: how many passages it takes (Lewis et al. 2020, figure 3).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling
from rag_model.evaluation.questions import Question
from rag_model.evaluation.readings import Reading
from rag_model.evaluation.retrieval import Retrieved
from rag_model.evaluation.scores import AnswerKind, Scored, compare, estimate, score
from rag_model.retrieve.retriever import Hit

Some = TypeVar("Some", bound=Sequence[Hit])
OPEN, CLOSED, GOLD, SHUFFLED = "open book", "closed book", "gold passage", "shuffled passages"


@dataclass(frozen=True, slots=True)
class Ablations:
    """Which conditions are asked; each costs as much as answering all the questions from its passages."""

    sweep: tuple[int, ...] = (1, 2, 5, 10, 20)  # passages; the paper's figure 3 goes on to 50
    gold_depth: int = 100  # how far down a passage with the answer is looked for, as DPR does for its positives
    seed: int = 0  # of the shuffle

    def __post_init__(self) -> None:
        if min([*self.sweep, self.gold_depth]) < 1:
            raise UsageError(f"ablations need depths of at least 1, not {self}")

    def depth(self, k: int) -> int:
        """Return how many passages a question have to be retrieved for these ablations beside `k`."""
        return max(k, self.gold_depth, *self.sweep)


@dataclass(frozen=True, slots=True)
class Condition:
    """Questions, and the passages that each is to be answered from."""

    name: str
    k: int  # passages a question; 0: closed book
    questions: tuple[Question, ...]
    hits: tuple[tuple[Hit, ...], ...]  # one row of k a question


@dataclass(frozen=True, slots=True)
class Row:
    """One condition's figures."""

    name: str
    k: int
    scored: tuple[Scored, ...]
    figures: dict[str, Estimate]
    against: dict[str, Estimate]  # minus the open book, over the questions of both; empty for the open book

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, without the single questions."""
        figures = {name: asdict(one) for name, one in self.figures.items()}
        against = {name: asdict(one) for name, one in self.against.items()}
        return {"condition": self.name, "k": self.k, "n": len(self.scored), "metrics": figures, "against_open": against}


def open_book(outcomes: Sequence[Retrieved], k: int) -> Condition:
    """Return the questions with the first `k` passages retrieved, or all where the corpus has fewer."""
    deepest = min([k, *(len(outcome.hits) for outcome in outcomes)])
    return _condition(OPEN, [(outcome.question, outcome.hits[:deepest]) for outcome in outcomes])


def conditions(outcomes: Sequence[Retrieved], k: int, ablations: Ablations) -> Iterator[Condition]:
    """Yield the conditions beside the open book at `k`; one without a question is left out.

    Args:
        outcomes: what was retrieved, to the depth of `ablations.depth(k)` or as deep as the corpus is.
        k: passages of the open book and of the shuffled one.
        ablations: which, and how.
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


def _condition(name: str, pairs: Sequence[tuple[Question, tuple[Hit, ...]]]) -> Condition:
    questions, hits = tuple(question for question, _ in pairs), tuple(hits for _, hits in pairs)
    return Condition(name, len(hits[0]) if hits else 0, questions, hits)


def _gold(outcome: Retrieved, depth: int) -> Hit | None:
    """Return the best passage of a page of the evidence, or, without evidence, the best that holds an answer."""
    pages = frozenset[str]().union(*outcome.question.evidence)
    for hit, found in zip(outcome.hits[:depth], outcome.has_answer, strict=False):
        if hit.passage.page_id in pages if pages else found:
            return hit
    return None


def deranged(hits: Sequence[Some], seed: int) -> list[Some]:
    """Give each question another's passages: one cycle through all of them, in an order drawn with the seed.

    Drawn, since neighbours in a file often are about one article, and share their passages.
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
        condition: what to ask.
        answer: answers all of its questions, in order.
        kind: of the answers.
        book: the open book's row, to be compared with.
        resampling: how the intervals are drawn.
    """
    readings = answer(condition)
    scored = tuple(score(one, said, kind) for one, said in zip(condition.questions, readings, strict=True))
    against = compare(scored, book.scored, resampling) if book else {}
    return Row(condition.name, condition.k, scored, estimate(scored, kind, resampling), against)
