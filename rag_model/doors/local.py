"""Passages of a snapshot that is opened here: from a store, or from a pulled folder."""

from rag_model.doors.source import Given, Place
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.shown import ShownHit
from rag_model.store.versions.snapshot import Snapshot


class LocalSource:
    """Searches one snapshot; what it opened stays as it is when the ref moves."""

    def __init__(self, retriever: SnapshotRetriever) -> None:
        """Ask `retriever`."""
        self._retriever = retriever

    def find(self, question: str, k: int) -> Given:
        """Return the best `k` passages of a question.

        Raises:
            UsageError: the question is empty, or `k` is below 1 or above what the retriever gives.
        """
        (hits,) = self._retriever.search([question], k)
        return Given(self._retriever.snapshot.id, [ShownHit.of(hit) for hit in hits])

    def close(self) -> None:
        """Close the snapshot's files."""
        self._retriever.snapshot.close()


def open_at(place: Place) -> LocalSource:
    """Open the snapshot of a place, and its retriever.

    Raises:
        BookwheelError: what `Snapshot.open`, `Snapshot.from_folder` and `open_retriever` raise.
    """
    if place.folder is not None:
        snapshot = Snapshot.from_folder(place.folder)
    else:
        snapshot = Snapshot.open(place.store or "", place.ref or "latest")
    try:
        return LocalSource(open_retriever(snapshot, place.retriever, encoder=place.encoder))
    except BaseException:
        snapshot.close()
        raise
