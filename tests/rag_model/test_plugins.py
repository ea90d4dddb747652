"""A registry has the built-in objects and those of packages, and names broken packages."""

import math
from pathlib import Path

import pytest

from rag_model.errors import InputError, UsageError
from rag_model.plugins import Registry
from tests.fixtures.plugin_package import install_package


def create_registry() -> Registry[object]:
    return Registry("dict", "bookwheel.tests", {"own": "collections:OrderedDict"})


def test_built_in_objects_come_first_and_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(
        tmp_path / "other", "tests", "b = collections:Counter\na = collections:deque\nown = collections:ChainMap"
    )
    monkeypatch.syspath_prepend(tmp_path / "other")
    plugin_registry = create_registry()
    assert plugin_registry.list_names() == ["own", "a", "b"]
    assert [plugin.__name__ for plugin in plugin_registry.iter_built_in()] == ["OrderedDict"]  # type: ignore[attr-defined]
    assert [plugin.__name__ for plugin in plugin_registry.iter_plugins()] == ["deque", "Counter"]  # type: ignore[attr-defined]
    assert plugin_registry.find("a") is plugin_registry.find("a")
    assert plugin_registry.find("absent") is None


@pytest.mark.parametrize("value", ["no_such_module:a", "collections:Absent"])
def test_a_plugin_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "broken", "tests", f"b = {value}"))
    with pytest.raises(
        InputError, match=rf"dict 'b' \({value} of the package broken 1.0\) cannot be imported .*: repair"
    ):
        create_registry().find("b")


def test_an_object_of_another_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "other", "tests", "b = math:pi"))
    typed_registry = Registry("dict", "bookwheel.tests", {"own": "math:tau"}, dict)
    assert typed_registry.find("own") == math.tau, "a built-in object is trusted"
    with pytest.raises(
        InputError, match=r"^dict 'b' \(math:pi of the package other 1.0\) is float: register an instance"
    ):
        typed_registry.find("b")


def test_a_failing_call_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "other", "tests", "b = collections:Counter"))
    plugin_registry = create_registry()
    assert plugin_registry.call("b", max, 3, 7) == 7
    with pytest.raises(InputError, match=r"package other 1.0\) fails \(ValueError: invalid literal .*: repair or unin"):
        plugin_registry.call("b", int, "seven")
    with pytest.raises(UsageError, match=r"^choose another$"):
        plugin_registry.call("b", fail_with, UsageError("choose another"))
    assert plugin_registry.describe("absent") == "dict 'absent'"


def fail_with(error: Exception) -> None:
    raise error


def test_two_packages_with_the_same_plugin_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path / "one", "tests", "b = collections:Counter"))
    monkeypatch.syspath_prepend(install_package(tmp_path / "two", "tests", "b = collections:deque"))
    with pytest.raises(InputError, match="dict 'b' is registered by collections:Counter and by collections:deque"):
        create_registry().find("b")
