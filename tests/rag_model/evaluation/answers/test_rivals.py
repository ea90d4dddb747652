"""Other retrievers and the whole corpus, over a real snapshot."""

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
from tests.fixtures.citing_writer import Quoting
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {"Farm": "a novel by Orwell", "Nile": "it flows to the Mediterranean", "Rome": "a city on the Tiber"}
ASKED = [
    Question("a", "Who wrote the novel?", ("Orwell",)),
    Question("b", "Which city lies on the Tiber?", ("Rome",)),
    Question("c", "zzz", ("x",)),  # no passage has its word
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(str(tmp_path_factory.mktemp("rivals")), create=True)


@pytest.fixture(scope="module")
def snapshot(store: Store, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return publish_tiny(store, tiny, ARTICLES, tmp_path_factory.mktemp("work"), words=True)


def test_a_snapshot_gives_what_it_has(store: Store, snapshot: Snapshot, tiny: Path) -> None:
    encoder = Encoder.load(tiny, "question", threads=1)
    found = open_other_retrievers(snapshot, store, "exact", encoder)
    assert list(found) == [BM25, FROZEN_RETRIEVER]
    assert [hit.passage.title for hit in found[BM25].search(["Tiber"], 2)[0]] == ["Rome"]
    assert all(hit.inner_product is not None for one in found.values() for hit in one.search(["novel"], 1)[0])
    assert list(open_other_retrievers(snapshot, store, "bm25", None)) == []  # its own, and passages are not weighed
    assert list(open_other_retrievers(snapshot, store, None, None)) == [BM25]


def test_a_corpus_that_fits_into_a_prompt_is_read_whole(store: Store, snapshot: Snapshot) -> None:
    retriever = open_retriever(snapshot, "bm25")
    questions = [one.text for one in ASKED]
    hits = list_whole_corpus(ConcatReader(retriever, Quoting()), retriever, questions)
    assert [hit.passage.title for hit in hits] == list(ARTICLES)
    assert list_whole_corpus(ConcatReader(retriever, Quoting(max_prompt_tokens=40)), retriever, questions) == []


def test_the_reader_of_one_prompt_reads_the_corpus_whole_whichever_place_it_has(
    store: Store, snapshot: Snapshot
) -> None:
    retriever = open_retriever(snapshot, "bm25")
    questions = [one.text for one in ASKED]
    last = ConcatReader(retriever, Quoting())
    first = AbstainingReader(last, Threshold("retrieval", 0.0))  # reads no prompt of its own
    whole = prepare_whole_corpus({"marginal": first, "concat": last}, retriever, questions)
    assert (whole.reader, len(whole.hits), whole.missing) == ("concat", snapshot.n, "")
    by_first = AnswerCache(store, first, {"test": "places", "place": 0})
    by_last = AnswerCache(store, last, {"test": "places", "place": 1})
    settings = EvaluationSettings(ablations=AblationSettings(sweep=(2,)), depth=3)
    asked = QuestionSet(tuple(ASKED))
    seen = AnswerEvaluation(
        retriever, by_first, asked, 1, snapshot.n, settings, {"concat": by_last}, whole_corpus=whole
    )
    seen.retrieve()
    (read,) = (one for one in seen.list_conditions() if WHOLE_CORPUS in one.name)
    assert (read.name, read.reader, read.k) == ("concat, whole corpus", "concat", snapshot.n)
    assert seen.notes[0].endswith("the others (concat) answer the open book, and concat the whole corpus too")
    assert prepare_whole_corpus({"marginal": first}, retriever, questions).missing.endswith("add --reader concat")
    narrow = ConcatReader(retriever, Quoting(max_prompt_tokens=40))
    assert prepare_whole_corpus({"concat": narrow}, retriever, questions).missing.endswith(
        "do not fit into a prompt of concat"
    )


def test_every_condition_is_measured_and_priced(store: Store, snapshot: Snapshot) -> None:
    retriever = open_retriever(snapshot, "bm25(k1=1.2)")
    reader = ConcatReader(retriever, Quoting())
    answering = AnswerCache(store, reader, {"test": "rivals"})
    whole = prepare_whole_corpus({"concat": reader}, retriever, [one.text for one in ASKED])
    others = open_other_retrievers(snapshot, store, "bm25(k1=1.2)", None)
    settings = EvaluationSettings(ablations=AblationSettings(sweep=(2,)), depth=3)
    seen = AnswerEvaluation(
        retriever, answering, QuestionSet(tuple(ASKED)), 1, snapshot.n, settings, None, others, whole
    )
    seen.retrieve()
    for condition in seen.list_conditions():
        seen.answer_condition(condition)
    rows = {row.name: row for row in seen.results}
    assert {OPEN_BOOK, CLOSED_BOOK, GOLD_PASSAGE, SHUFFLED_PASSAGES, BM25, WHOLE_CORPUS} <= set(rows)
    assert rows[OPEN_BOOK].metrics["EM"].value == rows[BM25].metrics["EM"].value == pytest.approx(1 / 3)
    assert rows[WHOLE_CORPUS].k == snapshot.n
    assert rows[WHOLE_CORPUS].metrics["citation-precision"].value == pytest.approx(1)  # it says what the entry says
    cited = rows[OPEN_BOOK].metrics["cited"]
    assert (cited.value, cited.n) == (1, 2)  # of the third question nothing was found, and it alone is closed book
    assert list(seen.search_milliseconds) == ["bm25(k1=1.2)", "reading of passages"]
    assert "EM is 0.000 higher than closed book" in seen.retrieval_worth
    assert seen.retrieval_worth.endswith("tokens more per question")
