"""The retriever in a real query engine of LlamaIndex, with LlamaIndex's language model for tests."""

import asyncio
from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import QUESTION


@pytest.fixture(scope="module")
def llamaindex() -> Any:
    """Import our module only in the test worker that needs it, because LlamaIndex takes most of a second."""
    return import_module("rag_model.integrations.llamaindex")


def test_query_engine_answers_from_the_passages(
    source_options: dict[str, str], expected_hits: list[Hit], shared_library: Library, llamaindex: Any
) -> None:
    from llama_index.core import get_response_synthesizer  # noqa: PLC0415 - as above
    from llama_index.core.llms import MockLLM  # noqa: PLC0415
    from llama_index.core.query_engine import RetrieverQueryEngine  # noqa: PLC0415
    from llama_index.core.schema import MetadataMode  # noqa: PLC0415

    retriever = llamaindex.BookwheelRetriever(**source_options, k=2)  # type: ignore[arg-type]
    synthesizer = get_response_synthesizer(llm=MockLLM())  # The answer of this model is its prompt.
    response = RetrieverQueryEngine(retriever, synthesizer).query(QUESTION)
    assert all(hit.text in str(response) and f"title: {hit.title}" in str(response) for hit in expected_hits)
    assert shared_library.red not in str(response)
    assert [(source_node.node.node_id, source_node.node.get_content()) for source_node in response.source_nodes] == [
        (hit.id, hit.text) for hit in expected_hits
    ]
    assert [source_node.score for source_node in response.source_nodes] == pytest.approx(
        [hit.score for hit in expected_hits], abs=1e-4
    )
    node = response.source_nodes[0].node
    assert (node.metadata["snapshot"], node.metadata["page_id"]) == (shared_library.red, expected_hits[0].page_id)
    assert "licence" not in node.get_content(MetadataMode.LLM)
    retriever.source.close()


def test_fusion_sums_the_ranks_of_a_passage(folder_options: dict[str, str], llamaindex: Any) -> None:
    from llama_index.core.llms import MockLLM  # noqa: PLC0415 - as above
    from llama_index.core.retrievers import QueryFusionRetriever  # noqa: PLC0415

    retrievers = [
        llamaindex.BookwheelRetriever(**folder_options, retriever=name, k=3)  # type: ignore[arg-type]
        for name in ("exact", "rrf(hnsw, exact)")
    ]
    scores = Counter[str]()
    for retriever in retrievers:
        for rank, node in enumerate(retriever.retrieve(QUESTION)):
            scores[node.node.node_id] += 1 / (60 + rank)
    fusion = QueryFusionRetriever(
        retrievers, llm=MockLLM(), num_queries=1, mode="reciprocal_rerank", similarity_top_k=6, use_async=False
    )
    fused_scores = {node.node.node_id: node.score for node in fusion.retrieve(QUESTION)}
    assert fused_scores == pytest.approx(dict(scores))
    assert max(scores.values()) > 1 / 60
    retrievers[0].search_metadata = True
    assert "score" in retrievers[0].retrieve(QUESTION)[0].node.metadata
    for retriever in retrievers:
        retriever.source.close()


def test_asynchronous_search_gives_the_same_passages(folder_options: dict[str, str], llamaindex: Any) -> None:
    retriever = llamaindex.BookwheelRetriever(**folder_options, k=3)  # type: ignore[arg-type]
    async_nodes, nodes = asyncio.run(retriever.aretrieve(QUESTION)), retriever.retrieve(QUESTION)
    assert [node.node.node_id for node in async_nodes] == [node.node.node_id for node in nodes]
    retriever.source.close()


def test_invalid_settings_and_a_missing_folder_are_reported(missing_folder: str, llamaindex: Any) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        llamaindex.BookwheelRetriever()
    with pytest.raises(UsageError, match="at least 1"):
        llamaindex.BookwheelRetriever(folder=missing_folder, k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        llamaindex.BookwheelRetriever(folder=missing_folder).retrieve("who?")
