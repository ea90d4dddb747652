"""The retriever in a real LangChain chain that answers; the chat model is LangChain's own for tests."""

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
from tests.rag_model.integrations.conftest import ASKED


def joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def test_a_chain_answers_from_the_passages(place: dict[str, str], expected: list[Hit], made_library: Library) -> None:
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}")
    read = prompt | FakeListChatModel(responses=["King 49."]) | StrOutputParser()
    retriever = BookwheelRetriever(**place, k=2)
    chain = RunnablePassthrough.assign(context=lambda asked: retriever.invoke(asked["question"])).assign(
        answer=lambda known: read.invoke({**known, "context": joined(known["context"])})
    )
    told = chain.invoke({"question": ASKED})
    assert told["answer"] == "King 49."
    assert [one.page_content for one in told["context"]] == [hit.text for hit in expected]
    first = told["context"][0]
    assert (first.id, first.metadata["snapshot"]) == (expected[0].id, made_library.red)
    assert set(first.metadata) == {
        *("id", "page_id", "title", "section", "url", "licence", "revised", "snapshot", "kind")
    }
    retriever.source.close()


def test_search_metadata_are_added_on_request(places: dict[str, dict[str, str]], expected: list[Hit]) -> None:
    retriever = BookwheelRetriever(**places["folder"], k=2, search_metadata=True)
    documents = retriever.invoke(ASKED)
    assert [(document.metadata["rank"], document.metadata["legs"]) for document in documents] == [(1, []), (2, [])]
    assert [document.metadata["score"] for document in documents] == pytest.approx(
        [hit.score for hit in expected], abs=1e-4
    )
    retriever.source.close()


def test_ensemble_sums_the_ranks_of_a_passage(places: dict[str, dict[str, str]]) -> None:
    retrievers = [BookwheelRetriever(**places["folder"], retriever=name, k=3) for name in ("exact", "hnsw")]
    rankings = [[one.id for one in retriever.invoke(ASKED)] for retriever in retrievers]
    scores = Counter[str]()
    for ranking in rankings:
        for rank, identity in enumerate(ranking, start=1):
            scores[str(identity)] += 0.5 / (60 + rank)
    fused = EnsembleRetriever(retrievers=retrievers, weights=[0.5, 0.5], id_key="id").invoke(ASKED)
    assert len(fused) == len(scores)
    assert [scores[str(one.id)] for one in fused] == sorted(scores.values(), reverse=True)
    for retriever in retrievers:
        retriever.source.close()


def test_passages_of_several_queries_are_united(places: dict[str, dict[str, str]]) -> None:
    retriever = BookwheelRetriever(**places["folder"], k=3)
    queries = [ASKED, ASKED.upper()]
    expanded = MultiQueryRetriever.from_llm(retriever, FakeListChatModel(responses=["\n".join(queries)]))
    identities = [one.id for one in expanded.invoke(ASKED)]
    assert sorted(identities, key=str) == sorted(
        {one.id for query in queries for one in retriever.invoke(query)}, key=str
    )
    assert len(identities) < 6
    retriever.source.close()


@pytest.mark.anyio
class TestStandard(RetrieversIntegrationTests):
    """LangChain's own tests of a retriever."""

    @pytest.fixture(autouse=True)
    def use_folder(self, places: dict[str, dict[str, str]]) -> None:
        self.folder = places["folder"]

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
        return ASKED


def test_it_is_asked_in_batches_and_asynchronously(places: dict[str, dict[str, str]]) -> None:
    retriever = BookwheelRetriever(**places["folder"], k=3)
    many = retriever.batch([ASKED, "red 3"])
    assert [len(one) for one in many] == [3, 3]
    assert [one.id for one in asyncio.run(retriever.ainvoke(ASKED))] == [one.id for one in many[0]]
    assert len(retriever.invoke(ASKED, k=1)) == 1
    retriever.source.close()


def test_what_is_wrong_is_told_when_it_is_made_or_asked(nowhere: str) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        BookwheelRetriever()
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        BookwheelRetriever(folder=nowhere, k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        BookwheelRetriever(folder=nowhere).invoke("who?")


def test_a_token_is_not_shown() -> None:
    assert "hushhush" not in repr(BookwheelRetriever(service="http://localhost:1", token="hushhush"))
