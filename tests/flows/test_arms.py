"""The ablations of the paper's table 6, as docs/howto/train/rag.md describes them: train, evaluate and compare arms."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, read_blocks
from tests.fixtures.tiny_generators import save_bart

BM25_RECIPE = """
[index.bm25]
factory = "BM25"

[gate]
floors = { hnsw = { mean = 0.0, p5 = 0.0 }, bm25 = { mean = 0.0, p5 = 0.0 } }
"""
SMALL_TRAINING = """
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
QUESTIONS = [
    {"question": "Who wrote What is Property?", "answers": ["Proudhon"]},
    {"question": "What is autism?", "answers": ["disorder"]},
]


@pytest.fixture
def store(library: Path, tmp_path: Path, bookwheel: Any) -> Path:
    """A copy of the library with a BM25 index."""
    store, recipe = Path(shutil.copytree(library, tmp_path / "store")), tmp_path / "recipe.toml"
    recipe.write_text(BM25_RECIPE)
    result = bookwheel("add-index", "latest", "--recipe", recipe, "--index", "bm25", "--store", store)
    assert result.code == 0, result.err
    return store


def write_settings_of_arms(folder: Path) -> dict[str, Path]:
    """Write the settings of each arm: settings for a small training, then those of the documentation page."""
    texts = {block.note.partition(".")[0]: block.text for block in read_blocks(PAGE) if block.mark == "file"}
    paths = {}
    for name, text in {"whole": "", **texts}.items():
        paths[name] = folder / f"{name}.toml"
        paths[name].write_text(SMALL_TRAINING + text.replace("[rag]", ""))
    return paths


def test_documented_arms_are_trained_evaluated_and_compared(store: Path, tmp_path: Path, bookwheel: Any) -> None:
    questions, generator = tmp_path / "questions.jsonl", save_bart(tmp_path / "bart")
    questions.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    settings = write_settings_of_arms(tmp_path)
    assert list(settings) == ["whole", "frozen", "words"]
    evaluations = {}
    for name, training in settings.items():
        data = ["--train", questions, "--dev", questions, "--generator", generator, "--training", training]
        trained = bookwheel("finetune", "rag-sequence", "--store", store, *data, "--name", name, "--max-steps", 1)
        assert trained.code == 0, trained.err
        retriever = ["--retriever", "bm25"] if name == "words" else []
        options = ["--questions", questions, "--model", name, *retriever, "--json"]
        result = bookwheel("evaluate", "--store", store, *options)
        assert result.json["retriever"] == (retriever or ["", "hnsw"])[1]
        evaluations[name] = f"evaluation:{result.json['evaluation'][:12]}"
    for arm in ("frozen", "words"):
        comparison = bookwheel("diff", evaluations[arm], evaluations["whole"], "--store", store, "--json").json
        (pairs,) = comparison["retrievers"].values()
        assert {"value", "low", "high"} <= set(pairs["EM"]["difference"])
