"""Plain text of a snapshot as examples: what comes first, what follows, and which passages share words."""

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

LONG = {
    f"City {x}": f"the king of the city of {x} was {x * 3}, and who was in the answer is {x}." for x in "abcdefghij"
}


@pytest.fixture(scope="module")
def snapshot(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    articles = LONG | {"short": "a b", "blank": "", "spaces": f"the king {' ' * 20}"}
    return publish_tiny(store, tiny, articles, tmp_path_factory.mktemp("work"))


def test_the_text_goes_on_where_it_began(snapshot: Snapshot, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "llama"))
    found = draw_text_examples(snapshot, tokenizer, 100, 12, seed=1)
    assert {passage.title for passage, _, _ in found} == set(LONG), "a text that ends too early is passed over"
    for passage, first, rest in found:
        assert passage.text.startswith(first + rest)
        assert len(tokenizer(first, add_special_tokens=False)["input_ids"]) == 12
        assert len(tokenizer(rest, add_special_tokens=False)["input_ids"]) == 12
    everything = draw_text_examples(snapshot, tokenizer, 100, 20, seed=1)
    assert all(first + rest == passage.text for passage, first, rest in everything), "the rest may be shorter"


def test_the_draw_depends_on_the_seed_alone(snapshot: Snapshot, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "llama"))
    first, again, other = (draw_text_examples(snapshot, tokenizer, 4, 12, seed) for seed in (1, 1, 2))
    assert len(first) == len({passage.id for passage, _, _ in first}) == 4
    assert first == again != other
    assert draw_text_examples(snapshot, tokenizer, 0, 12, seed=1) == []


def test_windows_of_a_page_overlap_and_its_other_passages_do_not() -> None:
    passage = Passage("1-0", "1", 1, "t", "", "a b c d", 0, 4, "a")
    assert passages_overlap(passage, passage)
    assert passages_overlap(passage, replace(passage, hash="b", start_word=3))
    assert not passages_overlap(passage, replace(passage, hash="b", start_word=4))
    assert not passages_overlap(passage, replace(passage, hash="b", page_id="2"))
    assert passages_overlap(passage, replace(passage, page_id="2")), "the same text elsewhere"
