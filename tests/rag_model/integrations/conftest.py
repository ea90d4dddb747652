"""The same snapshot in each kind of source: a store, a pulled folder and a running service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import Library, make_settings, run_service
from tests.rag_model.serving.conftest import cache, shared_library

__all__ = ["cache", "shared_library"]

QUESTION = "who was the king of river number 7?"
SourceOptions = dict[str, dict[str, str]]  # the settings of each kind of source


@pytest.fixture(scope="session")
def options_by_source(shared_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SourceOptions]:
    folder = tmp_path_factory.mktemp("sources")
    pull(shared_library.store, "latest", folder / "pulled")
    with run_service(shared_library.url, folder / "dest", make_settings(retrievers=("hnsw", "exact"))) as service:
        yield {
            "store": {"store": shared_library.url, "ref": "latest"},
            "folder": {"folder": str(folder / "pulled")},
            "service": {"service": service.url},
        }


@pytest.fixture(params=["store", "folder", "service"])
def source_options(request: pytest.FixtureRequest, options_by_source: SourceOptions) -> dict[str, str]:
    return options_by_source[request.param]


@pytest.fixture
def folder_options(options_by_source: SourceOptions) -> dict[str, str]:
    return options_by_source["folder"]


@pytest.fixture(scope="session")
def expected_hits(shared_library: Library) -> list[Hit]:
    """The two best hits of the library for `QUESTION`."""
    with Snapshot.open(shared_library.url) as snapshot:
        return open_retriever(snapshot).search([QUESTION], 2)[0]


@pytest.fixture
def missing_folder(tmp_path: Path) -> str:
    return str(tmp_path / "nowhere")
