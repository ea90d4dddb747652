"""Fixture for plans whose staged files are kept in a separate folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """Return a function that plans a dump and moves staged files to a separate folder."""
    staged, workdir = tmp_path / "staged", tmp_path / "work"
    staged.mkdir()
    workdir.mkdir()

    def stage(path: Path) -> str:
        return path.rename(staged / path.name).as_uri()

    def make(pattern: str | Path, *, limit: int | None = None, part_bytes: int | None = None) -> Plan:
        return plan_dump(str(pattern), workdir=workdir, stage=stage, limit=limit, part_bytes=part_bytes)

    return make
