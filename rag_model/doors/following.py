"""Passages of what a ref names at the time: a version is pulled, tried and opened beside the old one first."""

from pathlib import Path
from typing import Self

from rag_model.doors.source import Given, Place
from rag_model.errors import BookwheelError, StoreError
from rag_model.retrieve.questions import Questions, check_questions
from rag_model.retrieve.shown import ShownHit
from rag_model.serving.following.desk import Desk
from rag_model.serving.following.follower import Followed, Follower
from rag_model.serving.service_settings import ServiceSettings
from rag_model.serving.watching.observer import Observer


class FollowingSource:
    """Follows a ref in a thread of its own, as a service does; a version that is refused leaves the old one open."""

    def __init__(self, desk: Desk, follower: Follower) -> None:
        """Ask what is on `desk`, which `follower` keeps up to date."""
        self._desk, self.follower = desk, follower

    @classmethod
    def open(cls, followed: Followed, settings: ServiceSettings | None = None) -> Self:
        """Pull and open what the ref names now, and begin to follow it.

        Where the store cannot be reached, what the ref named when it was last pulled is opened.

        Raises:
            BookwheelError: there is no such snapshot, or it is refused; the sentence is the follower's.
        """
        desk, failures = Desk(), list[BookwheelError]()
        follower = Follower(followed, desk, settings or ServiceSettings(), Observer(), failures.append)
        follower.look()
        if desk.named is None:
            refused = follower.refusal
            raise failures[0] if failures else StoreError(follower.problem or (refused.reason if refused else "closed"))
        follower.start()
        return cls(desk, follower)

    def find(self, question: str, k: int) -> Given:
        """Return the best `k` passages of a question, all of one version.

        Raises:
            UsageError: the question is empty, or `k` is below 1 or above what the retriever gives.
        """
        check_questions([question])
        with self._desk.edition() as edition:
            (hits,) = edition.search(Questions([question]), k)
            return Given(edition.id, [ShownHit.of(hit) for hit in hits])

    def close(self) -> None:
        """Stop following, and free what is open."""
        self.follower.stop()
        self._desk.close()


def open_at(place: Place) -> FollowingSource:
    """Pull and open what the ref of a place names now, and follow it.

    Raises:
        BookwheelError: as `FollowingSource.open`.
    """
    retrievers = () if place.retriever is None else (place.retriever,)
    followed = Followed(place.store or "", place.ref or "latest", Path(place.dest or ""))
    return FollowingSource.open(followed, ServiceSettings(retrievers=retrievers))
