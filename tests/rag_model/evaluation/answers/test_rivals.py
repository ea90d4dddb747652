"""Conditions with other retrievers and with the whole corpus, on a real snapshot."""

from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.answers.ablation import (
    BM25,
    CLOSED_BOOK,
    FROZEN_RETRIEVER,
    GOLD_PASSAGE,
    OPEN_BOOK,
    SHUFFLED_PASSAGES,
    WHOLE_CORPUS,
    AblationSettings,
)
from rag_model.evaluation.answers.examination import (
    AnswerCache,
    AnswerEvaluation,
    list_whole_corpus,
    open_other_retrievers,
    prepare_whole_corpus,
)
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.reading.concat import ConcatReader
from rag_model.reading.confidence import AbstainingReader, Threshold
from rag_model.retrieve.factory import open_retriever
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.citing_writer import CitingWriter
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {"Farm": "a novel by Orwell", "Nile": "it flows to the Mediterranean", "Rome": "a city on the Tiber"}
QUESTIONS = [
    Question("a", "Who wrote the novel?", ("Orwell",)),
    Question("b", "Which city lies on the Tiber?", ("Rome",)),
    Question("c", "zzz", ("x",)),  # occurs in no passage
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(str(tmp_path_factory.mktemp("rivals")), create=True)


@pytest.fixture(scope="module")
def snapshot(store: Store, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return publish_tiny(store, tiny, ARTICLES, tmp_path_factory.mktemp("work"), bm25=True)


def test_other_retrievers_are_those_that_the_snapshot_has(store: Store, snapshot: Snapshot, tiny: Path) -> None:
    encoder = Encoder.load(tiny, "question", threads=1)
    retrievers = open_other_retrievers(snapshot, store, "exact", encoder)
    assert list(retrievers) == [BM25, FROZEN_RETRIEVER]
    assert [hit.passage.title for hit in retrievers[BM25].search(["Tiber"], 2)[0]] == ["Rome"]
    assert all(
        hit.inner_product is not None for retriever in retrievers.values() for hit in retriever.search(["novel"], 1)[0]
    )
    # This reader searches with BM25 itself, and has no encoder.
    assert list(open_other_retrievers(snapshot, store, "bm25", None)) == []
    assert list(open_other_retrievers(snapshot, store, None, None)) == [BM25]


def test_a_corpus_that_fits_into_a_prompt_is_read_as_a_whole(store: Store, snapshot: Snapshot) -> None:
    retriever = open_retriever(snapshot, "bm25")
    questions = [question.text for question in QUESTIONS]
    hits = list_whole_corpus(ConcatReader(retriever, CitingWriter()), retriever, questions)
    assert [hit.passage.title for hit in hits] == list(ARTICLES)
    assert list_whole_corpus(ConcatReader(retriever, CitingWriter(max_prompt_tokens=40)), retriever, questions) == []


def test_only_a_reader_with_one_prompt_reads_the_whole_corpus(store: Store, snapshot: Snapshot) -> None:
    retriever = open_retriever(snapshot, "bm25")
    questions = [question.text for question in QUESTIONS]
    concat_reader = ConcatReader(retriever, CitingWriter())
    abstaining = AbstainingReader(concat_reader, Threshold("retrieval", 0.0))
    whole_corpus = prepare_whole_corpus({"marginal": abstaining, "concat": concat_reader}, retriever, questions)
    assert (whole_corpus.reader, len(whole_corpus.hits), whole_corpus.note) == ("concat", snapshot.n, "")
    first_cache = AnswerCache(store, abstaining, {"test": "places", "place": 0})
    last_cache = AnswerCache(store, concat_reader, {"test": "places", "place": 1})
    settings = EvaluationSettings(ablations=AblationSettings(sweep=(2,)), depth=3)
    question_set = QuestionSet(tuple(QUESTIONS))
    evaluation = AnswerEvaluation(
        retriever, first_cache, question_set, 1, snapshot.n, settings, {"concat": last_cache}, whole_corpus=whole_corpus
    )
    evaluation.retrieve()
    (condition,) = (condition for condition in evaluation.list_conditions() if WHOLE_CORPUS in condition.name)
    assert (condition.name, condition.reader, condition.k) == ("concat, whole corpus", "concat", snapshot.n)
    assert evaluation.notes[0].endswith("the others (concat) answer the open book, and concat the whole corpus too")
    assert prepare_whole_corpus({"marginal": abstaining}, retriever, questions).note.endswith("add --reader concat")
    narrow_reader = ConcatReader(retriever, CitingWriter(max_prompt_tokens=40))
    assert prepare_whole_corpus({"concat": narrow_reader}, retriever, questions).note.endswith(
        "do not fit into a prompt of concat"
    )


def test_every_condition_has_metrics_and_costs(store: Store, snapshot: Snapshot) -> None:
    retriever = open_retriever(snapshot, "bm25(k1=1.2)")
    reader = ConcatReader(retriever, CitingWriter())
    answer_cache = AnswerCache(store, reader, {"test": "rivals"})
    whole_corpus = prepare_whole_corpus({"concat": reader}, retriever, [question.text for question in QUESTIONS])
    other_retrievers = open_other_retrievers(snapshot, store, "bm25(k1=1.2)", None)
    settings = EvaluationSettings(ablations=AblationSettings(sweep=(2,)), depth=3)
    evaluation = AnswerEvaluation(
        retriever,
        answer_cache,
        QuestionSet(tuple(QUESTIONS)),
        1,
        snapshot.n,
        settings,
        None,
        other_retrievers,
        whole_corpus,
    )
    evaluation.retrieve()
    for condition in evaluation.list_conditions():
        evaluation.answer_condition(condition)
    rows = {row.name: row for row in evaluation.results}
    assert {OPEN_BOOK, CLOSED_BOOK, GOLD_PASSAGE, SHUFFLED_PASSAGES, BM25, WHOLE_CORPUS} <= set(rows)
    assert rows[OPEN_BOOK].metrics["EM"].value == rows[BM25].metrics["EM"].value == pytest.approx(1 / 3)
    assert rows[WHOLE_CORPUS].k == snapshot.n
    # This writer quotes the passage that it cites.
    assert rows[WHOLE_CORPUS].metrics["citation-precision"].value == pytest.approx(1)
    cited = rows[OPEN_BOOK].metrics["cited"]
    assert (cited.value, cited.n) == (1, 2)  # the third question has no hits, so it is answered closed book
    assert list(evaluation.search_milliseconds) == ["bm25(k1=1.2)", "reading of passages"]
    assert "EM is 0.000 higher than closed book" in evaluation.retrieval_worth
    assert evaluation.retrieval_worth.endswith("tokens more per question")
