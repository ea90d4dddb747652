"""A registry finds what is built in and what packages bring, and names what is broken."""

from pathlib import Path

import pytest

from rag_model.errors import InputError
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
    assert [one.__name__ for one in made.iter_plugins()] == ["deque", "Counter"]  # type: ignore[attr-defined]
    assert made.find("a") is made.find("a")
    assert made.find("absent") is None


@pytest.mark.parametrize("value", ["no_such_module:a", "collections:Absent"])
def test_what_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    bring(tmp_path, "broken", monkeypatch, f"b = {value}")
    with pytest.raises(InputError, match=rf"dict 'b' \({value}\) cannot be imported .*: repair or uninstall"):
        registry().find("b")


def test_two_packages_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(tmp_path, "one", monkeypatch, "b = collections:Counter")
    bring(tmp_path, "two", monkeypatch, "b = collections:deque")
    with pytest.raises(InputError, match="dict 'b' is registered by collections:Counter and by collections:deque"):
        registry().find("b")
