"""The source of an integration is opened by its first search, shared by threads, and can be reopened."""

import threading

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.source import LazySource, SourceSettings, build_metadata, open_source
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import QUESTION


def test_all_sources_give_the_same_passages(
    source_options: dict[str, str], expected_hits: list[Hit], shared_library: Library
) -> None:
    source = open_source(SourceSettings(**source_options))
    result = source.search(QUESTION, 2)
    assert result.snapshot == shared_library.red
    for hit, expected in zip(result.hits, expected_hits, strict=True):
        assert (hit.id, hit.text, hit.url) == (expected.id, expected.text, expected.url)
    source.close()


def test_retriever_is_chosen_by_an_expression(source_options: dict[str, str]) -> None:
    source = open_source(SourceSettings(**source_options, retriever="rrf(hnsw, exact)"))
    (hit,) = source.search(QUESTION, 1).hits
    metadata = build_metadata(hit, "id", search_metadata=True)
    assert [leg["leg"] for leg in metadata["legs"]] == ["hnsw", "exact"]
    source.close()


@pytest.mark.parametrize(
    ("settings", "words"),
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
def test_settings_must_name_one_source(settings: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SourceSettings(**settings)


@pytest.mark.parametrize(("text", "k", "words"), [(" ", 1, "is empty"), ("a", 0, "at least 1"), ("a", 10_000, "k is")])
def test_invalid_question_is_refused(source_options: dict[str, str], text: str, k: int, words: str) -> None:
    source = open_source(SourceSettings(**source_options))
    with pytest.raises(UsageError, match=words):
        source.search(text, k)
    source.close()


def test_unknown_retriever_is_reported_when_the_source_is_opened(shared_library: Library) -> None:
    with pytest.raises(UsageError, match="nothing"):
        open_source(SourceSettings(store=shared_library.url, retriever="nothing"))


def test_source_is_opened_once_and_reopened_after_close(shared_library: Library, missing_folder: str) -> None:
    source, opened_sources = LazySource(SourceSettings(store=shared_library.url)), list[object]()
    threads = [threading.Thread(target=lambda: opened_sources.append(source.open())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(source) for source in opened_sources}) == 1
    source.close()
    assert source.search(QUESTION, 1).snapshot == shared_library.red
    assert source.open() is not opened_sources[0]
    source.close()
    with pytest.raises(StoreError):
        LazySource(SourceSettings(folder=missing_folder)).open()


def test_a_token_is_not_shown() -> None:
    assert "hushhush" not in repr(SourceSettings(service="http://localhost", token="hushhush"))
