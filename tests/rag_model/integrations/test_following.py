"""A source that follows a ref searches its current snapshot, or the last pulled one if there is no store."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.source import FollowingSource, LazySource, SourceSettings
from rag_model.retrieve.hits import Hit
from rag_model.serving.following.follower import FollowedRef
from tests.fixtures.serving import QUICK, Library, wait_until
from tests.rag_model.integrations.conftest import QUESTION


@pytest.fixture
def library(shared_library: Library, tmp_path: Path) -> Library:
    return replace(shared_library, url=str(shutil.copytree(shared_library.url, tmp_path / "store")))


@pytest.fixture
def source(library: Library, tmp_path: Path) -> Iterator[FollowingSource]:
    source = FollowingSource.open(FollowedRef(library.url, "latest", tmp_path / "dest"), QUICK)
    yield source
    source.close()


def test_search_follows_the_ref(source: FollowingSource, library: Library, expected_hits: list[Hit]) -> None:
    result = source.search(QUESTION, 2)
    assert (result.snapshot, [hit.id for hit in result.hits]) == (library.red, [hit.id for hit in expected_hits])
    library.move(library.blue)
    wait_until(lambda: source.search(QUESTION, 1).snapshot == library.blue)
    assert "blue" in source.search(QUESTION, 1).hits[0].text


@pytest.mark.parametrize(("text", "k", "words"), [(" ", 1, "is empty"), ("a", 0, "at least 1"), ("a", 41, "holds 40")])
def test_invalid_question_is_refused(source: FollowingSource, text: str, k: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        source.search(text, k)


def test_last_pulled_snapshot_is_opened_without_the_store(
    source: FollowingSource, library: Library, tmp_path: Path
) -> None:
    Path(library.url).rename(tmp_path / "gone")
    reopened = FollowingSource.open(FollowedRef(library.url, "latest", tmp_path / "dest"), QUICK)
    assert reopened.search(QUESTION, 1).snapshot == library.red
    reopened.close()


def test_missing_ref_and_unknown_retriever_are_reported(library: Library, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing"):
        LazySource(SourceSettings(store=library.url, ref="nothing", dest=str(tmp_path / "dest"))).open()
    with pytest.raises(UsageError, match="ivfpq"):
        LazySource(SourceSettings(store=library.url, retriever="ivfpq", dest=str(tmp_path / "dest"))).open()
