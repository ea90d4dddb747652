"""The relevant passages of questions, and the words that they share with the questions."""

import pytest

from rag_model.errors import InputError
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.comparison import (
    count_unknown_questions,
    find_low_overlap,
    read_gold_texts,
)
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.store.versions.snapshot import Snapshot


def test_relevant_passages_are_read_by_id_and_by_page(snapshot: Snapshot) -> None:
    passages = read_gold_texts(
        snapshot, RetrievalJudge("passages", {"q": {"8-0": 1, "77-0": 1}, "r": {"1-0": 0}, "s": {"9-9": 2}})
    )
    assert list(passages) == ["8-0"]
    assert passages["8-0"] == ["Aikido Aikido is a modern Japanese martial art developed by Morihei Ueshiba."]
    pages = read_gold_texts(snapshot, RetrievalJudge("pages", {"q": {"8": 1}}))
    assert pages == {"8": passages["8-0"]}


def test_questions_without_their_passages_are_counted(snapshot: Snapshot) -> None:
    judge = RetrievalJudge("passages", {"q": {"8-0": 1}, "r": {"77-0": 1}})
    assert count_unknown_questions(judge, read_gold_texts(snapshot, judge)) == 1


def test_ids_of_another_corpus_are_refused(snapshot: Snapshot) -> None:
    with pytest.raises(InputError, match="has none of the 1 passages that the questions name, such as 'nq-7'"):
        read_gold_texts(snapshot, RetrievalJudge("passages", {"q": {"nq-7": 1}}))


@pytest.mark.parametrize(
    ("question", "is_low"),
    [
        ("Who developed a martial art?", False),  # develop, martial, art
        ("Who was developing such an art?", True),  # develop, art: inflected forms are one stem
        ("who is it that has the what and the which of a", True),  # stop words alone
        ("AIKIDO: developed, modern", False),  # the title counts, as case does not
        ("soroban", True),
    ],
)
def test_a_question_with_up_to_two_shared_stems_has_low_overlap(question: str, is_low: bool) -> None:
    texts = {"8-0": ["Aikido Aikido is a modern Japanese martial art developed by Morihei Ueshiba."]}
    questions = [Question("q", question)]
    assert find_low_overlap(questions, {"q": {"8-0": 1}}, texts) == ([0] if is_low else [])


def test_one_relevant_passage_with_many_shared_words_is_high_overlap() -> None:
    texts = {"a": ["red green blue"], "b": ["black white"]}
    questions = [Question("q", "red green blue paint"), Question("lost", "red")]
    grades = {"q": {"a": 1, "b": 1}, "lost": {"c": 1}}
    assert find_low_overlap(questions, grades, texts) == []  # "lost" names no passage of the corpus
    assert find_low_overlap(questions, grades | {"q": {"a": 0, "b": 1}}, texts) == [0]
