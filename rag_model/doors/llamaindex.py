"""A retriever for LlamaIndex: `pip install 'bookwheel[llamaindex]'`."""

import asyncio

from rag_model.doors.source import Opening, Place, metadata
from rag_model.errors import UsageError
from rag_model.extras import require

require("llama_index.core", "llamaindex")

from llama_index.core.retrievers import BaseRetriever  # noqa: E402 - after the sentence on the extra
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode  # noqa: E402

_TO_THE_MODEL = ("title", "section")  # of the metadata: the rest is for programs, and would fill the prompt


class BookwheelRetriever(BaseRetriever):
    """Passages of a store, a pulled folder or a running service, as LlamaIndex's nodes.

    >>> retriever = BookwheelRetriever(service="http://localhost:8000", k=3)
    >>> retriever.retrieve("who wrote animal farm?")  # doctest: +SKIP

    Nodes are best first; their metadata is that of `rag_model.doors.source`. A model is shown title and section.
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
        k: int = 5,
    ) -> None:
        """Check what is given; the place is opened by the first question. For the arguments see `Place`.

        Raises:
            UsageError: it is not one of `store`, `folder` and `service`, or `k` is below 1.
        """
        super().__init__()
        if k < 1:
            raise UsageError(f"k is {k}: ask for at least 1 passage")
        self.source, self.k = Opening(Place(store, ref, dest, folder, service, token, retriever, encoder)), k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        given = self.source.find(query_bundle.query_str, self.k)
        found = []
        for hit in given.hits:
            told = metadata(hit, given.snapshot)
            unshown = [name for name in told if name not in _TO_THE_MODEL]
            node = TextNode(
                id_=hit.id,
                text=hit.text,
                metadata=told,
                excluded_llm_metadata_keys=unshown,
                excluded_embed_metadata_keys=unshown,
            )
            found.append(NodeWithScore(node=node, score=hit.score))
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
