"""Refs: movable names of snapshots, or of models, each an append-only numbered log.

A ref moves by creating the next number exclusively: compare-and-swap without a lock, history and rollback for
free. The highest number is current. Nothing is ever overwritten, and a clock decides nothing.
"""

import re
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

from rag_model.errors import RefConflictError, StoreError, UsageError
from rag_model.store.files import Files, json_bytes

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_FILE = re.compile(r"(\d{8})\.json")
_SNAPSHOT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RefMove:
    """One entry of a ref's log."""

    number: int  # 1, 2, 3, … without gaps
    snapshot: str  # id of what the ref names, 64 hex digits: a snapshot, or in the log of a model's ref a model
    created_at: str  # ISO 8601, UTC, by the writer's clock: for people only
    previous: str | None  # the id before, None for the first move
    nonce: str  # tells a retried write from another writer's
    note: str = ""

    def to_json(self, noun: str = "snapshot") -> dict[str, Any]:
        """Return the move as JSON values; `noun` is the key of what the ref names."""
        fields = {noun if key == "snapshot" else key: value for key, value in asdict(self).items()}
        return {"format": _FORMAT, **fields}

    @classmethod
    def from_json(cls, value: dict[str, Any], noun: str = "snapshot") -> Self:
        """Read back what `to_json` wrote.

        Raises:
            StoreError: written by a newer version, or damaged.
        """
        fields = dict(value)
        written = fields.pop("format", None)
        if type(written) is int and written > _FORMAT:
            raise StoreError(
                f"the ref was moved in format {written} and this bookwheel reads {_FORMAT}: upgrade bookwheel"
            )
        try:
            move = cls(snapshot=fields.pop(noun, None), **fields)
        except TypeError as broken:
            raise StoreError(f"a ref's log is damaged: {broken}") from broken
        if not _SNAPSHOT.fullmatch(str(move.snapshot)):
            raise StoreError(f"a ref's log is damaged: {move.snapshot!r} is no {noun} id")
        return move


class Refs:
    """The refs of one store: those of its snapshots, or, in a place of their own, those of its models."""

    def __init__(self, files: Files, folder: str = "refs", noun: str = "snapshot") -> None:
        """Look at the refs below `folder` of the store that `files` reaches; `noun` says what they name."""
        self._files = files
        self._folder = folder
        self._noun = noun

    def names(self) -> list[str]:
        """Return the names of all refs, sorted."""
        return [name for name in self._files.names(self._folder, kind="directory") if _NAME.fullmatch(name)]

    def current(self, name: str) -> RefMove | None:
        """Return a ref's newest move; None when the ref does not exist."""
        moves = self._read(name, slice(-1, None))
        return moves[0] if moves else None

    def history(self, name: str) -> list[RefMove]:
        """Return all moves of a ref, oldest first; [] when it does not exist."""
        return self._read(name, slice(None))

    def _read(self, name: str, some: slice) -> list[RefMove]:
        """Read some of the moves that are listed; once more where one was forgotten after that, since a newer came."""
        numbers = self.numbers(name)
        while True:
            try:
                return [self.at(name, number) for number in numbers[some]]
            except StoreError:
                listed, numbers = numbers, self.numbers(name)
                if listed == numbers:
                    raise

    def at(self, name: str, number: int) -> RefMove:
        """Return move `number` of a ref.

        Raises:
            StoreError: there is no such move, or its file is damaged.
        """
        path = self.path(name, number)
        value = self._files.read_json(path)
        if value is None:
            raise StoreError(f"ref {name} has no move {number} in {self._files.url}: `log --ref {name}` lists them")
        move = RefMove.from_json(value, self._noun)
        if move.number != number:
            raise StoreError(f"{self._files.url_of(path)} is damaged: it says it is move {move.number!r}")
        return move

    def numbers(self, name: str) -> list[int]:
        """Return the numbers in a ref's log, ascending, as they are listed now."""
        listed = self._files.names(f"{self._folder}/{checked_name(name)}")
        return sorted(int(found[1]) for found in map(_FILE.fullmatch, listed) if found)

    def move(self, name: str, snapshot: str, expected: int, note: str = "") -> RefMove:
        """Move a ref from move number `expected` (0: it must not exist) to `snapshot`, a full id.

        Of writers that race from one number exactly one wins.

        Raises:
            RefConflictError: the ref is not at `expected` (any more); nothing was changed.
            StoreError: the store cannot exclude a second writer, or cannot be written.
        """
        if not _SNAPSHOT.fullmatch(snapshot):
            raise UsageError(
                f"{snapshot!r} is not a full {self._noun} id (64 hex digits), so no ref can be moved to it"
            )
        before = self.current(name)
        if (before.number if before else 0) != expected:
            raise self._conflict(name, expected)
        self.require_exclusion()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        move = RefMove(expected + 1, snapshot, now, before.snapshot if before else None, secrets.token_hex(16), note)
        if not self._files.create(self.path(name, move.number), json_bytes(move.to_json(self._noun))):
            raise self._conflict(name, expected)
        return move

    def path(self, name: str, number: int) -> str:
        """Return where a move lies in the store."""
        return f"{self._folder}/{checked_name(name)}/{number:08d}.json"

    def require_exclusion(self) -> None:
        """Probe, once, that of two writers only one can win; call it before long work that ends in a move.

        Raises:
            StoreError: the bucket does not honour conditional writes, or cannot be written.
        """
        if not self._excludes:
            raise StoreError(
                f"{self._files.url} does not honour conditional writes (If-None-Match), so two publishers "
                "could both win: publish to a bucket that does"
            )

    @cached_property
    def _excludes(self) -> bool:
        return self._files.excludes()

    def _conflict(self, name: str, expected: int) -> RefConflictError:
        return RefConflictError(
            f"ref {name} in {self._files.url} is no longer at move {expected}: another writer moved "
            "it first; look at it again before moving it"
        )


def checked_name(name: str) -> str:
    """Return `name` if a ref may have it.

    Raises:
        UsageError: it holds other characters than letters, digits, `.`, `_` and `-`, begins with a dot, or is
        too long.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a ref name: use up to 100 letters, digits, '.', '_' and '-', no leading dot")
    return name
