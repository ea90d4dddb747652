"""Refs: movable names of snapshots, or of models, each an append-only numbered log.

A ref moves by creating the next number exclusively: this is compare-and-swap without a lock, and the log gives history
and rollback. The highest number is current. Nothing is ever overwritten, and no clock is used to order moves.

A ref is deleted by a move that names nothing, so if one writer moves it and another deletes it, exactly one of them
succeeds. A deleted ref can be created again; its numbers continue. A move that names a snapshot which a takedown
replaced (`rag_model.store.versions.takedowns`) is read as naming the replacement, or nothing.
"""

import re
import secrets
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

from rag_model.errors import NotFoundError, RefConflictError, StoreError, UsageError
from rag_model.store.objects.files import Files, json_bytes
from rag_model.store.versions.signatures import Signatures, Trust, as_stored
from rag_model.store.versions.takedowns import Takedowns
from rag_model.terminal import check_printable

_FORMAT = 1
_DELETING = 2  # the format of a deleting move, which earlier versions cannot read
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_FILE = re.compile(r"(\d{8})\.json")
_SNAPSHOT = re.compile(r"[0-9a-f]{64}")
_LAST = 99_999_999  # what a file's eight digits can name


@dataclass(frozen=True, slots=True)
class RefMove:
    """One entry of a ref's log."""

    number: int  # 1, 2, 3, … without gaps
    snapshot: str  # id of the snapshot (or model, for a ref of models), 64 hex digits; "": the ref is deleted
    created_at: str  # ISO 8601, UTC, by the writer's clock: for people only
    previous: str | None  # the id before, None for the first move
    nonce: str  # tells a retried write from another writer's
    note: str = ""

    def to_json(self, noun: str = "snapshot") -> dict[str, Any]:
        """Return the move as JSON values; `noun` is the key of what the ref names."""
        fields = {noun if key == "snapshot" else key: value for key, value in asdict(self).items()}
        return {"format": _FORMAT if self.snapshot else _DELETING, **fields}

    @classmethod
    def from_json(cls, value: dict[str, Any], noun: str = "snapshot") -> Self:
        """Read back what `to_json` wrote.

        Raises:
            StoreError: written by a newer version, or damaged.
        """
        fields = dict(value)
        written = fields.pop("format", None)
        if type(written) is int and written > _DELETING:
            raise StoreError(
                f"the ref was moved in format {written} and this bookwheel reads {_DELETING}: upgrade bookwheel"
            )
        try:
            move = cls(snapshot=fields.pop(noun, None), **fields)
        except TypeError as broken:
            raise StoreError(f"a ref's log is damaged: {broken}") from broken
        for name in ("created_at", "nonce", "note"):
            if not isinstance(getattr(move, name), str):
                raise StoreError(f"a ref's log is damaged: {name} is {getattr(move, name)!r}, which is no text")
        if not _SNAPSHOT.fullmatch(str(move.snapshot)) and (written, move.snapshot) != (_DELETING, ""):
            raise StoreError(f"a ref's log is damaged: {move.snapshot!r} is no {noun} id")
        return move


class Refs:
    """The refs of one store: those of its snapshots or, in another folder, those of its models."""

    def __init__(self, files: Files, folder: str = "refs", noun: str = "snapshot") -> None:
        """Use the refs below `folder` in the store of `files`; `noun` says what they name."""
        self._files = files
        self._folder = folder
        self._noun = noun
        self._takedowns = Takedowns(files)

    def names(self, *, deleted: bool = False) -> list[str]:
        """Return the names of all refs, sorted; with `deleted` also those of deleted refs."""
        logs = [name for name in self._files.names(self._folder, kind="directory") if _NAME.fullmatch(name)]
        if deleted:
            return logs
        return [name for name, move in zip(logs, self._files.ask(self.current, logs), strict=True) if move]

    def current(self, name: str) -> RefMove | None:
        """Return a ref's newest move; None when the ref does not exist."""
        newest = self._newest(name)
        return newest if newest and newest.snapshot else None

    def history(self, name: str) -> list[RefMove]:
        """Return all moves of a ref, oldest first, including those that deleted it; [] if it never existed."""
        return self._standing(self._read(name, slice(None)))

    def at(self, name: str, number: int) -> RefMove:
        """Return move `number` of a ref.

        Raises:
            StoreError: there is no such move, or its file is damaged.
        """
        return self._standing([self._written(name, number)])[0]

    def naming(self, snapshot: str) -> list[tuple[str, int]]:
        """Return name and number of the refs whose newest move was written for a snapshot, replaced or not."""
        names = self.names(deleted=True)
        newest = zip(names, self._files.ask(lambda name: self._read(name, slice(-1, None)), names), strict=True)
        return [(name, moves[0].number) for name, moves in newest if moves and moves[0].snapshot == snapshot]

    def _newest(self, name: str) -> RefMove | None:
        moves = self._standing(self._read(name, slice(-1, None)))
        return moves[0] if moves else None

    def _standing(self, moves: list[RefMove]) -> list[RefMove]:
        """Return the moves with each retired snapshot replaced by its replacement."""
        gone = self._takedowns.replaced() if moves else frozenset()
        places = {move.snapshot: self._takedowns.in_place_of(move.snapshot) for move in moves if move.snapshot in gone}
        return [replace(move, snapshot=places.get(move.snapshot, move.snapshot) or "") for move in moves]

    def _read(self, name: str, some: slice) -> list[RefMove]:
        """Read some of the listed moves; list and read again if one was expired in between."""
        numbers = self.numbers(name)
        while True:
            try:
                return list(self._files.ask(lambda number: self._written(name, number), numbers[some]))
            except StoreError:
                listed, numbers = numbers, self.numbers(name)
                if listed == numbers:
                    raise

    def _written(self, name: str, number: int) -> RefMove:
        path = self.path(name, number)
        value = self._files.read_json(path)
        if value is None:
            raise NotFoundError(f"ref {name} has no move {number} in {self._files.url}: `log --ref {name}` lists them")
        move = RefMove.from_json(value, self._noun)
        if type(move.number) is not int or move.number != number:
            raise StoreError(f"{self._files.url_of(path)} is damaged: it says it is move {move.number!r}")
        return move

    def numbers(self, name: str) -> list[int]:
        """Return the numbers in a ref's log, ascending, as they are listed now."""
        listed = self._files.names(f"{self._folder}/{checked_name(name)}")
        return sorted(int(found[1]) for found in map(_FILE.fullmatch, listed) if found)

    def move(self, name: str, snapshot: str, expected: int, note: str = "", *, sign: bool = True) -> RefMove:
        """Move a ref from move number `expected` (0: it must not exist) to `snapshot`, a full id.

        If several writers move a ref from the same number, exactly one succeeds. Signed as manifests are.

        Raises:
            RefConflictError: the ref is not at `expected`; nothing was changed.
            StoreError: the store cannot exclude a second writer, or cannot be written; or the log is full.
            UsageError: the note holds a control character.
        """
        if not _SNAPSHOT.fullmatch(snapshot):
            raise UsageError(
                f"{snapshot!r} is not a full {self._noun} id (64 hex digits), so no ref can be moved to it"
            )
        return self._append(name, snapshot, expected, note, sign)

    def delete(self, name: str, expected: int, note: str = "") -> RefMove:
        """Delete a ref that is at move number `expected`; its log stays.

        Raises:
            RefConflictError: the ref is not at `expected`; nothing was changed.
            StoreError: the store cannot exclude a second writer, or cannot be written.
        """
        return self._append(name, "", expected, note, sign=True)

    def _append(self, name: str, snapshot: str, expected: int, note: str, sign: bool) -> RefMove:
        before = self._newest(name)
        stands = before.number if before and before.snapshot else 0
        if stands != expected or not (snapshot or stands):
            raise self._conflict(name, expected)
        check_printable(note, "the note")
        self.require_exclusion()
        number, previous = (before.number + 1, before.snapshot or None) if before else (1, None)
        if number > _LAST:
            raise StoreError(
                f"ref {name} in {self._files.url} is at move {_LAST}, the last that a log can hold: bookwheel did not "
                "get there by itself, so delete the files of moves that it did not write, or use another ref"
            )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        move = RefMove(number, snapshot, now, previous, secrets.token_hex(16), note)
        path, told = self.path(name, number), as_stored(move.to_json(self._noun))
        if sign:
            Signatures(self._files).sign(path, told)
        if not self._files.create(path, json_bytes(told)):
            Signatures(self._files).withdraw(path, told)
            raise self._conflict(name, expected)
        return move

    def sign(self, name: str, number: int) -> None:
        """Sign a move that exists, if the environment has a key.

        Raises:
            StoreError: there is no such move, or the store cannot be written.
        """
        self._written(name, number)
        path = self.path(name, number)
        Signatures(self._files).sign(path, self._files.read_json(path))

    def signer(self, trust: Trust, name: str, number: int) -> str | None:
        """Return the name of the trusted key that signed a move; None if there is none."""
        path = self.path(name, number)
        return trust.signer(Signatures(self._files), path, self._files.read_json(path))

    def vouched(self, name: str, number: int) -> bool:
        """Return whether a key of the trust file signed a move; without a trust file, the own key."""
        return Signatures(self._files).vouched(self.path(name, number))

    def path(self, name: str, number: int) -> str:
        """Return the path of a move in the store."""
        return f"{self._folder}/{checked_name(name)}/{number:08d}.json"

    def require_exclusion(self) -> None:
        """Probe, once, that only one of two writers can succeed; call it before long work that ends in a move.

        Raises:
            StoreError: the bucket does not honour conditional writes, or cannot be written.
        """
        if not self._excludes:
            raise StoreError(
                f"{self._files.url} does not honour conditional writes (If-None-Match), so two publishers "
                "could both succeed: publish to a bucket that does"
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
        UsageError: the name has characters other than letters, digits, `.`, `_` and `-`, begins with a dot, or is
        too long.

    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a ref name: use up to 100 letters, digits, '.', '_' and '-', no leading dot")
    return name
