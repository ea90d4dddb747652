"""A retriever for Haystack: `pip install 'bookwheel[haystack]'`.

Haystack sends telemetry unless `HAYSTACK_TELEMETRY_ENABLED` is `False` when it is first imported.
This module sets the variable to `False` if it is not set, so import it before Haystack.
"""

import os
from dataclasses import asdict
from typing import Any, Self

from rag_model.errors import UsageError
from rag_model.extras import require
from rag_model.integrations.source import LazySource, SourceSettings, build_metadata

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
require("haystack", "haystack")

from haystack import Document, component, default_from_dict, default_to_dict  # noqa: E402 - see above
from haystack.utils import Secret  # noqa: E402


@component
class BookwheelRetriever:
    """A component that retrieves passages of a store, a pulled folder or a running service.

    >>> retriever = BookwheelRetriever(service="http://localhost:8000", top_k=3)
    >>> retriever.run("who wrote animal farm?")["documents"]  # doctest: +SKIP

    Documents are best first; `build_metadata` describes their `meta`. The component can be
    serialized; a token is stored only as the name of its environment variable.
    """

    def __init__(
        self,
        *,
        store: str | None = None,
        ref: str | None = None,
        dest: str | None = None,
        folder: str | None = None,
        service: str | None = None,
        token: Secret | None = None,
        retriever: str | None = None,
        encoder: str | None = None,
        top_k: int | None = None,
        search_metadata: bool = False,
    ) -> None:
        """Create a component; `SourceSettings` describes the arguments.

        The source is opened by `warm_up` or by the first query. A query returns `top_k` passages
        (default: 5, or all passages if the snapshot has fewer). `search_metadata` adds `rank`,
        `score` and `legs` to the `meta` of documents, which then differs between searches.

        Raises:
            UsageError: Not exactly one of `store`, `folder` and `service` is given, or `top_k` is
                below 1.
        """
        if top_k is not None and top_k < 1:
            raise UsageError(f"top_k is {top_k}: request at least 1 passage")
        token_value = None if token is None else token.resolve_value()
        self.source = LazySource(SourceSettings(store, ref, dest, folder, service, token_value, retriever, encoder))
        self.token, self.top_k, self.search_metadata = token, top_k, search_metadata

    def warm_up(self) -> None:
        """Open the source, so that the first query does not wait for it."""
        self.source.open()

    def to_dict(self) -> dict[str, Any]:
        """Serialize the component for `from_dict`.

        Raises:
            ValueError: The token is a literal and not an environment variable
                (`Secret.from_env_var`).
        """
        retriever_settings = {"token": self.token, "top_k": self.top_k, "search_metadata": self.search_metadata}
        return default_to_dict(self, **asdict(self.source.settings) | retriever_settings)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create the component from the result of `to_dict`."""
        retriever: Self = default_from_dict(cls, data)
        return retriever

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """Return the best passages of a query as `documents`; `top_k` overrides the default.

        Raises:
            UsageError: The query is empty, or `top_k` is out of range.
        """
        result = self.source.search(query, self.top_k if top_k is None else top_k)
        return {
            "documents": [
                Document(
                    id=hit.id,
                    content=hit.text,
                    meta=build_metadata(hit, result.snapshot, search_metadata=self.search_metadata),
                    score=hit.score,
                )
                for hit in result.hits
            ]
        }
