"""Lists of passages, found once: recorded by what decides them, and never a text's own passage."""

from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.store.objects.memo import NotRecordedError
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import Reading
from rag_model.training.data.memory import Memory
from rag_model.training.data.passage_lists import Asked, Lister
from tests.fixtures.tiny_snapshot import publish_tiny

ARTICLES = {f"City {x}": f"the king of city {x} was {x * 3}." for x in "abcdef"}


@pytest.fixture
def lister(tiny: Path, tmp_path: Path) -> Lister:
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, tiny, ARTICLES, tmp_path / "work")
    encoder = TrainableEncoder.load(tiny, "question", device="cpu")
    return Lister(Memory(snapshot, encoder), encoder, None, store, "sha256:encoder")


def test_they_are_what_the_retriever_finds(lister: Lister) -> None:
    asked = [Asked(f"q{x}", f"who was king of city {x}?", x) for x in "abc"]
    found = lister.lists(asked, 2)
    texts = [one.text for one in asked]
    hits = lister.memory.recall(texts, lister.encoder.encode_questions(texts), 2).hits
    assert [list(one.rows) for one in found] == [[hit.row for hit in some] for some in hits]
    (first, *_) = lister.readings(found)
    passages = tuple((hit.passage.title, hit.passage.text) for hit in hits[0])
    assert first == Reading("qa", texts[0], "a", passages)


def test_a_text_is_not_found_for_itself(lister: Lister) -> None:
    source = lister.memory.snapshot.passages([2])[0]
    (found,) = lister.lists([Asked("text", source.text[:12], source.text[12:], source)], 10)
    assert sorted(found.rows) == [0, 1, 3, 4, 5]
    assert lister.readings([found])[0].plain
    (few,) = lister.lists([Asked("text", source.text[:12], source.text[12:], source)], 3)
    assert few.rows == found.rows[:3], "as many as wanted, although its own was found too"


def test_they_are_found_once(lister: Lister) -> None:
    asked = [Asked("q", "who was king of city a?", "a")]
    store = lister.store
    assert store is not None
    found = lister.lists(asked, 2)
    store.memo = replace(store.memo, makes=False)
    assert lister.lists([replace(asked[0], answer="another")], 2)[0].rows == found[0].rows
    for other, k in ((lister, 3), (replace(lister, identity="x"), 2), (replace(lister, retriever="exact"), 2)):
        with pytest.raises(NotRecordedError):
            other.lists(asked, k)
    with pytest.raises(NotRecordedError):
        lister.lists([replace(asked[0], text="who?")], 2)
    assert replace(lister, store=None).lists(asked, 2) == found, "nothing is recorded without a store"


def test_a_snapshot_of_one_passage_has_a_list_for_questions_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, tiny, {"City a": "the king was a."}, tmp_path / "work")
    encoder = TrainableEncoder.load(tiny, "question", device="cpu")
    lister = Lister(Memory(snapshot, encoder), encoder, None)
    source = snapshot.passages([0])[0]
    found = lister.lists([Asked("q", "who?", "a"), Asked("text", "the king", " was a.", source)], 4)
    assert [(one.asked.id, one.rows) for one in found] == [("q", (0,))]
