"""Refs are movable names of snapshots or models; each has an append-only log of numbered moves.

A writer moves a ref by exclusive creation of the next number: a compare-and-swap without a lock.
The log provides history and rollback. The move with the highest number is current. No move is ever
overwritten, and the order of moves does not depend on clocks.

A deletion is a move that names no snapshot, so if one writer moves a ref and another deletes it,
exactly one of them succeeds. A deleted ref can be created again, and its numbers continue. A move
to a snapshot that a takedown replaced (`rag_model.store.versions.takedowns`) is read as a move to
the replacement, or as a deletion.
"""

import re
import secrets
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

from rag_model.errors import NotFoundError, RefConflictError, StoreError, UsageError
from rag_model.store.objects.files import NO_CONDITIONAL_WRITES, Files, encode_json
from rag_model.store.versions.checks import FULL_ID
from rag_model.store.versions.signatures import Signatures, TrustedKeys, normalize_json
from rag_model.store.versions.takedowns import Takedowns
from rag_model.untrusted_text import check_printable

_FORMAT = 1
_DELETION_FORMAT = 2  # format of a move that deletes a ref; earlier versions cannot read it
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MAX_NUMBER = 99_999_999  # highest number of a move: the file names have eight digits


@dataclass(frozen=True, slots=True)
class RefMove:
    """One entry of a ref's log."""

    number: int  # 1, 2, 3, … in the order of the moves, without gaps
    # id of the snapshot (or model, for a ref of models), 64 hex digits; "" if the ref is deleted
    snapshot: str
    created_at: str  # ISO 8601, UTC, by the writer's clock; only shown to people
    # id that the previous move names; None for the first move and after a deletion
    previous: str | None
    nonce: str  # random; distinguishes a retried write from another writer's move
    note: str = ""

    def to_json(self, noun: str = "snapshot") -> dict[str, Any]:
        """Return the move as JSON values; `noun` is the key of the id."""
        fields = {noun if key == "snapshot" else key: value for key, value in asdict(self).items()}
        return {"format": _FORMAT if self.snapshot else _DELETION_FORMAT, **fields}

    @classmethod
    def from_json(cls, value: dict[str, Any], noun: str = "snapshot") -> Self:
        """Parse and check the result of `to_json`.

        Raises:
            StoreError: the move was written by a newer version, or is damaged.
        """
        fields = dict(value)
        format_number = fields.pop("format", None)
        if type(format_number) is int and format_number > _DELETION_FORMAT:
            raise StoreError(
                f"it has format {format_number}, but this bookwheel reads up to {_DELETION_FORMAT}: upgrade bookwheel"
            )
        try:
            move = cls(snapshot=fields.pop(noun, None), **fields)
        except TypeError as error:
            raise StoreError(f"it is damaged: {error}") from error
        for name in ("created_at", "nonce", "note"):
            if not isinstance(getattr(move, name), str):
                raise StoreError(f"it is damaged: {name} is {getattr(move, name)!r}, which is not text")
        if not FULL_ID.fullmatch(str(move.snapshot)) and (format_number, move.snapshot) != (
            _DELETION_FORMAT,
            "",
        ):
            raise StoreError(f"it is damaged: {move.snapshot!r} is not a {noun} id")
        return move


class Refs:
    """The refs of a store's snapshots or, in another folder, of its models."""

    def __init__(self, files: Files, folder: str = "refs", noun: str = "snapshot") -> None:
        """Use the refs below `folder`; `noun` is snapshot, model or evaluation."""
        self._files = files
        self._folder = folder
        self._noun = noun
        self._takedowns = Takedowns(files)

    def list_names(self, *, include_deleted: bool = False) -> list[str]:
        """Return the sorted names of all refs; those of deleted refs only if requested."""
        refs = [name for name in self._files.list_names(self._folder, kind="directory") if _NAME.fullmatch(name)]
        if include_deleted:
            return refs
        return [
            name for name, move in zip(refs, self._files.map_concurrently(self.find_current, refs), strict=True) if move
        ]

    def find_current(self, name: str) -> RefMove | None:
        """Return a ref's newest move; None if the ref does not exist."""
        newest_move = self._find_newest(name)
        return newest_move if newest_move and newest_move.snapshot else None

    def read_history(self, name: str) -> list[RefMove]:
        """Return all moves of a ref, oldest first, including deletions; none for an unknown ref."""
        return self._apply_takedowns(self._read_moves(name, slice(None)))

    def get_move(self, name: str, number: int) -> RefMove:
        """Return move `number` of a ref.

        Raises:
            StoreError: there is no such move, or its file is damaged.
        """
        return self._apply_takedowns([self._read_move(name, number)])[0]

    def list_refs_to(self, snapshot: str) -> list[tuple[str, int]]:
        """Return the name and the newest move number of each ref whose newest move names this id,
        even if a takedown has replaced the snapshot.
        """
        ref_names = self.list_names(include_deleted=True)
        newest_moves = zip(
            ref_names,
            self._files.map_concurrently(lambda name: self._read_moves(name, slice(-1, None)), ref_names),
            strict=True,
        )
        return [(name, moves[0].number) for name, moves in newest_moves if moves and moves[0].snapshot == snapshot]

    def _find_newest(self, name: str) -> RefMove | None:
        moves = self._apply_takedowns(self._read_moves(name, slice(-1, None)))
        return moves[0] if moves else None

    def _apply_takedowns(self, moves: list[RefMove]) -> list[RefMove]:
        """Return the moves; those to a replaced snapshot get the id of its replacement."""
        replaced_ids = self._takedowns.list_replaced() if moves else frozenset()
        replacement_by_snapshot = {
            move.snapshot: self._takedowns.find_replacement(move.snapshot)
            for move in moves
            if move.snapshot in replaced_ids
        }
        return [
            replace(move, snapshot=replacement_by_snapshot.get(move.snapshot, move.snapshot) or "") for move in moves
        ]

    def _read_moves(self, name: str, selection: slice) -> list[RefMove]:
        """Read the selected moves of a ref; list the moves again if one has expired meanwhile."""
        move_numbers = self.list_numbers(name)
        while True:
            try:
                return list(
                    self._files.map_concurrently(lambda number: self._read_move(name, number), move_numbers[selection])
                )
            except StoreError:
                old_numbers, move_numbers = move_numbers, self.list_numbers(name)
                if old_numbers == move_numbers:
                    raise

    def _read_move(self, name: str, number: int) -> RefMove:
        path = self.move_path(name, number)
        move_fields = self._files.read_json(path)
        if move_fields is None:
            raise NotFoundError(f"ref {name} has no move {number} in {self._files.url}: `log --ref {name}` lists them")
        try:
            move = RefMove.from_json(move_fields, self._noun)
        except StoreError as error:
            raise StoreError(f"{self._files.url_of(path)} cannot be used: {error}") from error
        if type(move.number) is not int or move.number != number:
            raise StoreError(f"{self._files.url_of(path)} is damaged: it is numbered as move {move.number!r}")
        return move

    def list_numbers(self, name: str) -> list[int]:
        """Return the numbers of a ref's moves in ascending order."""
        return self._files.list_numbers(f"{self._folder}/{check_ref_name(name)}")

    def move(self, name: str, snapshot: str, expected_number: int, note: str = "", *, sign: bool = True) -> RefMove:
        """Move a ref from move `expected_number` (0 if it must not exist) to `snapshot`, a full id.

        If several writers move a ref from the same number, exactly one succeeds. The move is signed
        if `sign` is set and the environment has a key.

        Raises:
            RefConflictError: the ref is at another move; nothing was changed.
            StoreError: the store does not support exclusive creation, cannot be written, or the log
                is full.
            UsageError: the note contains a control character.
        """
        if not FULL_ID.fullmatch(snapshot):
            raise UsageError(
                f"{snapshot!r} is not a full {self._noun} id (64 hex digits), so no ref can be moved to it"
            )
        return self._append(name, snapshot, expected_number, note, sign)

    def delete(self, name: str, expected_number: int, note: str = "") -> RefMove:
        """Delete a ref that is at move `expected_number`; its log is kept.

        Raises:
            RefConflictError: the ref is at another move; nothing was changed.
            StoreError: the store does not support exclusive creation, or cannot be written.
        """
        return self._append(name, "", expected_number, note, sign=True)

    def _append(self, name: str, snapshot: str, expected_number: int, note: str, sign: bool) -> RefMove:
        newest_move = self._find_newest(name)
        current_number = newest_move.number if newest_move and newest_move.snapshot else 0
        if current_number != expected_number or not (snapshot or current_number):
            raise self._build_conflict_error(name, expected_number)
        check_printable(note, "the note")
        self.require_exclusive_creation()
        number, previous_id = (newest_move.number + 1, newest_move.snapshot or None) if newest_move else (1, None)
        if number > _MAX_NUMBER:
            raise StoreError(
                f"ref {name} in {self._files.url} is at move {_MAX_NUMBER}, the last possible "
                "number: delete the files of moves that bookwheel did not write, or use another ref"
            )
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        move = RefMove(number, snapshot, created_at, previous_id, secrets.token_hex(16), note)
        path, stored_move = self.move_path(name, number), normalize_json(move.to_json(self._noun))
        if sign:
            is_created = Signatures(self._files).create_signed(path, stored_move)
        else:
            is_created = self._files.create(path, encode_json(stored_move))
        if not is_created:
            raise self._build_conflict_error(name, expected_number)
        return move

    def sign(self, name: str, number: int) -> None:
        """Sign an existing move, if the environment has a key.

        Raises:
            StoreError: there is no such move, or the store cannot be written.
        """
        self._read_move(name, number)
        path = self.move_path(name, number)
        Signatures(self._files).sign(path, self._files.read_json(path))

    def find_signer(self, trusted_keys: TrustedKeys, name: str, number: int) -> str | None:
        """Return the name of the trusted key that signed a move; None if no trusted key did."""
        path = self.move_path(name, number)
        return trusted_keys.find_signer(Signatures(self._files), path, self._files.read_json(path))

    def has_trusted_signature(self, name: str, number: int) -> bool:
        """Return whether a key of the trust file or, without a file, the writer's own key signed a
        move.
        """
        return Signatures(self._files).has_trusted_signature(self.move_path(name, number))

    def move_path(self, name: str, number: int) -> str:
        """Return the path of a move in the store."""
        return f"{self._folder}/{check_ref_name(name)}/{number:08d}.json"

    def require_exclusive_creation(self) -> None:
        """Check, at most once, that the store supports exclusive creation; call this before long
        work.

        Raises:
            StoreError: the bucket does not honour conditional writes, or cannot be written.
        """
        if not self._creates_exclusively:
            raise StoreError(f"{self._files.url} {NO_CONDITIONAL_WRITES}")

    @cached_property
    def _creates_exclusively(self) -> bool:
        return self._files.supports_exclusive_creation()

    def _build_conflict_error(self, name: str, expected_number: int) -> RefConflictError:
        return RefConflictError(
            f"ref {name} in {self._files.url} is no longer at move {expected_number}: another "
            "writer moved it first; inspect it before you move it"
        )


def check_ref_name(name: str) -> str:
    """Return `name` if it is a valid name of a ref.

    Raises:
        UsageError: the name has characters other than letters, digits, `.`, `_` and `-`, begins
            with a dot, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a ref name: use up to 100 letters, digits, '.', '_' and '-', no leading dot")
    return name
