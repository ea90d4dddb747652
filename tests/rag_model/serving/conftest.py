"""A tiny store with two snapshots: shared by tests that only read it, and copied for each test that changes it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rag_model.serving.following import trials
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import Library, make_library
from tests.fixtures.tiny_rag import save_tiny_rag


@pytest.fixture(scope="session")
def mcp_server() -> Any:
    """The module; only tests that use it import it, because importing `mcp` takes half a second."""
    return import_module("rag_model.serving.mcp_server")


@pytest.fixture(scope="session")
def shared_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library that no test changes."""
    return make_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def model(shared_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny RAG model with the library's question encoder."""
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), shared_library.encoder, "token")


@pytest.fixture(scope="session")
def trial_record(shared_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the record that the encoder of both snapshots passed its trial; tests copy it to `dest`."""
    dest = tmp_path_factory.mktemp("tried")
    content = shared_library.store.snapshots.get(shared_library.red).content
    with pytest.MonkeyPatch.context() as patched:  # Starting a child process would take seconds.
        patched.setattr(trials, "run_in_child", lambda module, value, **limits: trials._run_in_this_child(value))
        trials.try_encoders(pull(shared_library.store, shared_library.red, dest).path, content, ["hnsw"])
    return dest / ".trials"


@pytest.fixture
def library(shared_library: Library, tmp_path: Path) -> Library:
    """A copy that this test may change."""
    return replace(shared_library, url=str(shutil.copytree(shared_library.url, tmp_path / "store")))


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    return lambda: tmp_path / "cache"
