"""A missing requirement skips a test on any CI service, and fails it if the gate requires it."""

from pathlib import Path

import pytest

from tests.benchmarks import flink_cluster
from tests.fixtures.machine_requirements import FLINK_JARS, REQUIRE, skip_or_fail


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # as all CI services set it
    monkeypatch.setenv(REQUIRE, "chromium prometheus")


def test_a_missing_requirement_skips_with_a_message() -> None:
    with pytest.raises(pytest.skip.Exception, match="no jars here"):
        skip_or_fail("flink", "no jars here")


def test_a_missing_requirement_of_the_gate_fails_with_a_message() -> None:
    with pytest.raises(pytest.fail.Exception, match="there is no Chromium here"):
        skip_or_fail("chromium", "there is no Chromium here")


def test_missing_jars_of_flink_name_their_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink_cluster, "ROOT", tmp_path / "checkout")
    monkeypatch.delenv(FLINK_JARS, raising=False)
    with pytest.raises(flink_cluster.AbsentError, match=f"name their folder in {FLINK_JARS}"):
        flink_cluster.runner_jars()
