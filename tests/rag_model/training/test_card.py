"""Model cards: a YAML header for the hub, and a body with the origin of the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rag_model.training.finetuning import ModelCard, render_card
from rag_model.training.loop.checkpoint import SearchedSnapshot
from rag_model.training.loop.loop import TrainingResult
from rag_model.training.objectives.objective import get_objective, list_objective_names

INPUTS = {
    "kind": "dpr",
    "snapshot": "f" * 64,
    "models": {"question": "sha256:aa", "passage": "sha256:bb"},
    "recipe": {"loop": {"learning_rate": 2e-05}, "dpr": {"batch_size": 8}},
    "examples": {"train": "sha256:cc", "dev": "sha256:dd"},
}
CARD = ModelCard(
    description=get_objective("dpr").result,
    inputs=INPUTS,
    corpus={"base": "https://en.wikipedia.org/wiki/Main_Page", "licence": "CC BY-SA 4.0", "language": "en"},
    training_result=TrainingResult(
        1200, {"loss": 3.25}, {"loss": 1.5, "Success@20": 0.5}, Path("best"), best_step=1000
    ),
)


@pytest.mark.parametrize("kind", list_objective_names())
def test_header_is_yaml_and_body_has_the_lineage(kind: str) -> None:
    text = render_card(replace(CARD, inputs=INPUTS | {"kind": kind}, description=get_objective(kind).result))
    _, header, body = text.split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert (metadata["library_name"], metadata["language"]) == ("bookwheel", "en")
    assert kind in metadata["tags"]
    for text_part in ("f" * 64, "sha256:aa", "sha256:cc", "CC BY-SA 4.0", "1,200 steps", '"batch_size": 8'):
        assert text_part in body
    assert "| loss | 3.25 | 1.5 |" in body
    assert "| Success@20 |  | 0.5 |" in body, "a measure without an initial value has an empty cell"


def test_text_is_escaped_in_the_table() -> None:
    text = render_card(replace(CARD, corpus={"base": "a | b\nc", "licence": "d"}))
    assert "| its text | a \\| b c, d |" in text


def test_card_names_the_snapshots_of_later_steps() -> None:
    searched = SearchedSnapshot(0, "f" * 64), SearchedSnapshot(1500, "e" * 64)
    text = render_card(replace(CARD, training_result=replace(CARD.training_result, searched_snapshots=searched)))
    assert f"| asked from step 1,500 | {'e' * 64} |" in text
    assert "asked from step 0" not in text


def test_card_names_the_commit_of_a_hub_model() -> None:
    sources = {"question": f"me/tiny@{'c' * 40}", "passage": "/models/tiny"}
    text = render_card(replace(CARD, sources=sources))
    assert f"| began as (question) | me/tiny@{'c' * 40}, sha256:aa |" in text
    assert "| began as (passage) | sha256:bb |" in text, "a local path is left out"


def test_equal_cards_render_equally() -> None:
    assert render_card(CARD) == render_card(replace(CARD))
