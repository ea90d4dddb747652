"""A folder for the commands of the pages, with a small dump and a tiny encoder under the names that the pages use."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_jobs.workers import START_VARIABLE
from flows import cli
from tests.docs.shell import Shell
from tests.fixtures.tiny import save_bert

DUMP = "simplewiki-latest-pages-articles-multistream.xml.bz2"
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"  # a folder of this name takes precedence over the hub


@pytest.fixture(scope="session")
def docs_folder(mini_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dump and the encoder, and a store `library` with two snapshots."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(mini_dump, folder / DUMP)
    save_bert(folder / ENCODER)
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        environment.setenv(START_VARIABLE, "1000")  # seconds; no job takes as long, so that no workers start
        for limit in ("2", "3"):
            assert cli.run(["reindex", "--dump", DUMP, "--store", "library", "--limit", limit]) == 0
    return folder


@pytest.fixture
def shell(docs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell in a copy of `docs_folder`, whose service ends with the test."""
    folder = tmp_path / "work"
    shutil.copytree(docs_folder, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(START_VARIABLE, "1000")
    with Shell(folder) as opened_shell:
        yield opened_shell
