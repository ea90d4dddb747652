"""The retriever in a real LangChain chain, with LangChain's chat model for tests."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from langchain_classic.retrievers import EnsembleRetriever, MultiQueryRetriever
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.langchain import BookwheelRetriever
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import QUESTION


def join_texts(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def test_chain_answers_from_the_passages(
    source_options: dict[str, str], expected_hits: list[Hit], shared_library: Library
) -> None:
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}")
    generator = prompt | FakeListChatModel(responses=["King 49."]) | StrOutputParser()
    retriever = BookwheelRetriever(**source_options, k=2)
    chain = RunnablePassthrough.assign(context=lambda inputs: retriever.invoke(inputs["question"])).assign(
        answer=lambda inputs: generator.invoke({**inputs, "context": join_texts(inputs["context"])})
    )
    result = chain.invoke({"question": QUESTION})
    assert result["answer"] == "King 49."
    assert [document.page_content for document in result["context"]] == [hit.text for hit in expected_hits]
    document = result["context"][0]
    assert (document.id, document.metadata["snapshot"]) == (expected_hits[0].id, shared_library.red)
    assert set(document.metadata) == {
        *("id", "page_id", "title", "section", "url", "licence", "revised", "snapshot", "kind")
    }
    retriever.source.close()


def test_search_metadata_is_added_on_request(folder_options: dict[str, str], expected_hits: list[Hit]) -> None:
    retriever = BookwheelRetriever(**folder_options, k=2, search_metadata=True)
    documents = retriever.invoke(QUESTION)
    assert [(document.metadata["rank"], document.metadata["legs"]) for document in documents] == [(1, []), (2, [])]
    assert [document.metadata["score"] for document in documents] == pytest.approx(
        [hit.score for hit in expected_hits], abs=1e-4
    )
    retriever.source.close()


def test_ensemble_sums_the_ranks_of_a_passage(folder_options: dict[str, str]) -> None:
    retrievers = [BookwheelRetriever(**folder_options, retriever=name, k=3) for name in ("exact", "hnsw")]
    rankings = [[document.id for document in retriever.invoke(QUESTION)] for retriever in retrievers]
    scores = Counter[str]()
    for ranking in rankings:
        for rank, identity in enumerate(ranking, start=1):
            scores[str(identity)] += 0.5 / (60 + rank)
    fused = EnsembleRetriever(retrievers=retrievers, weights=[0.5, 0.5], id_key="id").invoke(QUESTION)
    assert len(fused) == len(scores)
    assert [scores[str(document.id)] for document in fused] == sorted(scores.values(), reverse=True)
    for retriever in retrievers:
        retriever.source.close()


def test_passages_of_several_queries_are_merged(folder_options: dict[str, str]) -> None:
    retriever = BookwheelRetriever(**folder_options, k=3)
    queries = [QUESTION, QUESTION.upper()]
    expanded = MultiQueryRetriever.from_llm(retriever, FakeListChatModel(responses=["\n".join(queries)]))
    identities = [document.id for document in expanded.invoke(QUESTION)]
    assert sorted(identities, key=str) == sorted(
        {document.id for query in queries for document in retriever.invoke(query)}, key=str
    )
    assert len(identities) < 6
    retriever.source.close()


@pytest.mark.anyio
class TestStandard(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    @pytest.fixture(autouse=True)
    def use_folder(self, folder_options: dict[str, str]) -> None:
        self.folder = folder_options

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @property
    def retriever_constructor(self) -> type[BookwheelRetriever]:
        return BookwheelRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return dict(self.folder)

    @property
    def retriever_query_example(self) -> str:
        return QUESTION


def test_batches_and_asynchronous_calls(folder_options: dict[str, str]) -> None:
    retriever = BookwheelRetriever(**folder_options, k=3)
    rankings = retriever.batch([QUESTION, "red 3"])
    assert [len(documents) for documents in rankings] == [3, 3]
    assert asyncio.run(retriever.ainvoke(QUESTION)) == rankings[0]
    assert len(retriever.invoke(QUESTION, k=1)) == 1
    retriever.source.close()


def test_invalid_settings_and_a_missing_folder_are_reported(missing_folder: str) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        BookwheelRetriever()
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        BookwheelRetriever(folder=missing_folder, k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        BookwheelRetriever(folder=missing_folder).invoke("who?")


def test_a_token_is_not_shown() -> None:
    assert "hushhush" not in repr(BookwheelRetriever(service="http://localhost:1", token="hushhush"))
