"""A model card: README.md with metadata for the Hugging Face hub, and the model's origins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_model.training.loop.checkpoint import Asked
from rag_model.training.objectives.objective import Result


@dataclass(frozen=True, slots=True)
class StageTold:
    """What one of several stages of a training did."""

    name: str
    steps: int
    best_step: int
    before: Mapping[str, float]  # on the dev set, before the stage
    after: Mapping[str, float]
    trained_on: str = ""  # a sentence


@dataclass(frozen=True, slots=True)
class Card:
    """The contents of a model card."""

    kind: str  # the objective's name
    result: Result
    began: Mapping[str, str]  # its initial models, by part: the digest of their files
    snapshot: str  # full id
    text: str  # source of its passages, and their licence
    data: Mapping[str, str]  # digests of the examples
    recipe: Mapping[str, Any]
    before: Mapping[str, float]  # on the dev set, before training
    after: Mapping[str, float]
    steps: int
    language: str = ""
    asked: Sequence[Asked] = ()  # the snapshots that the training searched, by step
    stages: Sequence[StageTold] = ()  # if there are several


def write_card(card: Card) -> str:
    """Return the card as Markdown with a YAML head; equal cards give equal texts."""
    head = {
        "library_name": "bookwheel",
        "pipeline_tag": card.result.role,
        "tags": ["bookwheel", "retrieval-augmented-generation", card.kind],
        **({"language": card.language} if card.language else {}),
    }
    lines = [
        "---",
        *(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()),  # JSON is YAML
        "---",
        f"# {card.kind}, trained by bookwheel",
        "",
        card.result.says,
        "",
        f"    {card.result.uses}",
        "",
        "## Where it comes from",
        "",
        *_table(["what", "which"], _origins(card)),
        "",
        f"## How it does after {card.steps:,} steps",
        "",
        "On the dev set, before training and with the best weights.",
        "",
        *_table(["measure", "before", "after"], _measures(card.before, card.after)),
        "",
        *(line for stage in card.stages for line in _stage(stage)),
        "## Recipe",
        "",
        "```json",
        json.dumps(card.recipe, indent=2, ensure_ascii=False),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _origins(card: Card) -> list[Sequence[str]]:
    return [
        *((f"began as ({part})", name) for part, name in card.began.items()),
        ("snapshot", card.snapshot),
        ("its text", card.text),
        *((f"asked from step {one.step:,}", one.snapshot) for one in card.asked if one.step),
        *((f"examples ({part})", digest) for part, digest in card.data.items()),
    ]


def _stage(stage: StageTold) -> list[str]:
    said = f"{stage.trained_on} {stage.steps:,} steps; the best weights are those of step {stage.best_step:,}.".lstrip()
    rows = _table(["measure", "before", "after"], _measures(stage.before, stage.after))
    return [f"### Stage {stage.name}", "", said, "", *rows, ""]


def _measures(before: Mapping[str, float], after: Mapping[str, float]) -> list[Sequence[str]]:
    names = dict.fromkeys([*before, *after])
    return [(name, *(_figure(some.get(name)) for some in (before, after))) for name in names]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
