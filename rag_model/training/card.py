"""A model card: README.md with metadata for the Hugging Face hub, and the model's origins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_model.training.loop.checkpoint import Asked
from rag_model.training.objectives.objective import Result


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
        *_table(["measure", "before", "after"], _measures(card)),
        "",
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


def _measures(card: Card) -> list[Sequence[str]]:
    names = dict.fromkeys([*card.before, *card.after])
    return [(name, *(_figure(some.get(name)) for some in (card.before, card.after))) for name in names]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
