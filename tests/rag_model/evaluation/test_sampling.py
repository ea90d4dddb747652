"""Sampled queries repeat, and are sentences of the passages."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.evaluation.questions import sample_rows, sample_sentences


@given(st.integers(0, 500), st.integers(0, 50), st.integers())
def test_rows_are_distinct_ascending_and_repeat(n: int, count: int, seed: int) -> None:
    rows = sample_rows(n, count, seed)
    assert rows == sorted(set(rows)) == sample_rows(n, count, seed)
    assert len(rows) == min(n, count)
    assert all(0 <= row < n for row in rows)


def test_another_seed_draws_other_rows() -> None:
    assert sample_rows(1000, 20, 0) != sample_rows(1000, 20, 1)


def test_one_whole_sentence_of_each_passage_is_sampled(make_passage) -> None:
    text = "The first sentence stands here. The second one asks why? See p. 3. 次の文。"
    passages = [make_passage(str(page), f"{text} {page}") for page in range(50)]
    sentences = sample_sentences(passages, 0)
    assert sentences == sample_sentences(passages, 0) != sample_sentences(passages, 1)
    assert set(sentences) == {"The first sentence stands here.", "The second one asks why?"}


def test_the_choice_does_not_depend_on_the_order(make_passage) -> None:
    passages = [make_passage(str(page), "One sentence is here. Another sentence follows it.") for page in range(9)]
    assert sample_sentences(passages[::-1], 3) == sample_sentences(passages, 3)[::-1]


def test_a_passage_without_a_sentence_is_used_as_a_query(make_passage) -> None:
    assert sample_sentences([make_passage("1", "See p. 3."), make_passage("2", " ")], 0) == [
        "See p. 3.",
        "Title 2",
    ]
