"""A tiny real store of two snapshots, anew for each test."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rag_model.serving.following.trials import try_encoders
from rag_model.store.pulling.pull import pull
from tests.fixtures.serving import Library, make_library
from tests.fixtures.tiny_rag import save_tiny_rag


@pytest.fixture(scope="session")
def mcp_server() -> Any:
    """The module, which only one worker imports: `mcp` takes half a second."""
    return import_module("rag_model.serving.mcp_server")


@pytest.fixture(scope="session")
def made_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def model(made_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny RAG model that encodes as the library's encoder does."""
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), made_library.encoder, "token")


@pytest.fixture(scope="session")
def passed(made_library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of the trial that the encoder of both snapshots has passed, in a folder to copy to `dest`."""
    dest = tmp_path_factory.mktemp("tried")
    content = made_library.store.snapshots.get(made_library.red).content
    try_encoders(pull(made_library.store, made_library.red, dest).path, content, ["hnsw"])
    return dest / ".trials"


@pytest.fixture
def library(made_library: Library, tmp_path: Path) -> Library:
    return replace(made_library, url=str(shutil.copytree(made_library.url, tmp_path / "store")))


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


@pytest.fixture(scope="session")
def shared_library(made_library: Library) -> Library:
    """One that no test changes."""
    return made_library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    return lambda: tmp_path / "cache"
