"""Write a model card: README.md with the model's origins and metadata for the Hugging Face hub."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_model.training.loop.checkpoint import SearchedSnapshot
from rag_model.training.objectives.objective import ModelDescription


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Summary of one of several stages of a training."""

    name: str
    steps: int
    best_step: int
    initial_measures: Mapping[str, float]  # on the dev set, before the stage
    best_measures: Mapping[str, float]
    trained_on: str = ""  # one sentence about the training data


@dataclass(frozen=True, slots=True)
class Card:
    """The contents of a model card."""

    kind: str  # the objective's name
    result: ModelDescription
    initial_models: Mapping[str, str]  # digests of the initial models' files, by part
    snapshot: str  # full id
    passages_source: str  # source of the snapshot's passages, and their licence
    example_digests: Mapping[str, str]  # by name of the set
    recipe: Mapping[str, Any]
    initial_measures: Mapping[str, float]  # on the dev set, before training
    best_measures: Mapping[str, float]
    steps: int
    language: str = ""
    # the snapshots that the training searched, by step
    searched_snapshots: Sequence[SearchedSnapshot] = ()
    stages: Sequence[StageSummary] = ()  # empty if there is only one


def write_card(card: Card) -> str:
    """Return the card as Markdown with a YAML head; equal cards give equal texts."""
    head = {
        "library_name": "bookwheel",
        "pipeline_tag": card.result.pipeline_tag,
        "tags": ["bookwheel", "retrieval-augmented-generation", card.kind],
        **({"language": card.language} if card.language else {}),
    }
    lines = [
        "---",
        # JSON is YAML
        *(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()),
        "---",
        f"# {card.kind}, trained by bookwheel",
        "",
        card.result.summary,
        "",
        f"    {card.result.usage}",
        "",
        "## Where it comes from",
        "",
        *_render_table(["what", "which"], _origin_rows(card)),
        "",
        f"## How it does after {card.steps:,} steps",
        "",
        "On the dev set, before training and with the best weights.",
        "",
        *_render_table(["measure", "before", "after"], _measure_rows(card.initial_measures, card.best_measures)),
        "",
        *(line for stage in card.stages for line in _render_stage(stage)),
        "## Recipe",
        "",
        "```json",
        json.dumps(card.recipe, indent=2, ensure_ascii=False),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _origin_rows(card: Card) -> list[Sequence[str]]:
    return [
        *((f"began as ({part})", digest) for part, digest in card.initial_models.items()),
        ("snapshot", card.snapshot),
        ("its text", card.passages_source),
        *(
            (f"asked from step {searched.step:,}", searched.snapshot)
            for searched in card.searched_snapshots
            if searched.step
        ),
        *((f"examples ({name})", digest) for name, digest in card.example_digests.items()),
    ]


def _render_stage(stage: StageSummary) -> list[str]:
    description = (
        f"{stage.trained_on} {stage.steps:,} steps; the best weights are those of step {stage.best_step:,}.".lstrip()
    )
    rows = _render_table(["measure", "before", "after"], _measure_rows(stage.initial_measures, stage.best_measures))
    return [f"### Stage {stage.name}", "", description, "", *rows, ""]


def _measure_rows(initial: Mapping[str, float], best: Mapping[str, float]) -> list[Sequence[str]]:
    names = dict.fromkeys([*initial, *best])
    return [(name, *(_format_measure(measures.get(name)) for measures in (initial, best))) for name in names]


def _format_measure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *([_escape_cell(text) for text in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
