"""Matches counted once: two overlapping passages may hold one and the same place of an answer."""

from collections.abc import Iterable, Sequence

from rag_model.corpus.chunkers.words import split_words
from rag_model.corpus.records import Passage
from rag_model.evaluation.match import tokens
from rag_model.evaluation.spans import Span, union


def counted_once(answers: Iterable[str], passages: Sequence[Passage]) -> tuple[bool, ...]:
    """Return for each passage, best first, whether it holds a place of an answer that no better one holds.

    Answers are matched as `match.has_answer` does. Places are words of a page: where two passages of a page say by
    `start_word` and `n_words` that they share words, and these are equal, an answer in them counts for the better one.
    """
    wanted = [found for answer in answers if (found := tokens(answer))]
    return tuple(
        _count(wanted, passage.text) > sum(_count(wanted, text) for text in _read_before(passage, passages[:rank]))
        for rank, passage in enumerate(passages)
    )


def _read_before(passage: Passage, better: Sequence[Passage]) -> list[str]:
    """Return the runs of a passage's text that better passages of its page hold."""
    words = split_words(passage.text)
    found = (_shared(passage, words, other) for other in better if other.page_id == passage.page_id)
    return ["".join(words[start:end]) for start, end in union(span for span in found if span)]


def _shared(passage: Passage, words: Sequence[str], other: Passage) -> Span | None:
    """Return the words of a passage, counted in it, that another one holds too, or None."""
    apart = other.start_word - passage.start_word
    start, end = max(0, apart), min(passage.n_words, apart + other.n_words)
    others = split_words(other.text)[max(0, -apart) :][: max(0, end - start)]
    return (start, end) if start < end and words[start:end] == others else None


def _count(wanted: Sequence[Sequence[str]], text: str) -> int:
    said = tokens(text)
    return sum(said[at : at + len(one)] == one for one in wanted for at in range(len(said)))
