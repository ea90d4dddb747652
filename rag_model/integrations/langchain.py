"""A retriever for LangChain: `pip install 'bookwheel[langchain]'`."""

from functools import cached_property
from typing import Any

from rag_model.extras import require
from rag_model.integrations.source import LazySource, SourceSettings, build_metadata

require("langchain_core", "langchain")

from langchain_core.callbacks import CallbackManagerForRetrieverRun  # noqa: E402 - after `require`
from langchain_core.documents import Document  # noqa: E402
from langchain_core.retrievers import BaseRetriever  # noqa: E402
from pydantic import Field, SecretStr  # noqa: E402


class BookwheelRetriever(BaseRetriever):
    """A LangChain retriever over the passages of a store, a pulled folder or a running service.

    >>> retriever = BookwheelRetriever(service="http://localhost:8000", k=3)
    >>> retriever.invoke("who wrote animal farm?")  # doctest: +SKIP

    Give exactly one of `store` (with `ref`), `folder` and `service`. The constructor checks the
    arguments, and the first query opens the source. Documents are best first; `build_metadata`
    describes their metadata.
    """

    store: str | None = Field(None, description="URL or folder of a store.")
    ref: str | None = Field(
        None, description="A snapshot of the store; by default `latest`, as it is at the first use."
    )
    dest: str | None = Field(None, description="Folder for pulled snapshots; with it, the ref is followed.")
    folder: str | None = Field(None, description="A folder that `bookwheel pull` wrote.")
    service: str | None = Field(None, description="URL of a running `bookwheel serve`.")
    token: SecretStr | None = Field(
        None, description="Bearer token of the service; by default BOOKWHEEL_TOKEN of the environment."
    )
    retriever: str | None = Field(None, description="Retriever expression, such as `rrf(hnsw, bm25)`.")
    encoder: str | None = Field(None, description="Question encoder instead of the snapshot's.")
    k: int | None = Field(
        None, ge=1, description="Passages per query; by default 5, or all passages of a smaller snapshot."
    )
    search_metadata: bool = Field(
        False,
        description="Add rank, score and legs to the metadata. LangChain then no longer fuses equal passages.",
    )

    def model_post_init(self, context: Any) -> None:
        """Check the arguments.

        Raises:
            UsageError: For the same reasons as `SourceSettings`.
        """
        super().model_post_init(context)
        _ = self.source  # creating the settings checks them

    @cached_property
    def source(self) -> LazySource:
        """The source of the passages; its `close` frees all resources."""
        token = None if self.token is None else self.token.get_secret_value()
        location = (self.store, self.ref, self.dest, self.folder, self.service)
        return LazySource(SourceSettings(*location, token, self.retriever, self.encoder))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        """Return the passages of a query; `k` overrides their number, as in `invoke(query,
        k=3)`.
        """
        result = self.source.search(query, self.k if k is None else k)
        return [
            Document(
                id=hit.id,
                page_content=hit.text,
                metadata=build_metadata(hit, result.snapshot, search_metadata=self.search_metadata),
            )
            for hit in result.hits
        ]
