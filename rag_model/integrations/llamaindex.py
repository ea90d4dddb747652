"""A retriever for LlamaIndex: `pip install 'bookwheel[llamaindex]'`."""

import asyncio

from rag_model.errors import UsageError
from rag_model.extras import require
from rag_model.integrations.source import LazySource, SourceSettings, build_metadata

require("llama_index.core", "llamaindex")

from llama_index.core.retrievers import BaseRetriever  # noqa: E402 - after `require`
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode  # noqa: E402

_PROMPT_METADATA = ("title", "section")  # metadata that is part of the text for models


class BookwheelRetriever(BaseRetriever):
    """A LlamaIndex retriever over the passages of a store, a pulled folder or a running service.

    >>> retriever = BookwheelRetriever(service="http://localhost:8000", k=3)
    >>> retriever.retrieve("who wrote animal farm?")  # doctest: +SKIP

    Nodes are best first; `build_metadata` describes their metadata. Language models get only the
    metadata `title` and `section`.
    """

    def __init__(
        self,
        *,
        store: str | None = None,
        ref: str | None = None,
        dest: str | None = None,
        folder: str | None = None,
        service: str | None = None,
        token: str | None = None,
        retriever: str | None = None,
        encoder: str | None = None,
        k: int | None = None,
        search_metadata: bool = False,
    ) -> None:
        """Create a retriever; `SourceSettings` describes the arguments. The first query opens the
        source.

        A query returns `k` passages (default: 5, or all passages if the snapshot has fewer).
        `search_metadata` adds `rank`, `score` and `legs` to the metadata; LlamaIndex then no longer
        merges equal passages of two searches.

        Raises:
            UsageError: Not exactly one of `store`, `folder` and `service` is given, or `k` is below
                1.
        """
        super().__init__()
        if k is not None and k < 1:
            raise UsageError(f"k is {k}: request at least 1 passage")
        self.source = LazySource(SourceSettings(store, ref, dest, folder, service, token, retriever, encoder))
        self.k, self.search_metadata = k, search_metadata

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        result = self.source.search(query_bundle.query_str, self.k)
        nodes = []
        for hit in result.hits:
            metadata = build_metadata(hit, result.snapshot, search_metadata=self.search_metadata)
            hidden_metadata_keys = [name for name in metadata if name not in _PROMPT_METADATA]
            node = TextNode(
                id_=hit.id,
                text=hit.text,
                metadata=metadata,
                excluded_llm_metadata_keys=hidden_metadata_keys,
                excluded_embed_metadata_keys=hidden_metadata_keys,
            )
            nodes.append(NodeWithScore(node=node, score=hit.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
