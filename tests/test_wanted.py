"""What the machine lacks skips a test, on any service, unless the gate requires it."""

from pathlib import Path

import pytest

from tests.benchmarks import flink_cluster
from tests.fixtures.machine_requirements import FLINK_JARS, REQUIRE, missing


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # as anybody's service sets it
    monkeypatch.setenv(REQUIRE, "chromium prometheus")


def test_what_is_missing_skips_with_a_sentence() -> None:
    with pytest.raises(pytest.skip.Exception, match="no jars here"):
        missing("flink", "no jars here")


def test_what_is_missing_and_required_fails_with_it() -> None:
    with pytest.raises(pytest.fail.Exception, match="there is no Chromium here"):
        missing("chromium", "there is no Chromium here")


def test_flink_s_jars_are_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink_cluster, "ROOT", tmp_path / "checkout")
    monkeypatch.delenv(FLINK_JARS, raising=False)
    with pytest.raises(flink_cluster.AbsentError, match=f"name their folder in {FLINK_JARS}"):
        flink_cluster.runner_jars()
