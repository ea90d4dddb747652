"""Objectives by name: built-in ones, and those that the metadata of installed packages registers."""

import shutil
from pathlib import Path

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.training.objectives.dpr import DPR
from rag_model.training.objectives.objective import OBJECTIVES, get_objective, list_objective_names, list_objectives
from tests.fixtures.plugin_package import install_package

ROOT = Path(__file__).parents[4]
RAG = ("rag-sequence", "rag-token", "rag-end2end", "ra-dit", "ict", "realm")
BUILT_IN = ("dpr", "colbert", "cross-encoder", "margin-mse", "sidr", "openrag", *RAG)


@pytest.fixture(autouse=True)
def forget_loaded_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECTIVES, "_loaded", {})


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    shutil.copy(ROOT / "tests" / "fixtures" / "toy_objective.py", tmp_path / "modules" / "toy_for_registry.py")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(install_package(tmp_path / "toy", "objectives", "toy = toy_for_registry:TOY"))


def test_built_in_objectives_need_no_metadata() -> None:
    assert list_objective_names() == BUILT_IN
    assert [objective.name for objective in list_objectives()] == list(BUILT_IN)
    assert get_objective("dpr") is DPR
    with pytest.raises(UsageError, match=f"no objective 'toy': choose one of {', '.join(BUILT_IN)}"):
        get_objective("toy")


@pytest.mark.usefixtures("toy")
def test_registered_objectives_come_after_the_built_in_ones() -> None:
    assert list_objective_names() == (*BUILT_IN, "toy")
    toy = get_objective("toy")
    assert (toy.name, toy.summary, toy.defaults(unit_vectors=True), toy.version) == (
        "toy",
        "a bag of words",
        {},
        0,
    )


@pytest.mark.usefixtures("toy")
def test_package_cannot_replace_a_built_in_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "other", "objectives", "dpr = toy_for_registry:TOY"))
    assert list_objective_names() == (*BUILT_IN, "toy")
    assert get_objective("dpr") is DPR


@pytest.mark.usefixtures("toy")
def test_name_that_two_packages_register_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "twin", "objectives", "toy = another:TOY"))
    with pytest.raises(InputError, match="registered by another:TOY and by toy_for_registry:TOY: uninstall one"):
        get_objective("toy")


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:TOY", "cannot be imported .*No module named 'no_such_module'"),
        ("toy_for_registry:NONE", "cannot be imported .*NONE"),
        ("toy_for_registry:ToyRecipe", "is type: register an instance"),
        ("toy_for_registry:TOY", "has the name 'toy': register it by that name"),
    ],
)
def test_broken_objective_is_named_and_the_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "broken", "objectives", f"broken = {value}"))
    with pytest.raises(InputError, match=f"objective 'broken' .*{reason}"):
        get_objective("broken")
    assert [objective.name for objective in list_objectives()] == [*BUILT_IN, "toy"]
    assert "objective 'broken'" in caplog.text
