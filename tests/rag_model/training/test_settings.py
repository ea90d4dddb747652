"""The rendered settings file: it parses to the defaults, and a comment gives the source of each."""

import tomllib
from dataclasses import dataclass, fields
from typing import Any

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import CollapseLimits
from rag_model.toml import from_table
from rag_model.training.objectives.dpr import DPR, DprRecipe
from rag_model.training.objectives.objective import Objective, list_objectives
from rag_model.training.settings import parse_field_comments, parse_settings, render_settings


@pytest.mark.parametrize("objective", list_objectives(), ids=lambda objective: str(objective.name))
def test_rendered_settings_parse_to_the_defaults(objective: Objective[Any]) -> None:
    text = render_settings(objective)
    assert from_table(objective.settings, tomllib.loads(text), "the file") == objective.settings()
    assert all("#" in line for line in text.splitlines() if line and line[0] not in "#[")


@pytest.mark.parametrize("objective", list_objectives(), ids=lambda objective: str(objective.name))
def test_unknown_goal_is_refused(objective: Objective[Any]) -> None:
    defaults = objective.settings()
    tables = [field.name for field in fields(defaults) if hasattr(getattr(defaults, field.name), "goal")]
    assert tables
    for table in tables:
        with pytest.raises(UsageError, match="goal"):
            parse_settings(objective.name, {table: {"goal": "luck"}}, None, unit_vectors=False)


def test_comments_give_source_and_dependence_of_the_default() -> None:
    lines = render_settings(DPR).splitlines()
    (batch,) = (line for line in lines if line.startswith("batch_size"))
    assert batch.split("#")[0].strip() == "batch_size = 128"
    assert "instead of 128 over 8 GPUs (section 5), because" in batch
    (temperature,) = (line for line in lines if "temperature =" in line)
    assert temperature.startswith("# temperature = 1.0")
    assert "0.05 if the encoder's vectors have length 1" in temperature
    assert any(line.startswith("# retriever =   ") for line in lines)
    (search,) = (line for line in lines if line.startswith("search"))
    assert "# one of bm25, snapshot, own; source of the negatives: `bm25` searches with BM25 as in DPR" in search


def test_comments_include_those_of_the_base_class() -> None:
    assert parse_field_comments(CollapseLimits)["most_unchanged"].startswith(
        "Maximum share of answers that stay the same if a question gets the passages of another."
    )
    comments = parse_field_comments(DprRecipe)
    assert comments["seed"] == "random seed of the example order and of the negatives"  # inherited
    assert comments["goal"] == "dev measure that selects the best weights; DPR code: average rank"  # of DprRecipe

    @dataclass
    class Uncommented:
        plain: int = 1

    assert parse_field_comments(Uncommented) == {}


def test_recipe_refuses_an_unknown_choice() -> None:
    with pytest.raises(UsageError, match=r"goal 'none' of \[dpr\] is unknown: use one of average_rank"):
        DprRecipe(goal="none")  # type: ignore[arg-type]
