"""An answer in two overlapping passages is one match; the same words at another place are another."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.chunkers.chunker import passage_of
from rag_model.corpus.records import Article, Passage
from rag_model.evaluation.match import has_answer
from rag_model.evaluation.repeated import counted_once

SENTENCE = "the king of France met the king of Spain in Paris and left Paris"
WORDS = [f" {word}" for word in SENTENCE.split()]


def passage(start: int, end: int, page: str = "1", words: list[str] = WORDS) -> Passage:
    return passage_of(Article(page, 0, "T", ()), str(start), "", start, words[start:end])


def test_a_place_counts_for_the_best_passage_that_holds_it() -> None:
    better, other = passage(6, 11), passage(9, 12)
    assert counted_once(["Paris"], [better, other]) == (True, False)
    assert counted_once(["Paris"], [better, passage(9, 14)]) == (True, True), "another Paris follows"
    assert counted_once(["Paris"], [better, passage(9, 12, page="2")]) == (True, True)
    assert counted_once(["king of Spain"], [passage(0, 7), passage(5, 9)]) == (False, True), "half of it was read"


def test_passages_of_sections_that_count_words_each_from_its_heading() -> None:
    """Their numbers say that they overlap; their words say that they do not."""
    assert counted_once(
        ["Paris"], [passage(0, 2, words=[" In", " Paris"]), passage(0, 2, words=[" Near", " Paris"])]
    ) == (
        True,
        True,
    )


@given(st.lists(st.tuples(st.integers(0, 13), st.integers(1, 6)), max_size=6))
def test_every_place_that_was_read_counts_exactly_once(spans: list[tuple[int, int]]) -> None:
    passages = [passage(start, min(start + n, len(WORDS))) for start, n in spans]
    read: set[int] = set()
    expected = []
    for one in passages:
        own = set(range(one.start_word, one.start_word + one.n_words))
        expected.append(bool({10, 13} & (own - read)))
        read |= own
    flags = counted_once(["Paris"], passages)
    assert list(flags) == expected
    assert all(has_answer(["Paris"], one.text) for one, flag in zip(passages, flags, strict=True) if flag)
