"""What a retriever finds for each question of a set, and which of the passages hold an answer.

An answer is found by DPR's token match over the passage's text, its title left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.questions.match import Answers
from rag_model.evaluation.questions.patterns import pattern_in
from rag_model.retrieve.retriever import Hit, Retriever

CUTOFFS = (1, 5, 20, 100)  # the k of DPR's tables
BATCH = 256  # questions: enough to fill an encoder's batch, few enough that a long list holds little at once


@dataclass(frozen=True, slots=True)
class Retrieved:
    """One question, what was found for it, and which of the hits hold an answer."""

    question: Question
    hits: tuple[Hit, ...]
    has_answer: tuple[bool, ...]  # one a hit

    @property
    def first(self) -> int | None:
        """The rank, from 1, of the first passage with an answer; None if none has one."""
        return next((rank for rank, found in enumerate(self.has_answer, start=1) if found), None)


def matcher(question: Question, *, patterns: bool = False) -> Callable[[str], bool]:
    """Return whether a text holds an answer of the question: by token match, or as regular expressions."""
    return partial(pattern_in, patterns=question.answers) if patterns else Answers(question.answers).are_in


def match_hits(question: Question, hits: Sequence[Hit], *, patterns: bool = False) -> Retrieved:
    """Look for the question's answers in each of its hits: by token match, or as regular expressions."""
    found = matcher(question, patterns=patterns)
    return Retrieved(question, tuple(hits), tuple(found(hit.passage.text) for hit in hits))


def ask(retriever: Retriever, questions: Sequence[Question], k: int, *, patterns: bool = False) -> Iterator[Retrieved]:
    """Search each question to depth `k` and match its answers: in order, batch by batch.

    With `patterns` the answers are regular expressions, as CuratedTREC's are.

    Raises:
        UsageError: what `Retriever.search` refuses.
        InputError: an answer is no regular expression, or one that never ends.
    """
    for start in range(0, len(questions), BATCH):
        batch = questions[start : start + BATCH]
        found = retriever.search([question.text for question in batch], k)
        yield from (match_hits(question, hits, patterns=patterns) for question, hits in zip(batch, found, strict=True))


def cutoffs(k: int) -> list[int]:
    """Return the depths to report for a search of depth `k`: 1, 5, 20, 100 as far as they go, and `k`.

    >>> cutoffs(10)
    [1, 5, 10]
    """
    return sorted({depth for depth in CUTOFFS if depth <= k} | {k})
