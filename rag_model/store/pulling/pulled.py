"""Paths in a folder that snapshots were pulled to; `store.pulling.pull` shows the layout."""

from pathlib import Path

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import cache_stamps
from rag_model.store.pulling.stamps import Stamps, stamps_in

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


def stamps_of(dest: Path) -> Stamps:
    """Return the stamps of a folder's files, kept in that folder, so that every machine that mounts it has them.

    The stamps of a single snapshot's folder, copied elsewhere alone, are in the cache.
    """
    return stamps_in(dest / ".verified") if (dest / ".blobs").is_dir() else cache_stamps()
