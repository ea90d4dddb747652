"""A catalog: the manifests of one kind under `<kind>s/<id>.json`, and the refs that name them.

A store has three catalogs: snapshots, models and evaluations. Evaluations have no refs.
"""

import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rag_model.errors import NotFoundError, RefusedError, StoreError, UsageError
from rag_model.store.objects.files import Files, encode_json
from rag_model.store.versions.checks import FULL_ID, VersionManifest
from rag_model.store.versions.refs import Refs
from rag_model.store.versions.signatures import (
    Signatures,
    TrustedKeys,
    has_signing_key,
    normalize_json,
)
from rag_model.store.versions.takedowns import Takedowns

_PREFIX = re.compile(r"[0-9a-f]{4,63}")
_REF_AT_NUMBER = re.compile(r"([^@]+)@([0-9]{1,8})")


ManifestT = TypeVar("ManifestT", bound=VersionManifest[Any])


@dataclass(frozen=True, slots=True)
class Catalog(Generic[ManifestT]):
    """The manifests and refs of one store's snapshots, models, or evaluations."""

    files: Files
    refs: Refs
    manifest_class: type[ManifestT]

    @property
    def noun(self) -> str:
        """The kind of the versions: snapshot, model or evaluation."""
        return self.manifest_class.noun

    def parse(self, data: bytes) -> ManifestT:
        """Parse and check the bytes of a manifest, which may be hostile."""
        return self.manifest_class.from_bytes(data)

    def publish(self, manifest: ManifestT, *, sign: bool = True) -> str:
        """Store a manifest and return its id; an existing manifest with this id is not changed.

        The manifest is signed if `BOOKWHEEL_SIGNING_KEY` has a key, unless `sign` is False
        (`rag_model.store.versions.signatures`). Call this after all blobs are stored, because a
        reader of the manifest relies on them.
        """
        path, stored_manifest = self.manifest_path(manifest.id), normalize_json(manifest.to_json())
        signatures, existing_manifest = Signatures(self.files), self.files.read_json(path)
        if sign:
            signatures.sign(path, stored_manifest if existing_manifest is None else existing_manifest)
        if existing_manifest is None and not self.files.create(path, encode_json(stored_manifest)) and sign:
            # Sign the manifest that another writer has just stored.
            signatures.sign(path, self.files.read_json(path))
        return manifest.id

    def create_or_overwrite(self, manifest: ManifestT) -> bool:
        """Store a manifest whose id does not cover its metrics; return whether it was written.

        With a signing key, the manifest is signed and overwrites any existing manifest; without a
        key, an existing manifest is kept. An existing manifest is never signed, since it may have
        other metrics: delete it first to replace it.
        """
        path, stored_manifest = self.manifest_path(manifest.id), normalize_json(manifest.to_json())
        if not has_signing_key():
            return self.files.create(path, encode_json(stored_manifest))
        Signatures(self.files).sign(path, stored_manifest)
        self.files.write(path, encode_json(stored_manifest))
        return True

    def get(self, identity: str) -> ManifestT:
        """Return the manifest of a version (a full id), and check that its content has this id.

        Raises:
            StoreError: the manifest is missing, damaged, hostile, or of a newer format.
        """
        path = self.manifest_path(identity)
        manifest_bytes = self.files.read(path)
        if manifest_bytes is None:
            self._refuse_replaced(identity)
            raise StoreError(f"{self.noun} {identity[:12]} is missing in {self.files.url}")
        try:
            manifest = self.parse(manifest_bytes)
        except StoreError as error:
            raise StoreError(f"{self.files.url_of(path)} cannot be used: {error}") from error
        if manifest.id != identity:
            raise StoreError(f"{self.files.url_of(path)} is damaged: it contains {self.noun} {manifest.id[:12]}")
        return manifest

    def find(self, identity: str) -> ManifestT | None:
        """Return a manifest as `get` does; return None if it was deleted in the meantime."""
        try:
            return self.get(identity)
        except StoreError:
            if self.files.find(self.manifest_path(identity)) is not None:
                raise
            return None

    @property
    def noun_phrase(self) -> str:
        """The noun with its indefinite article, such as `a snapshot`."""
        return f"{'an' if self.noun[0] == 'e' else 'a'} {self.noun}"

    def list_ids(self) -> list[str]:
        """Return all ids, sorted."""
        stems = (name.removesuffix(".json") for name in self.files.list_names(f"{self.noun}s"))
        return [stem for stem in stems if FULL_ID.fullmatch(stem)]

    def resolve(self, name: str) -> str:
        """Return the full id of the version that a name means: a ref, `ref@number`, a full id, or
        a unique prefix of an id, with at least 4 digits.

        A ref takes precedence over an equal prefix of an id, but a full id never means a ref.

        Raises:
            NotFoundError: there is no such version, or more than one.
            StoreError: the store cannot be read.
            UsageError: the name has a prefix such as `model:`, although this catalog has one kind.
        """
        if ":" in name:
            raise UsageError(
                f"{name} is not the name of {self.noun_phrase}: log, show, tag, rollback, verify, "
                "pull and export accept models, and --model accepts their names without `model:`; "
                "show, verify, diff and export accept evaluations"
            )
        if match := _REF_AT_NUMBER.fullmatch(name):
            return self._get_id_at_move(match[1], int(match[2]))
        if FULL_ID.fullmatch(name):
            self._refuse_replaced(name)
            if self.files.get_size(self.manifest_path(name)) is not None:
                return name
        elif move := self.refs.find_current(name):
            return move.snapshot
        matching_ids = (
            [identity for identity in self.list_ids() if identity.startswith(name)] if _PREFIX.fullmatch(name) else []
        )
        if len(matching_ids) == 1:
            return matching_ids[0]
        if matching_ids:
            raise NotFoundError(
                f"{name} is a prefix of {len(matching_ids)} {self.noun}s in {self.files.url}: give more digits"
            )
        for replaced_id in self._takedowns.list_replaced() if _PREFIX.fullmatch(name) else ():
            if replaced_id.startswith(name):
                self._refuse_replaced(replaced_id)
        known_refs = ", ".join(self.refs.list_names()) or "none"
        raise NotFoundError(
            f"no {self.noun} or ref {name!r} in {self.files.url} (refs: {known_refs}): "
            "name one of these refs, or check the store"
        )

    def resolve_trusted(self, name: str) -> str:
        """Resolve a name as `resolve` does, and check signatures if a trust file is given.

        Raises:
            StoreError: for the same reasons as `resolve`.
            RefusedError: the manifest, or the move of the ref that names it, has no trusted
                signature.
        """
        identity = self.resolve(name)
        if trusted_keys := TrustedKeys.from_environment():
            self.check_signer(trusted_keys, identity)
            if move := self._find_move(name, identity):
                self._check_move(trusted_keys, *move, identity)
        return identity

    def check_signer(self, trusted_keys: TrustedKeys, identity: str) -> str:
        """Return the name of the trusted key that signed a manifest.

        Raises:
            RefusedError: no trusted key signed the manifest.
        """
        path = self.manifest_path(identity)
        return trusted_keys.check(
            Signatures(self.files),
            path,
            self.files.read_json(path),
            f"{self.noun} {identity[:12]} in {self.files.url}",
        )

    def describe_signature(self, name: str) -> str:
        """Describe who signed a version's manifest, and who signed the ref's move if that differs.

        Raises:
            StoreError: for the same reasons as `resolve`.
        """
        identity = self.resolve(name)
        signature = Signatures(self.files).describe(self.manifest_path(identity))
        if (move := self._find_move(name, identity)) is None:
            return signature
        path = self.refs.move_path(*move)
        move_signature = Signatures(self.files).describe(path)
        if (self.files.read_json(path) or {}).get(self.noun) != identity:
            move_signature += f", for another {self.noun}"
        return signature if move_signature == signature else f"{signature}; move {move[0]}@{move[1]} {move_signature}"

    def has_trusted_signature(self, identity: str) -> bool:
        """Return whether a key of the trust file or, without a file, the writer's own key signed a
        manifest.
        """
        return Signatures(self.files).has_trusted_signature(self.manifest_path(identity))

    def sign(self, identity: str) -> None:
        """Sign an existing manifest, if the environment has a key.

        Raises:
            StoreError: there is no such manifest, or the store cannot be written.
        """
        self.get(identity)
        path = self.manifest_path(identity)
        Signatures(self.files).sign(path, self.files.read_json(path))

    def _find_move(self, name: str, identity: str) -> tuple[str, int] | None:
        """Return (ref, number) of the move that a name refers to; None for an id or its prefix."""
        if match := _REF_AT_NUMBER.fullmatch(name):
            return match[1], int(match[2])
        if name == identity or not (move := self.refs.find_current(name)):
            return None
        return name, move.number

    def _check_move(self, trusted_keys: TrustedKeys, ref: str, number: int, identity: str) -> None:
        path = self.refs.move_path(ref, number)
        description = f"the move {ref}@{number} in {self.files.url}"
        stored_move = self.files.read_json(path) or {}
        trusted_keys.check(Signatures(self.files), path, stored_move, description)
        if stored_move.get(self.noun) != identity:
            raise RefusedError(
                f"{description} was signed for {self.noun} {str(stored_move.get(self.noun))[:12]}, "
                "and another has replaced it: ask the publisher to finish the takedown, which "
                "moves the ref, or name the replacement by its id"
            )

    @property
    def _takedowns(self) -> Takedowns:
        return Takedowns(self.files)

    def _get_id_at_move(self, ref: str, number: int) -> str:
        identity = self.refs.get_move(ref, number).snapshot
        if not identity:
            raise NotFoundError(
                f"{ref}@{number} in {self.files.url} names no {self.noun}: the ref was deleted "
                f"there, or all its pages were taken down; `log --ref {ref}` lists its moves"
            )
        return identity

    def _refuse_replaced(self, identity: str) -> None:
        """Raise an error that names the replacement if a takedown replaced the snapshot."""
        replacement = self._takedowns.find_replacement(identity)
        if replacement is not None:
            advice = (
                f"use {self.noun} {replacement[:12]}, which replaces it"
                if replacement
                else "all its pages were taken down"
            )
            raise NotFoundError(f"{self.noun} {identity[:12]} in {self.files.url} was taken down: {advice}")

    def manifest_path(self, identity: str) -> str:
        """Return the path of a manifest in the store.

        Raises:
            StoreError: `identity` is not a full id.
        """
        if not FULL_ID.fullmatch(identity):
            raise StoreError(f"{identity!r} is not a full {self.noun} id (64 hex digits)")
        return f"{self.noun}s/{identity}.json"
