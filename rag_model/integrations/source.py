"""The source of a framework's passages: a store, a pulled folder or a running service.

`PassageSource` is the protocol, `SourceSettings` describes a source, and `LazySource` opens it at
the first query.
"""

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from rag_model.errors import BookwheelError, StoreError, UsageError
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.retriever import Queries, check_queries
from rag_model.serving.following.follower import FollowedRef, RefFollower
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.monitoring.observer import Observer
from rag_model.serving.settings import ServiceSettings

if TYPE_CHECKING:
    from rag_model.client import Client
    from rag_model.retrieve.retriever import SnapshotRetriever

_SEARCH_METADATA = ("rank", "score", "legs")  # fields that differ between searches
# The sources to which a setting applies.
_SOURCES_BY_SETTING = {"ref": ["store"], "dest": ["store"], "token": ["service"], "encoder": ["store", "folder"]}


@dataclass(frozen=True, slots=True)
class RetrievedHits:
    """The hits of one query."""

    snapshot: str  # full id of the searched snapshot
    hits: Sequence[Hit]  # hits, best first


class PassageSource(Protocol):
    """A source of passages. Thread-safe."""

    def search(self, query: str, k: int | None) -> RetrievedHits:
        """Return the best `k` passages of a query.

        If `k` is None, 5 passages are returned, or all passages if the snapshot has fewer.

        Raises:
            UsageError: The query is empty, or `k` is out of range.
            ServiceError: A service cannot answer.
        """
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The location of the passages (a store and a ref, a pulled folder or a service), and the
    retriever to search them with.
    """

    store: str | None = None  # URL or folder of a store
    # Snapshot of the store: a ref, ref@number, id or unique prefix of an id; None: latest.
    ref: str | None = None
    dest: str | None = None  # folder for pulled snapshots; if it is set, the ref is followed
    folder: str | None = None  # folder that `bookwheel pull` wrote
    service: str | None = None  # URL of a running `bookwheel serve`
    # Bearer token of the service; None: BOOKWHEEL_TOKEN in the environment.
    token: str | None = field(default=None, repr=False)
    # retriever expression; None: the default of the snapshot or of the service
    retriever: str | None = None
    encoder: str | None = None  # name of the question encoder; None: the snapshot's encoder

    def __post_init__(self) -> None:
        """Check that the settings describe exactly one source.

        Raises:
            UsageError: Not exactly one of store, folder and service is given, or a setting does not
                apply to the given source.
        """
        given_sources = [name for name in ("store", "folder", "service") if getattr(self, name)]
        if len(given_sources) != 1:
            sources_text = " and ".join(given_sources) or "none of them is given"
            raise UsageError(
                f"passages come from a store, a folder or a service ({sources_text}): give one of the three"
            )
        for name, allowed_sources in _SOURCES_BY_SETTING.items():
            if getattr(self, name) and given_sources[0] not in allowed_sources:
                raise UsageError(
                    f"{name} applies to a {' or a '.join(allowed_sources)}, not to a {given_sources[0]}: omit it"
                )
        if self.dest and self.encoder:
            raise UsageError("a ref is followed with the encoders of its snapshots: omit encoder or dest")


class LazySource:
    """A `PassageSource` that is opened by the first query, so that building a pipeline opens
    nothing.
    """

    def __init__(self, settings: SourceSettings) -> None:
        """Create a source that is not open yet."""
        self.settings = settings
        self._lock = threading.Lock()
        self._source: PassageSource | None = None

    def open(self) -> PassageSource:
        """Open the source, or return it if it is open.

        Raises:
            BookwheelError: The source cannot be opened; the next call tries again.
        """
        with self._lock:
            if self._source is None:
                self._source = open_source(self.settings)
            return self._source

    def search(self, query: str, k: int | None) -> RetrievedHits:
        """Return the best `k` passages of a query; see `PassageSource.search`."""
        return self.open().search(query, k)

    def close(self) -> None:
        """Free all resources; the next query opens the source again."""
        with self._lock:
            if self._source is not None:
                self._source.close()
            self._source = None


class SnapshotSource:
    """A `PassageSource` over one snapshot, which does not follow a ref."""

    def __init__(self, retriever: "SnapshotRetriever") -> None:
        """Create a source that searches with `retriever`."""
        self._retriever = retriever

    def search(self, query: str, k: int | None) -> RetrievedHits:
        """Return the best `k` passages of a query.

        Raises:
            UsageError: The query is empty, or `k` is below 1 or above the retriever's maximum.
        """
        (hits,) = self._retriever.search([query], self._retriever.choose_depth(k))
        return RetrievedHits(self._retriever.snapshot.id, hits)

    def close(self) -> None:
        """Close the snapshot's files."""
        self._retriever.snapshot.close()


class ServiceSource:
    """A `PassageSource` over a running service; the service itself follows a ref."""

    def __init__(self, client: "Client", retriever: str | None = None) -> None:
        """Create a source that searches with `client`, and with the service's default retriever
        if `retriever` is None.
        """
        self._client, self._retriever = client, retriever

    def search(self, query: str, k: int | None) -> RetrievedHits:
        """Return the best `k` passages of a query.

        Raises:
            UsageError: The service refuses the request.
            ServiceError: The service cannot answer.
        """
        reply = self._client.search([query], k, self._retriever)
        return RetrievedHits(reply.snapshot, [hit for result in reply.results for hit in result.hits])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def open_source(settings: SourceSettings) -> PassageSource:
    """Open a source. It follows a ref only if it is a service, or a store with `dest`.

    Raises:
        BookwheelError: There is no such store, snapshot, folder or retriever, or the service's URL
            is invalid.
    """
    if settings.service:
        from rag_model.client import Client  # noqa: PLC0415 - imports httpx

        return ServiceSource(Client(settings.service, settings.token), settings.retriever)
    if settings.dest:
        retrievers = () if settings.retriever is None else (settings.retriever,)
        target = FollowedRef(settings.store or "", settings.ref or "latest", Path(settings.dest))
        return FollowingSource.open(target, ServiceSettings(retrievers=retrievers))
    return _open_snapshot_source(settings)


def _open_snapshot_source(settings: SourceSettings) -> SnapshotSource:
    from rag_model.retrieve.factory import open_retriever  # noqa: PLC0415 - imports faiss
    from rag_model.store.versions.snapshot import Snapshot  # noqa: PLC0415

    if settings.folder is not None:
        snapshot = Snapshot.from_folder(settings.folder)
    else:
        snapshot = Snapshot.open(settings.store or "", settings.ref or "latest")
    try:
        return SnapshotSource(open_retriever(snapshot, settings.retriever, encoder=settings.encoder))
    except BaseException:
        snapshot.close()
        raise


def build_metadata(hit: Hit, snapshot: str, *, search_metadata: bool = False) -> dict[str, Any]:
    """Build the metadata of a passage, for attribution and tracing; all values are plain JSON.

    Frameworks identify a passage by its text and metadata when they merge the results of several
    queries or retrievers, so the metadata must be equal in every search. `search_metadata` adds
    `rank`, `score` and `legs`, which differ between searches; `legs` has the rank and score in each
    child retriever, and is empty if the retriever is a single index.
    """
    metadata = hit.to_json() | {"legs": [asdict(child_hit) for child_hit in hit.visible_legs], "snapshot": snapshot}
    hidden_keys = ("text",) if search_metadata else ("text", *_SEARCH_METADATA)
    return {name: value for name, value in metadata.items() if name not in hidden_keys}


class FollowingSource:
    """A `PassageSource` over the snapshot that a ref currently names; a thread follows the ref."""

    def __init__(self, slot: SnapshotSlot, follower: RefFollower) -> None:
        """Create a source over the snapshot in `slot`, which `follower` updates."""
        self._slot, self.follower = slot, follower

    @classmethod
    def open(cls, target: FollowedRef, settings: ServiceSettings | None = None) -> Self:
        """Pull and open the snapshot that the ref names now, and start to follow the ref.

        If the store is unreachable, the last pulled snapshot of this ref is opened.

        Raises:
            BookwheelError: There is no such snapshot, or it is refused.
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
        with self._slot.acquire() as loaded_snapshot:
            (hits,) = loaded_snapshot.search(Queries([query]), k)
            return RetrievedHits(loaded_snapshot.id, hits)

    def close(self) -> None:
        """Stop following the ref, and free all resources."""
        self.follower.stop()
        self._slot.close()
