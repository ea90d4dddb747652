"""A missing requirement skips a test, or fails it if the gate requires it."""

from pathlib import Path

import pytest

from tests.benchmarks import flink_cluster
from tests.fixtures.machine_requirements import FLINK_JARS, REQUIRE_VARIABLE, skip_or_fail


@pytest.fixture(autouse=True)
def set_gate_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # all CI services set it
    monkeypatch.setenv(REQUIRE_VARIABLE, "chromium prometheus")


def test_an_optional_requirement_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="no jars here"):
        skip_or_fail("flink", "no jars here")


def test_a_requirement_of_the_gate_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="there is no Chromium here"):
        skip_or_fail("chromium", "there is no Chromium here")


def test_the_error_about_missing_flink_jars_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink_cluster, "ROOT", tmp_path / "checkout")
    monkeypatch.delenv(FLINK_JARS, raising=False)
    with pytest.raises(flink_cluster.AbsentError, match=f"name their folder in {FLINK_JARS}"):
        flink_cluster.runner_jars()
