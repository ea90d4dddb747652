"""Passage lists of questions and plain texts, which are recorded and reused."""

from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.store.objects.memo import ResultNotRecordedError
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import ScoringExample
from rag_model.training.data.memory import PassageMemory
from rag_model.training.data.passage_lists import PassageList, PassageLister
from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {f"City {x}": f"the king of city {x} was {x * 3}." for x in "abcdef"}


@pytest.fixture
def lister(tiny: Path, tmp_path: Path) -> PassageLister:
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, tiny, ARTICLES, tmp_path / "work")
    encoder = TrainableEncoder.load(tiny, "question", device="cpu")
    return PassageLister(PassageMemory(snapshot, encoder), encoder, None, store, "sha256:encoder")


def test_lists_equal_the_hits_of_the_retriever(lister: PassageLister) -> None:
    requests = [PassageList(f"q{x}", f"who was king of city {x}?", x) for x in "abc"]
    lists = lister.retrieve_lists(requests, 2)
    texts = [request.text for request in requests]
    hits = lister.memory.retrieve(texts, lister.encoder.encode_questions(texts), 2).hits
    assert [list(each.rows) for each in lists] == [[hit.row for hit in hits_of_question] for hits_of_question in hits]
    (first, *_) = lister.to_scoring_examples(lists)
    passages = tuple((hit.passage.title, hit.passage.text) for hit in hits[0])
    assert first == ScoringExample("qa", texts[0], "a", passages)


def test_source_passage_is_not_in_the_list_of_a_text(lister: PassageLister) -> None:
    source = lister.memory.snapshot.passages([2])[0]
    (complete,) = lister.retrieve_lists([PassageList("text", source.text[:12], source.text[12:], source)], 10)
    assert sorted(complete.rows) == [0, 1, 3, 4, 5]
    assert lister.to_scoring_examples([complete])[0].is_plain_text
    (short,) = lister.retrieve_lists([PassageList("text", source.text[:12], source.text[12:], source)], 3)
    assert short.rows == complete.rows[:3], "the source passage leaves no gap"


def test_changed_model_in_a_retriever_folder_invalidates_lists(lister: PassageLister, tmp_path: Path) -> None:
    judge, requests = save_cross_encoder(tmp_path / "judge"), [PassageList("q", "who was king of city a?", "a")]
    reranking = replace(lister, retriever=f"rerank(exact, {judge}, 3)")
    reranking = replace(reranking, memory=PassageMemory(lister.memory.snapshot, lister.encoder, reranking.retriever))
    lists = reranking.retrieve_lists(requests, 2)
    assert lister.store is not None
    lister.store.memo = replace(lister.store.memo, can_produce=False)
    assert reranking.retrieve_lists(requests, 2) == lists
    save_cross_encoder(judge, seed=4)
    with pytest.raises(ResultNotRecordedError):
        reranking.retrieve_lists(requests, 2)


def test_recorded_lists_are_reused(lister: PassageLister) -> None:
    requests = [PassageList("q", "who was king of city a?", "a")]
    store = lister.store
    assert store is not None
    lists = lister.retrieve_lists(requests, 2)
    store.memo = replace(store.memo, can_produce=False)
    assert lister.retrieve_lists([replace(requests[0], answer="another")], 2)[0].rows == lists[0].rows
    for other_lister, k in ((lister, 3), (replace(lister, identity="x"), 2), (replace(lister, retriever="exact"), 2)):
        with pytest.raises(ResultNotRecordedError):
            other_lister.retrieve_lists(requests, k)
    with pytest.raises(ResultNotRecordedError):
        lister.retrieve_lists([replace(requests[0], text="who?")], 2)
    assert replace(lister, store=None).retrieve_lists(requests, 2) == lists, "nothing is recorded without a store"


def test_snapshot_of_one_passage_has_lists_only_for_questions(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, tiny, {"City a": "the king was a."}, tmp_path / "work")
    encoder = TrainableEncoder.load(tiny, "question", device="cpu")
    lister = PassageLister(PassageMemory(snapshot, encoder), encoder, None)
    source = snapshot.passages([0])[0]
    lists = lister.retrieve_lists(
        [PassageList("q", "who?", "a"), PassageList("text", "the king", " was a.", source)], 4
    )
    assert [(each_list.id, each_list.rows) for each_list in lists] == [("q", (0,))]
