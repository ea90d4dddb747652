"""Snapshots: manifests under `snapshots/<id>.json`, and the names by which people find them."""

import re
from dataclasses import dataclass

from rag_model.errors import StoreError
from rag_model.store.files import Files, json_bytes
from rag_model.store.manifest import Manifest
from rag_model.store.refs import Refs

_ID = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,63}")
_NUMBERED = re.compile(r"([^@]+)@([0-9]{1,8})")


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of one store."""

    files: Files
    refs: Refs

    def put(self, manifest: Manifest) -> str:
        """Store a manifest and return its id; one that is there already stays as it is, metrics included.

        Call it last: whoever finds the manifest relies on every blob it names.
        """
        self.files.create(_path(manifest.id), json_bytes(manifest.to_json()))
        return manifest.id

    def get(self, snapshot: str) -> Manifest:
        """Return the manifest of a full id, its content hashed against the id.

        Raises:
            StoreError: it is missing, damaged, hostile, or of a newer format.
        """
        data = self.files.read(_path(snapshot))
        if data is None:
            raise StoreError(f"snapshot {snapshot[:12]} is missing in {self.files.url}")
        try:
            manifest = Manifest.from_bytes(data)
        except StoreError as broken:
            raise StoreError(f"{self.files.url_of(_path(snapshot))} can not be used: {broken}") from broken
        if manifest.id != snapshot:
            raise StoreError(f"{self.files.url_of(_path(snapshot))} is damaged: it holds snapshot {manifest.id[:12]}")
        return manifest

    def list(self) -> list[str]:
        """Return the ids of all snapshots, sorted."""
        stems = (name.removesuffix(".json") for name in self.files.names("snapshots"))
        return [stem for stem in stems if _ID.fullmatch(stem)]

    def resolve(self, name: str) -> str:
        """Return the id that `name` means: a ref, `ref@number`, an id, or a unique prefix (4 digits or more).

        A ref wins over a prefix that is spelled the same.

        Raises:
            StoreError: nothing, or more than one snapshot, goes by that name.
        """
        if numbered := _NUMBERED.fullmatch(name):
            return self.refs.at(numbered[1], int(numbered[2])).snapshot
        if _ID.fullmatch(name) and self.files.size(_path(name)) is not None:
            return name
        if move := self.refs.current(name):
            return move.snapshot
        matches = [known for known in self.list() if known.startswith(name)] if _PREFIX.fullmatch(name) else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise StoreError(f"{name} is short for {len(matches)} snapshots in {self.files.url}: give more digits")
        known = ", ".join(self.refs.names()) or "none"
        raise StoreError(f"no snapshot or ref {name!r} in {self.files.url} (refs: {known})")


def _path(snapshot: str) -> str:
    if not _ID.fullmatch(snapshot):
        raise StoreError(f"{snapshot!r} is not a full snapshot id (64 hex digits)")
    return f"snapshots/{snapshot}.json"
