"""Objectives by name: ours, those that real package metadata registers, and what is wrong with some of them."""

import shutil
from pathlib import Path

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.training.objectives.dpr import DPR
from rag_model.training.objectives.objective import OBJECTIVES, get_objective, list_objective_names, list_objectives

ROOT = Path(__file__).parents[4]
RAG = ("rag-sequence", "rag-token", "rag-end2end", "ra-dit", "ict", "realm")
OURS = ("dpr", "colbert", "cross-encoder", "margin-mse", "sidr", "openrag", *RAG)


def install(folder: Path, package: str, monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Put a package's metadata on the path: entry points by name."""
    about = folder / package / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[bookwheel.objectives]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder / package))


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test's packages brought is forgotten."""
    monkeypatch.setattr(OBJECTIVES, "_loaded", {})


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    shutil.copy(ROOT / "tests" / "fixtures" / "toy_objective.py", tmp_path / "modules" / "toy_for_registry.py")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    install(tmp_path, "toy", monkeypatch, toy="toy_for_registry:TOY")


def test_ours_are_known_without_any_metadata() -> None:
    assert list_objective_names() == OURS
    assert [objective.name for objective in list_objectives()] == list(OURS)
    assert get_objective("dpr") is DPR
    with pytest.raises(UsageError, match=f"no objective 'toy': choose one of {', '.join(OURS)}"):
        get_objective("toy")


@pytest.mark.usefixtures("toy")
def test_others_come_after_ours_and_are_what_their_module_holds() -> None:
    assert list_objective_names() == (*OURS, "toy")
    found = get_objective("toy")
    assert (found.name, found.summary, found.defaults(unit_vectors=True), found.version) == (
        "toy",
        "a bag of words",
        {},
        0,
    )


@pytest.mark.usefixtures("toy")
def test_no_package_takes_the_place_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "other", monkeypatch, dpr="toy_for_registry:TOY")
    assert list_objective_names() == (*OURS, "toy")
    assert get_objective("dpr") is DPR


@pytest.mark.usefixtures("toy")
def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "twin", monkeypatch, toy="another:TOY")
    with pytest.raises(InputError, match="registered by another:TOY and by toy_for_registry:TOY: uninstall one"):
        get_objective("toy")


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:TOY", "cannot be imported .*No module named 'no_such_module'"),
        ("toy_for_registry:NONE", "cannot be imported .*NONE"),
        ("toy_for_registry:ToyRecipe", "is type: register an instance"),
        ("toy_for_registry:TOY", "has the name 'toy': register it by that name"),
    ],
)
def test_a_broken_one_is_named_and_the_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, why: str
) -> None:
    install(tmp_path, "broken", monkeypatch, broken=value)
    with pytest.raises(InputError, match=f"objective 'broken' .*{why}"):
        get_objective("broken")
    assert [objective.name for objective in list_objectives()] == [*OURS, "toy"]
    assert "objective 'broken'" in caplog.text
