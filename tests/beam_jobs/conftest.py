"""Dumps of two months, and a store in which the first of them is `latest`."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from beam_jobs.workers import START_VARIABLE
from rag_model.store.store import Store
from tests.fixtures.monthly_dumps import NEW, OLD, BuildResult, Dumps, Page, build
from tests.fixtures.tiny import save_bert


@pytest.fixture(autouse=True)
def set_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes import the functions of tests, also if an earlier test changed the working directory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def allow_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the default start of workers, which tests of flows in this process turn off."""
    monkeypatch.delenv(START_VARIABLE, raising=False)


@pytest.fixture(scope="session")
def write_dump(
    tmp_path_factory: pytest.TempPathFactory,
    page_xml: Callable[..., str],
    export_xml: Callable[..., bytes],
    make_multistream: Callable[..., str],
) -> Callable[[Sequence[Page]], str]:
    """Return a function that writes a dump as Wikimedia does, two pages to a stream."""

    def write(pages: Sequence[Page]) -> str:
        folder = tmp_path_factory.mktemp("dump")
        xml = folder / "dump.xml"
        xml.write_bytes(
            export_xml(
                *(page_xml(page.page_id, page.text(), rev_id=page.rev_id, redirect=page.redirect) for page in pages)
            )
        )
        return make_multistream(folder, xml, pages_a_stream=2)

    return write


@pytest.fixture(scope="session")
def dumps(write_dump: Callable[[Sequence[Page]], str]) -> Dumps:
    return Dumps(write_dump(OLD), write_dump(NEW))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def month(tmp_path_factory: pytest.TempPathFactory, dumps: Dumps, tiny: Path) -> BuildResult:
    """Last month's snapshot, in a store that tests copy."""
    return build(Store.open(str(tmp_path_factory.mktemp("month")), create=True), dumps.old, tiny)


@pytest.fixture
def store(month: BuildResult, tmp_path: Path) -> Store:
    """A store in which `latest` is last month's snapshot."""
    return Store.open(str(shutil.copytree(month.store.files.local_path(""), tmp_path / "store")))
