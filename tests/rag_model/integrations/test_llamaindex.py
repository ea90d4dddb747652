"""The retriever in a real query engine of LlamaIndex that answers; the language model is LlamaIndex's own for tests."""

import asyncio
from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import ASKED


@pytest.fixture(scope="module")
def llamaindex() -> Any:
    """Our module, which only one worker imports: LlamaIndex takes most of a second."""
    return import_module("rag_model.integrations.llamaindex")


def test_a_query_engine_answers_from_the_passages(
    place: dict[str, str], expected: list[Hit], made_library: Library, llamaindex: Any
) -> None:
    from llama_index.core import get_response_synthesizer  # noqa: PLC0415 - as above
    from llama_index.core.llms import MockLLM  # noqa: PLC0415
    from llama_index.core.query_engine import RetrieverQueryEngine  # noqa: PLC0415
    from llama_index.core.schema import MetadataMode  # noqa: PLC0415

    retriever = llamaindex.BookwheelRetriever(**place, k=2)  # type: ignore[arg-type]
    read = get_response_synthesizer(llm=MockLLM())  # which answers with what it was asked
    told = RetrieverQueryEngine(retriever, read).query(ASKED)
    assert all(hit.text in str(told) and f"title: {hit.title}" in str(told) for hit in expected)
    assert made_library.red not in str(told)
    assert [(source_node.node.node_id, source_node.node.get_content()) for source_node in told.source_nodes] == [
        (hit.id, hit.text) for hit in expected
    ]
    assert [source_node.score for source_node in told.source_nodes] == pytest.approx(
        [hit.score for hit in expected], abs=1e-4
    )
    first = told.source_nodes[0].node
    assert (first.metadata["snapshot"], first.metadata["page_id"]) == (made_library.red, expected[0].page_id)
    assert "licence" not in first.get_content(MetadataMode.LLM)
    retriever.source.close()


def test_fusion_sums_the_ranks_of_a_passage(places: dict[str, dict[str, str]], llamaindex: Any) -> None:
    from llama_index.core.llms import MockLLM  # noqa: PLC0415 - as above
    from llama_index.core.retrievers import QueryFusionRetriever  # noqa: PLC0415

    retrievers = [
        llamaindex.BookwheelRetriever(**places["folder"], retriever=name, k=3)  # type: ignore[arg-type]
        for name in ("exact", "rrf(hnsw, exact)")
    ]
    scores = Counter[str]()
    for retriever in retrievers:
        for rank, one in enumerate(retriever.retrieve(ASKED)):
            scores[one.node.node_id] += 1 / (60 + rank)
    fusion = QueryFusionRetriever(
        retrievers, llm=MockLLM(), num_queries=1, mode="reciprocal_rerank", similarity_top_k=6, use_async=False
    )
    fused = {one.node.node_id: one.score for one in fusion.retrieve(ASKED)}
    assert fused == pytest.approx(dict(scores))
    assert max(scores.values()) > 1 / 60
    retrievers[0].search_metadata = True
    assert "score" in retrievers[0].retrieve(ASKED)[0].node.metadata
    for retriever in retrievers:
        retriever.source.close()


def test_it_is_asked_asynchronously(places: dict[str, dict[str, str]], llamaindex: Any) -> None:
    retriever = llamaindex.BookwheelRetriever(**places["folder"], k=3)  # type: ignore[arg-type]
    later, now = asyncio.run(retriever.aretrieve(ASKED)), retriever.retrieve(ASKED)
    assert [one.node.node_id for one in later] == [one.node.node_id for one in now]
    retriever.source.close()


def test_what_is_wrong_is_told_when_it_is_made_or_asked(nowhere: str, llamaindex: Any) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        llamaindex.BookwheelRetriever()
    with pytest.raises(UsageError, match="at least 1"):
        llamaindex.BookwheelRetriever(folder=nowhere, k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        llamaindex.BookwheelRetriever(folder=nowhere).retrieve("who?")
