"""The ablations of the paper's table 6, as in docs/howto/train/rag.md: train arms, evaluate and compare them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.fixtures.tiny_generators import save_bart

WORDS = """
[index.bm25]
factory = "BM25"

[gate]
floors = { hnsw = { mean = 0.0, p5 = 0.0 }, bm25 = { mean = 0.0, p5 = 0.0 } }
"""
SMALL = """
[loop]
learning_rate = 1e-3
cpu = true

[rag]
k = 2
batch_size = 2
answered = 0
refuse_collapse = false
"""
PAGE = ROOT / "docs" / "howto" / "train" / "rag.md"
ROWS = [
    {"question": "Who wrote What is Property?", "answers": ["Proudhon"]},
    {"question": "What is autism?", "answers": ["disorder"]},
]


@pytest.fixture
def store(library: Path, tmp_path: Path, bookwheel: Any) -> Path:
    """A copy of the library, with an index of words."""
    store, recipe = Path(shutil.copytree(library, tmp_path / "store")), tmp_path / "recipe.toml"
    recipe.write_text(WORDS)
    result = bookwheel("add-index", "latest", "--recipe", recipe, "--index", "bm25", "--store", store)
    assert result.code == 0, result.err
    return store


def arms(folder: Path) -> dict[str, Path]:
    """Write the settings of each arm: the page's own, after those that make a training small."""
    shown = {block.note.partition(".")[0]: block.text for block in blocks(PAGE) if block.mark == "file"}
    found = {}
    for name, text in {"whole": "", **shown}.items():
        found[name] = folder / f"{name}.toml"
        found[name].write_text(SMALL + text.replace("[rag]", ""))
    return found


def test_each_arm_is_trained_evaluated_and_compared(store: Path, tmp_path: Path, bookwheel: Any) -> None:
    asked, generator = tmp_path / "asked.jsonl", save_bart(tmp_path / "bart")
    asked.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = arms(tmp_path)
    assert list(settings) == ["whole", "frozen", "words"]
    kept = {}
    for name, training in settings.items():
        given = ["--train", asked, "--dev", asked, "--generator", generator, "--training", training, "--name", name]
        trained = bookwheel("finetune", "rag-sequence", "--store", store, *given, "--max-steps", 1)
        assert trained.code == 0, trained.err
        by = ["--retriever", "bm25"] if name == "words" else []
        result = bookwheel("evaluate", "--store", store, "--questions", asked, "--model", name, *by, "--json")
        assert result.json["retriever"] == (by or ["", "hnsw"])[1]
        kept[name] = f"evaluation:{result.json['evaluation'][:12]}"
    for other in ("frozen", "words"):
        beside = bookwheel("diff", kept[other], kept["whole"], "--store", store, "--json").json
        (pairs,) = beside["retrievers"].values()
        assert {"value", "low", "high"} <= set(pairs["EM"]["difference"])
