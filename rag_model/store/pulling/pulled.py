"""Paths in a folder that snapshots were pulled to; `store.pulling.pull` shows the layout."""

import re
from pathlib import Path

from rag_model.digest import digest_bytes
from rag_model.landing import landing
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import cache_stamps
from rag_model.store.pulling.stamps import Stamps, stamps_in

_ID = re.compile(r"[0-9a-f]{64}")
CURRENT = "current"  # the symbolic link to the snapshot that was pulled last
MANIFEST = "manifest.json"


def blob_copy(dest: Path, ref: BlobRef) -> Path:
    """Return the path of the copy of a blob."""
    return dest / f".{ref.path}"


def mapped_copy(dest: Path, ref: BlobRef) -> Path:
    """Return the path of the memory-mapped copy of a passage file."""
    return dest / ".mapped" / f"{ref.id.partition(':')[2]}.arrow"


def mapped_identity(ref: BlobRef) -> str:
    """Return the name for the stamp of a memory-mapped copy, which has no digest of its own."""
    return f"mapped-{ref.id.partition(':')[2]}"


def remember(dest: Path, store: str, name: str, identity: str) -> None:
    """Note which snapshot a name of a store's full URL meant when it was pulled.

    Raises:
        OSError: the folder cannot be written.
    """
    if name != identity:  # an id means the same in every store
        with landing(_note(dest, store, name)) as note:
            note.write_text(identity)


def remembered(dest: Path, store: str, name: str) -> Path | None:
    """Return the folder of the snapshot that a name of a store meant when it was last pulled; None: it is not there."""
    try:
        identity = name if _ID.fullmatch(name) else _note(dest, store, name).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return dest / identity if _ID.fullmatch(identity) and (dest / identity / MANIFEST).is_file() else None


def _note(dest: Path, store: str, name: str) -> Path:
    return dest / ".named" / digest_bytes(f"{store}\n{name}".encode())[-32:]


def stamps_of(dest: Path) -> Stamps:
    """Return the stamps of a folder's files, kept in that folder, so that every machine that mounts it has them.

    The stamps of a single snapshot's folder, copied elsewhere alone, are in the cache.
    """
    return stamps_in(dest / ".verified") if (dest / ".blobs").is_dir() else cache_stamps()
