"""The retriever in a real LangChain chain that answers; the chat model is LangChain's own for tests."""

import asyncio

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from pydantic import ValidationError

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.langchain import BookwheelRetriever
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import ASKED


def joined(documents: list[Document]) -> str:
    return "\n".join(one.page_content for one in documents)


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
        *("rank", "score", "id", "page_id", "title", "section", "url", "licence", "legs", "revised", "snapshot")
    }
    assert first.metadata["score"] == pytest.approx(expected[0].score, abs=1e-4)
    retriever.source.close()


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
