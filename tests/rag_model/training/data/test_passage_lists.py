"""Lists of passages, found once: recorded by what decides them, and never a text's own passage."""

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


def test_they_are_what_the_retriever_finds(lister: PassageLister) -> None:
    asked = [PassageList(f"q{x}", f"who was king of city {x}?", x) for x in "abc"]
    found = lister.retrieve_lists(asked, 2)
    texts = [one.text for one in asked]
    hits = lister.memory.retrieve(texts, lister.encoder.encode_questions(texts), 2).hits
    assert [list(one.rows) for one in found] == [[hit.row for hit in some] for some in hits]
    (first, *_) = lister.to_scoring_examples(found)
    passages = tuple((hit.passage.title, hit.passage.text) for hit in hits[0])
    assert first == ScoringExample("qa", texts[0], "a", passages)


def test_a_text_is_not_found_for_itself(lister: PassageLister) -> None:
    source = lister.memory.snapshot.passages([2])[0]
    (found,) = lister.retrieve_lists([PassageList("text", source.text[:12], source.text[12:], source)], 10)
    assert sorted(found.rows) == [0, 1, 3, 4, 5]
    assert lister.to_scoring_examples([found])[0].is_plain_text
    (few,) = lister.retrieve_lists([PassageList("text", source.text[:12], source.text[12:], source)], 3)
    assert few.rows == found.rows[:3], "as many as wanted, although its own was found too"


def test_another_model_behind_a_name_of_the_retriever_gives_other_lists(lister: PassageLister, tmp_path: Path) -> None:
    judge, asked = save_cross_encoder(tmp_path / "judge"), [PassageList("q", "who was king of city a?", "a")]
    reranking = replace(lister, retriever=f"rerank(exact, {judge}, 3)")
    reranking = replace(reranking, memory=PassageMemory(lister.memory.snapshot, lister.encoder, reranking.retriever))
    found = reranking.retrieve_lists(asked, 2)
    assert lister.store is not None
    lister.store.memo = replace(lister.store.memo, can_produce=False)
    assert reranking.retrieve_lists(asked, 2) == found
    save_cross_encoder(judge, seed=4)
    with pytest.raises(ResultNotRecordedError):
        reranking.retrieve_lists(asked, 2)


def test_they_are_found_once(lister: PassageLister) -> None:
    asked = [PassageList("q", "who was king of city a?", "a")]
    store = lister.store
    assert store is not None
    found = lister.retrieve_lists(asked, 2)
    store.memo = replace(store.memo, can_produce=False)
    assert lister.retrieve_lists([replace(asked[0], answer="another")], 2)[0].rows == found[0].rows
    for other, k in ((lister, 3), (replace(lister, identity="x"), 2), (replace(lister, retriever="exact"), 2)):
        with pytest.raises(ResultNotRecordedError):
            other.retrieve_lists(asked, k)
    with pytest.raises(ResultNotRecordedError):
        lister.retrieve_lists([replace(asked[0], text="who?")], 2)
    assert replace(lister, store=None).retrieve_lists(asked, 2) == found, "nothing is recorded without a store"


def test_a_snapshot_of_one_passage_has_a_list_for_questions_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, tiny, {"City a": "the king was a."}, tmp_path / "work")
    encoder = TrainableEncoder.load(tiny, "question", device="cpu")
    lister = PassageLister(PassageMemory(snapshot, encoder), encoder, None)
    source = snapshot.passages([0])[0]
    found = lister.retrieve_lists(
        [PassageList("q", "who?", "a"), PassageList("text", "the king", " was a.", source)], 4
    )
    assert [(one.id, one.rows) for one in found] == [("q", (0,))]
