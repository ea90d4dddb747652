"""The protocol behind the doors: one place, opened when it is first asked, closed and opened again."""

import threading

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.source import LazySource, SourceSettings, build_metadata, open_source
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import ASKED


def test_every_place_gives_the_same_passages(place: dict[str, str], expected: list[Hit], made_library: Library) -> None:
    source = open_source(SourceSettings(**place))
    given = source.search(ASKED, 2)
    assert given.snapshot == made_library.red
    assert [(hit.id, hit.text, hit.url) for hit in given.hits] == [(hit.id, hit.text, hit.url) for hit in expected]
    source.close()


def test_a_retriever_is_asked_for_by_its_expression(place: dict[str, str]) -> None:
    source = open_source(SourceSettings(**place, retriever="rrf(hnsw, exact)"))
    (hit,) = source.search(ASKED, 1).hits
    told = build_metadata(hit, "id", search_metadata=True)
    assert [leg["leg"] for leg in told["legs"]] == ["hnsw", "exact"]
    source.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "none of them is given"),
        ({"store": "a", "folder": "b"}, "store and folder"),
        ({"folder": "a", "ref": "latest"}, "ref applies to a store"),
        ({"store": "a", "dest": "b", "encoder": "c"}, "omit encoder or dest"),
        ({"service": "http://a", "dest": "b"}, "dest applies to a store"),
        ({"store": "a", "token": "t"}, "token applies to a service"),
        ({"service": "http://a", "encoder": "e"}, "encoder applies to a store or a folder"),
    ],
)
def test_what_names_no_one_place_is_refused(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SourceSettings(**wrong)


@pytest.mark.parametrize(("asked", "k", "words"), [(" ", 1, "is empty"), ("a", 0, "at least 1"), ("a", 10_000, "k is")])
def test_a_wrong_question_is_told_in_one_sentence(place: dict[str, str], asked: str, k: int, words: str) -> None:
    source = open_source(SourceSettings(**place))
    with pytest.raises(UsageError, match=words):
        source.search(asked, k)
    source.close()


def test_a_wrong_retriever_is_told_when_the_place_is_opened(made_library: Library) -> None:
    with pytest.raises(UsageError, match="nothing"):
        open_source(SourceSettings(store=made_library.url, retriever="nothing"))


def test_it_opens_once_for_all_threads_and_again_after_it_was_closed(made_library: Library, nowhere: str) -> None:
    source, opened = LazySource(SourceSettings(store=made_library.url)), list[object]()
    threads = [threading.Thread(target=lambda: opened.append(source.open())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in opened}) == 1
    source.close()
    assert source.search(ASKED, 1).snapshot == made_library.red
    assert source.open() is not opened[0]
    source.close()
    with pytest.raises(StoreError):
        LazySource(SourceSettings(folder=nowhere)).open()


def test_a_token_is_not_shown() -> None:
    assert "hushhush" not in repr(SourceSettings(service="http://localhost", token="hushhush"))
