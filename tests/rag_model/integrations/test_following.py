"""A door that follows its ref: it answers from what the ref names, or from what was pulled last."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.source import FollowingSource, LazySource, SourceSettings
from rag_model.retrieve.hits import Hit
from rag_model.serving.following.follower import FollowedRef
from tests.fixtures.serving import QUICK, Library, until
from tests.rag_model.integrations.conftest import ASKED


@pytest.fixture
def library(made_library: Library, tmp_path: Path) -> Library:
    return replace(made_library, url=str(shutil.copytree(made_library.url, tmp_path / "store")))


@pytest.fixture
def source(library: Library, tmp_path: Path) -> Iterator[FollowingSource]:
    found = FollowingSource.open(FollowedRef(library.url, "latest", tmp_path / "dest"), QUICK)
    yield found
    found.close()


def test_it_answers_from_what_the_ref_names_by_now(
    source: FollowingSource, library: Library, expected: list[Hit]
) -> None:
    given = source.search(ASKED, 2)
    assert (given.snapshot, [hit.id for hit in given.hits]) == (library.red, [hit.id for hit in expected])
    library.move(library.blue)
    until(lambda: source.search(ASKED, 1).snapshot == library.blue)
    assert "blue" in source.search(ASKED, 1).hits[0].text


@pytest.mark.parametrize(("asked", "k", "words"), [(" ", 1, "is empty"), ("a", 0, "at least 1"), ("a", 41, "holds 40")])
def test_a_wrong_question_is_told(source: FollowingSource, asked: str, k: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        source.search(asked, k)


def test_without_the_store_it_opens_what_was_pulled_last(
    source: FollowingSource, library: Library, tmp_path: Path
) -> None:
    Path(library.url).rename(tmp_path / "gone")
    again = FollowingSource.open(FollowedRef(library.url, "latest", tmp_path / "dest"), QUICK)
    assert again.search(ASKED, 1).snapshot == library.red
    again.close()


def test_what_cannot_be_opened_is_told(library: Library, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing"):
        LazySource(SourceSettings(store=library.url, ref="nothing", dest=str(tmp_path / "dest"))).open()
    with pytest.raises(UsageError, match="ivfpq"):
        LazySource(SourceSettings(store=library.url, retriever="ivfpq", dest=str(tmp_path / "dest"))).open()
