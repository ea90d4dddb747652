"""One snapshot behind each kind of door: a store, a pulled folder, a running service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import Library, serving, with_limits
from tests.rag_model.serving.conftest import cache, made_library

__all__ = ["cache", "made_library"]

ASKED = "who was the king of river number 7?"


@pytest.fixture(scope="session")
def places(made_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("doors")
    pull(made_library.store, "latest", folder / "pulled")
    with serving(made_library.url, folder / "dest", with_limits(retrievers=("hnsw", "exact"))) as served:
        yield {
            "store": {"store": made_library.url, "ref": "latest"},
            "folder": {"folder": str(folder / "pulled")},
            "service": {"service": served.url},
        }


@pytest.fixture(params=["store", "folder", "service"])
def place(request: pytest.FixtureRequest, places: dict[str, dict[str, str]]) -> dict[str, str]:
    return places[request.param]


@pytest.fixture(scope="session")
def expected(made_library: Library) -> list[Hit]:
    """What the library itself finds for `ASKED`, two passages."""
    with Snapshot.open(made_library.url) as snapshot:
        return open_retriever(snapshot).search([ASKED], 2)[0]


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    return str(tmp_path / "nowhere")
