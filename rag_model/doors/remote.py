"""Passages of a running service."""

from rag_model.client import Client
from rag_model.doors.source import Given, Place


class RemoteSource:
    """Asks a service, which follows its ref by itself."""

    def __init__(self, client: Client, retriever: str | None = None) -> None:
        """Ask by `client`, with a retriever of the service; None: its first."""
        self._client, self._retriever = client, retriever

    def find(self, question: str, k: int) -> Given:
        """Return the best `k` passages of a question.

        Raises:
            UsageError: the service refuses the request.
            ServiceError: it cannot answer.
        """
        reply = self._client.search([question], k, self._retriever)
        return Given(reply.snapshot, [hit for result in reply.results for hit in result.hits])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def open_at(place: Place) -> RemoteSource:
    """Prepare to ask the service of a place; nothing is sent yet.

    Raises:
        UsageError: the URL is not that of a service.
    """
    return RemoteSource(Client(place.service or "", place.token), place.retriever)
