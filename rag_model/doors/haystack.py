"""A retriever for Haystack: `pip install 'bookwheel[haystack]'`.

Haystack reports its use over the network unless `HAYSTACK_TELEMETRY_ENABLED` says otherwise when it is first imported.
This module turns that off where the variable is not set: import it before Haystack.
"""

import os
from dataclasses import asdict
from typing import Any, Self

from rag_model.doors.source import Opening, Place, metadata
from rag_model.errors import UsageError
from rag_model.extras import require

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
require("haystack", "haystack")

from haystack import Document, component, default_from_dict, default_to_dict  # noqa: E402 - after the lines above
from haystack.utils import Secret  # noqa: E402


@component
class BookwheelRetriever:
    """Passages of a store, a pulled folder or a running service, as Haystack's documents.

    >>> retriever = BookwheelRetriever(service="http://localhost:8000", top_k=3)
    >>> retriever.run("who wrote animal farm?")["documents"]  # doctest: +SKIP

    Documents are best first; their `meta` is that of `rag_model.doors.source`. A pipeline with it is written and read
    back as any other; a token is written only as the name of the environment variable that holds it.
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
        top_k: int = 5,
    ) -> None:
        """Check what is given; `warm_up` or the first question opens the place. For the arguments see `Place`.

        Raises:
            UsageError: it is not one of `store`, `folder` and `service`, or `top_k` is below 1.
        """
        _check(top_k)
        secret = None if token is None else token.resolve_value()
        self.source = Opening(Place(store, ref, dest, folder, service, secret, retriever, encoder))
        self.token, self.top_k = token, top_k

    def warm_up(self) -> None:
        """Open the place, so that the first question does not wait for it."""
        self.source.open()

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` makes an equal component of.

        Raises:
            ValueError: the token was given itself, and not as an environment variable (`Secret.from_env_var`).
        """
        return default_to_dict(self, **asdict(self.source.place) | {"token": self.token, "top_k": self.top_k})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the component that `to_dict` described."""
        made: Self = default_from_dict(cls, data)
        return made

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """Return the best passages of a question as `documents`; `top_k` instead of the component's own.

        Raises:
            UsageError: the question is empty, or `top_k` is out of range.
        """
        given = self.source.find(query, self.top_k if top_k is None else top_k)
        return {
            "documents": [
                Document(id=hit.id, content=hit.text, meta=metadata(hit, given.snapshot), score=hit.score)
                for hit in given.hits
            ]
        }


def _check(top_k: int) -> None:
    if top_k < 1:
        raise UsageError(f"top_k is {top_k}: ask for at least 1 passage")
