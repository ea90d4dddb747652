"""A source that follows a ref: each new version is pulled, tried and opened before it is used."""

from pathlib import Path
from typing import Self

from rag_model.errors import BookwheelError, StoreError
from rag_model.integrations.source import RetrievedHits, SourceSettings
from rag_model.retrieve.retriever import Queries, check_queries
from rag_model.serving.following.follower import FollowedRef, RefFollower
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.monitoring.observer import Observer
from rag_model.serving.settings import ServiceSettings


class FollowingSource:
    """Searches the snapshot that a ref names at the time; a thread follows the ref."""

    def __init__(self, slot: SnapshotSlot, follower: RefFollower) -> None:
        """Search the snapshot in `slot`, which `follower` updates."""
        self._slot, self.follower = slot, follower

    @classmethod
    def open(cls, target: FollowedRef, settings: ServiceSettings | None = None) -> Self:
        """Pull and open the snapshot that the ref names now, and start to follow the ref.

        If the store is unreachable, the last pulled snapshot of this ref is opened.

        Raises:
            BookwheelError: There is no such snapshot, or it is refused; the message is the
                follower's.
        """
        slot, fatal_errors = SnapshotSlot(), list[BookwheelError]()
        follower = RefFollower(target, slot, settings or ServiceSettings(), Observer(), fatal_errors.append)
        follower.poll()
        if slot.served_ref is None:
            if fatal_errors:
                raise fatal_errors[0]
            refusal = follower.refusal
            raise StoreError(follower.problem or (refusal.reason if refusal else "closed"))
        follower.start()
        return cls(slot, follower)

    def search(self, query: str, k: int | None) -> RetrievedHits:
        """Return the best `k` passages of a query, all of one snapshot.

        Raises:
            UsageError: The query is empty, or `k` is below 1 or above the retriever's maximum.
        """
        check_queries([query])
        with self._slot.acquire() as loaded:
            (hits,) = loaded.search(Queries([query]), k)
            return RetrievedHits(loaded.id, hits)

    def close(self) -> None:
        """Stop to follow the ref, and free all resources."""
        self.follower.stop()
        self._slot.close()


def open_following_source(source_settings: SourceSettings) -> FollowingSource:
    """Pull and open the snapshot of a ref, and follow the ref.

    Raises:
        BookwheelError: As `FollowingSource.open`.
    """
    retrievers = () if source_settings.retriever is None else (source_settings.retriever,)
    target = FollowedRef(source_settings.store or "", source_settings.ref or "latest", Path(source_settings.dest or ""))
    return FollowingSource.open(target, ServiceSettings(retrievers=retrievers))
