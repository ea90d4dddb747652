"""A shelf: manifests of one kind under `<kind>s/<id>.json`, and the refs that name them.

A store has three: snapshots, models, and evaluations, which have no refs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rag_model.errors import NotFoundError, RefusedError, StoreError, UsageError
from rag_model.store.objects.files import Files, json_bytes
from rag_model.store.versions.refs import Refs
from rag_model.store.versions.signatures import Signatures, Trust, as_stored, signs
from rag_model.store.versions.takedowns import Takedowns

_ID = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,63}")
_NUMBERED = re.compile(r"([^@]+)@([0-9]{1,8})")


class Versioned(Protocol):
    """A manifest on a shelf."""

    @property
    def id(self) -> str:
        """The id of its content, 64 hex digits."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        ...


M = TypeVar("M", bound=Versioned)


@dataclass(frozen=True, slots=True)
class Shelf(Generic[M]):
    """The snapshots, the models, or the evaluations, of one store."""

    files: Files
    refs: Refs
    noun: str  # snapshot, model, evaluation
    parse: Callable[[bytes], M]  # reads and checks the bytes of a manifest, which may be hostile

    def put(self, manifest: M, *, sign: bool = True) -> str:
        """Store a manifest and return its id; an existing one is not changed, nor are its metrics.

        Signed if `BOOKWHEEL_SIGNING_KEY` has a key, as are moves of refs (`rag_model.store.versions.signatures`);
        not with `sign=False`.

        Call it last: a reader of the manifest relies on every blob that it names.
        """
        path, told = self.path(manifest.id), as_stored(manifest.to_json())
        signatures, there = Signatures(self.files), self.files.read_json(path)
        if sign:
            signatures.sign(path, told if there is None else there)
        if there is None and not self.files.create(path, json_bytes(told)) and sign:
            signatures.sign(path, self.files.read_json(path))  # that of the writer who was first
        return manifest.id

    def add(self, manifest: M) -> bool:
        """Store a manifest whose id does not cover all of it, and return whether it was written.

        Signed as by `put`. Without a key the writer who is first stays; with one the last. An existing one is never
        signed, since it may hold other figures: delete it first if it is not to stay.
        """
        path, told = self.path(manifest.id), as_stored(manifest.to_json())
        if not signs():
            return self.files.create(path, json_bytes(told))
        Signatures(self.files).sign(path, told)
        self.files.put(path, json_bytes(told))
        return True

    def get(self, identity: str) -> M:
        """Return the manifest of a full id, after checking that its content hashes to the id.

        Raises:
            StoreError: the manifest is missing, damaged, hostile, or of a newer format.
        """
        path = self.path(identity)
        data = self.files.read(path)
        if data is None:
            self._refuse_replaced(identity)
            raise StoreError(f"{self.noun} {identity[:12]} is missing in {self.files.url}")
        try:
            manifest = self.parse(data)
        except StoreError as broken:
            raise StoreError(f"{self.files.url_of(path)} cannot be used: {broken}") from broken
        if manifest.id != identity:
            raise StoreError(f"{self.files.url_of(path)} is damaged: it holds {self.noun} {manifest.id[:12]}")
        return manifest

    @property
    def called(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] == 'e' else 'a'} {self.noun}"

    def list(self) -> list[str]:
        """Return all ids, sorted."""
        stems = (name.removesuffix(".json") for name in self.files.names(f"{self.noun}s"))
        return [stem for stem in stems if _ID.fullmatch(stem)]

    def resolve(self, name: str) -> str:
        """Return the id that `name` means: a ref, `ref@number`, an id, or a unique prefix (4 digits or more).

        A ref wins over a prefix that is spelled the same.

        Raises:
            NotFoundError: the name means nothing, or more than one version.
            StoreError: the store cannot be read.
            UsageError: the name begins with `model:` where only one kind is possible.
        """
        if ":" in name:
            raise UsageError(
                f"{name} is in place of the name of {self.called}: models are taken by log, show, tag, rollback, "
                "verify, pull and export, and by --model without `model:`; evaluations by show, verify, diff and export"
            )
        if numbered := _NUMBERED.fullmatch(name):
            return self._at(numbered[1], int(numbered[2]))
        if _ID.fullmatch(name):
            self._refuse_replaced(name)
        if _ID.fullmatch(name) and self.files.size(self.path(name)) is not None:
            return name
        if move := self.refs.current(name):
            return move.snapshot
        matches = [known for known in self.list() if known.startswith(name)] if _PREFIX.fullmatch(name) else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise NotFoundError(
                f"{name} is short for {len(matches)} {self.noun}s in {self.files.url}: give more digits"
            )
        for gone in self._takedowns.replaced() if _PREFIX.fullmatch(name) else ():
            if gone.startswith(name):
                self._refuse_replaced(gone)
        known = ", ".join(self.refs.names()) or "none"
        raise NotFoundError(f"no {self.noun} or ref {name!r} in {self.files.url} (refs: {known})")

    def trusted(self, name: str) -> str:
        """Return the id that `name` means, as `resolve`, to open it: its publisher is checked if a trust file is given.

        Raises:
            StoreError: as `resolve`.
            RefusedError: the manifest, or the move of the ref that names it, is not signed by a trusted key.
        """
        identity = self.resolve(name)
        if trust := Trust.given():
            self.signer(trust, identity)
            if move := self._move_of(name, identity):
                self._check_move(trust, *move, identity)
        return identity

    def signer(self, trust: Trust, identity: str) -> str:
        """Return the name of the trusted key that signed a manifest.

        Raises:
            RefusedError: none did.
        """
        path = self.path(identity)
        return trust.check(
            Signatures(self.files), path, self.files.read_json(path), f"{self.noun} {identity[:12]} in {self.files.url}"
        )

    def signed(self, name: str) -> str:
        """Say who signed what `name` means, as `Signatures.said`: the manifest, and a ref's move where that differs.

        Raises:
            StoreError: as `resolve`.
        """
        identity = self.resolve(name)
        said = Signatures(self.files).said(self.path(identity))
        if (move := self._move_of(name, identity)) is None:
            return said
        path = self.refs.path(*move)
        moved = Signatures(self.files).said(path)
        if (self.files.read_json(path) or {}).get(self.noun) != identity:
            moved += f", for another {self.noun}"
        return said if moved == said else f"{said}; move {move[0]}@{move[1]} {moved}"

    def vouched(self, identity: str) -> bool:
        """Return whether a key of the trust file signed a manifest; without a trust file, the own key."""
        return Signatures(self.files).vouched(self.path(identity))

    def sign(self, identity: str) -> None:
        """Sign a manifest that exists, if the environment has a key.

        Raises:
            StoreError: there is no such manifest, or the store cannot be written.
        """
        self.get(identity)
        path = self.path(identity)
        Signatures(self.files).sign(path, self.files.read_json(path))

    def _move_of(self, name: str, identity: str) -> tuple[str, int] | None:
        """Return the ref and the number that `name` was resolved by; None for an id or its prefix."""
        if numbered := _NUMBERED.fullmatch(name):
            return numbered[1], int(numbered[2])
        if name == identity or not (move := self.refs.current(name)):
            return None
        return name, move.number

    def _check_move(self, trust: Trust, ref: str, number: int, identity: str) -> None:
        path, what = self.refs.path(ref, number), f"the move {ref}@{number} in {self.files.url}"
        told = self.files.read_json(path) or {}
        trust.check(Signatures(self.files), path, told, what)
        if told.get(self.noun) != identity:
            raise RefusedError(
                f"{what} was signed for {self.noun} {str(told.get(self.noun))[:12]}, and another has replaced it: ask "
                "the publisher to finish the takedown, which moves the ref, or name the replacement by its id"
            )

    @property
    def _takedowns(self) -> Takedowns:
        return Takedowns(self.files)

    def _at(self, ref: str, number: int) -> str:
        named = self.refs.at(ref, number).snapshot
        if not named:
            raise NotFoundError(
                f"{ref}@{number} in {self.files.url} names nothing: the ref was deleted there, or all of what it named "
                f"was taken down; `log --ref {ref}` lists its moves"
            )
        return named

    def _refuse_replaced(self, identity: str) -> None:
        """Refuse a snapshot that a takedown replaced; the error names its replacement."""
        place = self._takedowns.in_place_of(identity)
        if place is not None:
            stands = f"use {self.noun} {place[:12]}, which replaces it" if place else "no page of it was left"
            raise NotFoundError(f"{self.noun} {identity[:12]} in {self.files.url} was taken down: {stands}")

    def path(self, identity: str) -> str:
        """Return the path of a manifest in the store.

        Raises:
            StoreError: `identity` is not a full id.
        """
        if not _ID.fullmatch(identity):
            raise StoreError(f"{identity!r} is not a full {self.noun} id (64 hex digits)")
        return f"{self.noun}s/{identity}.json"
