"""Windows of whole sentences never end inside one that would fit."""

from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.chunkers.running import SENTENCE, run_together
from rag_model.corpus.chunkers.sentences import Sentences
from rag_model.corpus.records import Article, Section
from tests.fixtures.hostile_texts import ARTICLES


def test_a_window_takes_as_many_sentences_as_fit() -> None:
    text = "One two three. Four five. Six seven eight nine ten. Eleven."
    sections = (Section("", text), Section("Life", "Born. Died."))
    passages = list(Sentences(5)(Article("12", 7, "Ada", sections)))
    assert [(p.id, p.text, p.start_word) for p in passages] == [
        ("12:0", "One two three. Four five.", 0),
        ("12:1", "Six seven eight nine ten.", 5),
        ("12:2", "Eleven.", 10),
        ("12:Life.0", "Born. Died.", 11),
    ]


def test_a_longer_sentence_is_cut_between_words() -> None:
    passages = list(Sentences(3)(Article("12", 7, "Ada", (Section("", "All. One two three four five. End."),))))
    assert [p.text for p in passages] == ["All.", "One two three", "four five. End."]


@given(ARTICLES, st.integers(1, 12))
def test_no_window_ends_inside_a_sentence_that_fits(article: Article, words: int) -> None:
    running = run_together(article)
    ends = {end for _, end in running.pieces((0, len(running.words)), SENTENCE)}
    long = [(a, b) for a, b in running.pieces((0, len(running.words)), SENTENCE) if b - a > words]
    for passage in Sentences(words)(article):
        end = passage.start_word + passage.n_words
        assert end in ends or any(start < end < after for start, after in long)
