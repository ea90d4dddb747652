"""Plain texts of a snapshot as examples, each split into a beginning and a continuation."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rag_model.corpus.records import Passage
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.texts import draw_text_examples, passages_overlap
from tests.fixtures.tiny_generators import save_llama
from tests.fixtures.tiny_snapshot import publish_tiny

LONG_ARTICLES = {
    f"City {x}": f"the king of the city of {x} was {x * 3}, and who was in the answer is {x}." for x in "abcdefghij"
}


@pytest.fixture(scope="module")
def snapshot(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    articles = LONG_ARTICLES | {"short": "a b", "blank": "", "spaces": f"the king {' ' * 20}"}
    return publish_tiny(store, tiny, articles, tmp_path_factory.mktemp("work"))


def test_text_is_split_into_beginning_and_continuation(snapshot: Snapshot, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "llama"))
    examples = draw_text_examples(snapshot, tokenizer, 100, 12, seed=1)
    assert {passage.title for passage, _, _ in examples} == set(LONG_ARTICLES), "shorter texts are left out"
    for passage, beginning, continuation in examples:
        assert passage.text.startswith(beginning + continuation)
        assert len(tokenizer(beginning, add_special_tokens=False)["input_ids"]) == 12
        assert len(tokenizer(continuation, add_special_tokens=False)["input_ids"]) == 12
    longer = draw_text_examples(snapshot, tokenizer, 100, 20, seed=1)
    assert all(first + rest == passage.text for passage, first, rest in longer), "the continuation may be shorter"


def test_drawn_texts_depend_only_on_the_seed(snapshot: Snapshot, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "llama"))
    first, repeated, other_seed = (draw_text_examples(snapshot, tokenizer, 4, 12, seed) for seed in (1, 1, 2))
    assert len(first) == len({passage.id for passage, _, _ in first}) == 4
    assert first == repeated != other_seed
    assert draw_text_examples(snapshot, tokenizer, 0, 12, seed=1) == []


def test_overlapping_windows_of_a_page_share_words() -> None:
    passage = Passage("1-0", "1", 1, "t", "", "a b c d", 0, 4, "a")
    assert passages_overlap(passage, passage)
    assert passages_overlap(passage, replace(passage, hash="b", start_word=3))
    assert not passages_overlap(passage, replace(passage, hash="b", start_word=4))
    assert not passages_overlap(passage, replace(passage, hash="b", page_id="2"))
    assert passages_overlap(passage, replace(passage, page_id="2")), "another page has the same text"
