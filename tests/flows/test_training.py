"""The JSON schema of training settings, from which Prefect shows a form."""

from dataclasses import dataclass, field
from pathlib import Path

from flows.training import build_form_schema
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import get_objective
from tests.fixtures.toy_objective import Toy


class Unserializable:
    """A type without a JSON schema."""


@dataclass(frozen=True, slots=True)
class UnserializableTraining:
    loop: LoopSettings = field(default_factory=LoopSettings)
    value: Unserializable = field(default_factory=Unserializable)


@dataclass(frozen=True, slots=True)
class FileRecipe:
    statements: Path | None = Path("a.txt")
    words: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, slots=True)
class FileTraining:
    loop: LoopSettings = field(default_factory=LoopSettings)
    files: FileRecipe = field(default_factory=FileRecipe)


class UnserializableToy(Toy):
    settings = UnserializableTraining  # type: ignore[assignment]


class FileToy(Toy):
    settings = FileTraining  # type: ignore[assignment]


def test_form_describes_settings_without_default_values() -> None:
    (form, null) = build_form_schema([get_objective("dpr")])["anyOf"]
    assert null == {"type": "null"}
    assert list(form["properties"]) == ["loop", "dpr", "negatives"]
    mining = form["properties"]["negatives"]["properties"]["mining"]
    assert mining["additionalProperties"] is False
    description = "number of retrieved passages per question; DPR, section 4.2: 100; by default 100"
    assert mining["properties"]["depth"] == {"title": "Depth", "type": "integer", "description": description}
    assert "$ref" not in str(form)
    assert "'default'" not in str(form)


def test_settings_without_form_are_json_object() -> None:
    unserializable, files, _ = build_form_schema([UnserializableToy(), FileToy()])["anyOf"]
    assert unserializable == {"title": "toy", "type": "object"}
    statements = files["properties"]["files"]["properties"]["statements"]
    assert statements["description"] == 'by default "a.txt"'
    assert {"type": "null"} in statements["anyOf"]
