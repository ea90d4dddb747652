"""A retriever for LangChain: `pip install 'bookwheel[langchain]'`."""

from functools import cached_property
from typing import Any

from rag_model.doors.source import Opening, Place, metadata
from rag_model.extras import require

require("langchain_core", "langchain")

from langchain_core.callbacks import CallbackManagerForRetrieverRun  # noqa: E402 - after the sentence on the extra
from langchain_core.documents import Document  # noqa: E402
from langchain_core.retrievers import BaseRetriever  # noqa: E402
from pydantic import Field, SecretStr  # noqa: E402


class BookwheelRetriever(BaseRetriever):
    """Passages of a store, a pulled folder or a running service, as LangChain's documents.

    >>> retriever = BookwheelRetriever(service="http://localhost:8000", k=3)
    >>> retriever.invoke("who wrote animal farm?")  # doctest: +SKIP

    What is given to it is checked when it is made; the place is opened by the first question. Give one of `store` (with
    `ref`), `folder` and `service`. Documents are best first; their metadata is that of `rag_model.doors.source`.
    """

    store: str | None = Field(None, description="URL or folder of a store.")
    ref: str | None = Field(
        None, description="A snapshot of the store; by default `latest`, as it is at the first use."
    )
    dest: str | None = Field(None, description="Where the store's snapshots are pulled to: then the ref is followed.")
    folder: str | None = Field(None, description="A folder that `bookwheel pull` wrote.")
    service: str | None = Field(None, description="URL of a running `bookwheel serve`.")
    token: SecretStr | None = Field(None, description="Of the service; by default BOOKWHEEL_TOKEN of the environment.")
    retriever: str | None = Field(None, description="How passages are found, such as `rrf(hnsw, bm25)`.")
    encoder: str | None = Field(None, description="Question encoder instead of the snapshot's.")
    k: int = Field(5, ge=1, description="Passages a question.")

    def model_post_init(self, context: Any) -> None:
        """Refuse what names no one place.

        Raises:
            UsageError: as `Place` does.
        """
        super().model_post_init(context)
        _ = self.source

    @cached_property
    def source(self) -> Opening:
        """Where the passages come from; `close` frees what it opened."""
        token = None if self.token is None else self.token.get_secret_value()
        where = (self.store, self.ref, self.dest, self.folder, self.service)
        return Opening(Place(*where, token, self.retriever, self.encoder))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        """Return the passages of one question; `invoke(question, k=3)` asks for another number of them."""
        given = self.source.find(query, self.k if k is None else k)
        return [
            Document(id=hit.id, page_content=hit.text, metadata=metadata(hit, given.snapshot)) for hit in given.hits
        ]
