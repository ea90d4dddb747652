"""The form of settings: defaults are told and not filled in; settings without a form do not hide those of others."""

from dataclasses import dataclass, field
from pathlib import Path

from flows.training import build_form
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import get_objective
from tests.fixtures.toy_objective import Toy


class Odd:
    """Nothing that JSON could say."""


@dataclass(frozen=True, slots=True)
class OddTraining:
    loop: LoopSettings = field(default_factory=LoopSettings)
    odd: Odd = field(default_factory=Odd)


@dataclass(frozen=True, slots=True)
class FileRecipe:
    statements: Path | None = Path("a.txt")
    words: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, slots=True)
class FileTraining:
    loop: LoopSettings = field(default_factory=LoopSettings)
    files: FileRecipe = field(default_factory=FileRecipe)


class OddToy(Toy):
    settings = OddTraining  # type: ignore[assignment]


class FileToy(Toy):
    settings = FileTraining  # type: ignore[assignment]


def test_each_setting_is_described_and_none_has_a_default_to_fill_in() -> None:
    (form, null) = build_form([get_objective("dpr")])["anyOf"]
    assert null == {"type": "null"}
    assert list(form["properties"]) == ["loop", "dpr", "negatives"]
    mining = form["properties"]["negatives"]["properties"]["mining"]
    assert mining["additionalProperties"] is False
    said = "number of retrieved passages per question; DPR, section 4.2: 100; by default 100"
    assert mining["properties"]["depth"] == {"title": "Depth", "type": "integer", "description": said}
    assert "$ref" not in str(form)
    assert "'default'" not in str(form)


def test_settings_without_a_form_are_one_json_object() -> None:
    odd, files, _ = build_form([OddToy(), FileToy()])["anyOf"]
    assert odd == {"title": "toy", "type": "object"}
    statements = files["properties"]["files"]["properties"]["statements"]
    assert statements["description"] == 'by default "a.txt"'
    assert {"type": "null"} in statements["anyOf"]
