"""Where a framework's retriever gets its passages from: one small protocol, and what opens it."""

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, Protocol

from rag_model.errors import UsageError
from rag_model.retrieve.shown import ShownHit

_BELONGS = {"ref": ["store"], "dest": ["store"], "token": ["service"], "encoder": ["store", "folder"]}


@dataclass(frozen=True, slots=True)
class Given:
    """The passages for one question."""

    snapshot: str  # full id of the version that they are from
    hits: Sequence[ShownHit]  # best first


class Source(Protocol):
    """Finds passages. Safe among threads."""

    def find(self, question: str, k: int) -> Given:
        """Return the best `k` passages of a question.

        Raises:
            UsageError: the question is empty, or `k` is out of range.
            ServiceError: a service cannot answer.
        """
        ...

    def close(self) -> None:
        """Free what is open."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A store and a ref, a pulled folder, or a service's URL; and how passages are found there."""

    store: str | None = None  # URL or folder
    ref: str | None = None  # of the store: a ref, ref@number, an id or a unique prefix; None: latest
    dest: str | None = None  # folder that the store's snapshots are pulled to; with it, the ref is followed
    folder: str | None = None  # that `bookwheel pull` wrote
    service: str | None = None  # URL of a running `bookwheel serve`
    token: str | None = field(default=None, repr=False)  # of the service; None: the environment's BOOKWHEEL_TOKEN
    retriever: str | None = None  # an expression; None: the snapshot's default, or the service's first
    encoder: str | None = None  # of the questions; None: what the snapshot carries

    def __post_init__(self) -> None:
        """Refuse what names no one place.

        Raises:
            UsageError: not one of store, folder and service is given, or what does not belong to it.
        """
        given = [name for name in ("store", "folder", "service") if getattr(self, name)]
        if len(given) != 1:
            named = " and ".join(given) or "none of them is given"
            raise UsageError(f"passages come from a store, a folder or a service ({named}): give one of the three")
        for name, of in _BELONGS.items():
            if getattr(self, name) and given[0] not in of:
                raise UsageError(f"{name} belongs to a {' or a '.join(of)}, not to a {given[0]}: leave it out")
        if self.dest and self.encoder:
            raise UsageError("a ref is followed with the encoders that its snapshots carry: leave encoder or dest out")


class Opening:
    """A `Source` that is opened when it is first asked, so that a pipeline is put together without one."""

    def __init__(self, place: Place) -> None:
        """Remember the place."""
        self.place = place
        self._lock, self._opened = threading.Lock(), list[Source]()

    def open(self) -> Source:
        """Open the source, or return it where it is open.

        Raises:
            BookwheelError: it cannot be opened; the next call tries again.
        """
        with self._lock:
            if not self._opened:
                self._opened.append(open_source(self.place))
            return self._opened[0]

    def find(self, question: str, k: int) -> Given:
        """Return the best `k` passages of a question, as `Source.find` does."""
        return self.open().find(question, k)

    def close(self) -> None:
        """Free what is open; the next question opens it again."""
        with self._lock:
            for one in self._opened:
                one.close()
            self._opened.clear()


def open_source(place: Place) -> Source:
    """Open a place. A snapshot stays the version that it was opened with, but for `dest`; a service follows its ref.

    Raises:
        BookwheelError: there is no such store, snapshot, folder or retriever, or the URL is not that of a service.
    """
    kind = "remote" if place.service else "following" if place.dest else "local"
    module: Any = import_module(f"rag_model.doors.{kind}")  # with httpx, torch or faiss
    opened: Source = module.open_at(place)
    return opened


def metadata(hit: ShownHit, snapshot: str) -> dict[str, Any]:
    """Return what a passage is credited and traced by; all values are plain JSON.

    `legs` is empty where one index found the passage: it would repeat rank and score.
    """
    told = asdict(hit)
    del told["text"]
    return {**told, "legs": list(told["legs"]), "snapshot": snapshot}
