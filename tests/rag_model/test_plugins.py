"""A registry finds what is built in and what packages bring, and names what is broken."""

import math
from pathlib import Path

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.plugins import Registry


def bring(folder: Path, package: str, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    about = folder / package / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[bookwheel.tests]\n{lines}\n")
    monkeypatch.syspath_prepend(str(folder / package))


def registry() -> Registry[object]:
    return Registry("dict", "bookwheel.tests", {"own": "collections:OrderedDict"})


def test_what_is_built_in_comes_first_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path, "other", monkeypatch, "b = collections:Counter\na = collections:deque\nown = collections:ChainMap")
    made = registry()
    assert made.list_names() == ["own", "a", "b"]
    assert [one.__name__ for one in made.iter_built_in()] == ["OrderedDict"]  # type: ignore[attr-defined]
    assert [plugin.__name__ for plugin in made.iter_plugins()] == ["deque", "Counter"]  # type: ignore[attr-defined]
    assert made.find("a") is made.find("a")
    assert made.find("absent") is None


@pytest.mark.parametrize("value", ["no_such_module:a", "collections:Absent"])
def test_what_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    bring(tmp_path, "broken", monkeypatch, f"b = {value}")
    with pytest.raises(
        InputError, match=rf"dict 'b' \({value} of the package broken 1.0\) cannot be imported .*: repair"
    ):
        registry().find("b")


def test_an_object_of_another_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path, "other", monkeypatch, "b = math:pi")
    checked = Registry("dict", "bookwheel.tests", {"own": "math:tau"}, dict)
    assert checked.find("own") == math.tau, "a built-in object is trusted"
    with pytest.raises(
        InputError, match=r"^dict 'b' \(math:pi of the package other 1.0\) is float: register an instance"
    ):
        checked.find("b")


def test_a_failing_call_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path, "other", monkeypatch, "b = collections:Counter")
    made = registry()
    assert made.call("b", max, 3, 7) == 7
    with pytest.raises(InputError, match=r"package other 1.0\) fails \(ValueError: invalid literal .*: repair or unin"):
        made.call("b", int, "seven")
    with pytest.raises(UsageError, match=r"^choose another$"):
        made.call("b", fail_with, UsageError("choose another"))
    assert made.describe("absent") == "dict 'absent'"


def fail_with(error: Exception) -> None:
    raise error


def test_two_packages_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path, "one", monkeypatch, "b = collections:Counter")
    bring(tmp_path, "two", monkeypatch, "b = collections:deque")
    with pytest.raises(InputError, match="dict 'b' is registered by collections:Counter and by collections:deque"):
        registry().find("b")
