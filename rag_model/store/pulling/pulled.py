"""Where things lie in a folder that snapshots were pulled to; `pull` draws the picture."""

from pathlib import Path

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import cache_stamps
from rag_model.store.pulling.stamps import Stamps, stamps_in

CURRENT = "current"  # the symbolic link to the snapshot that was pulled last
MANIFEST = "manifest.json"


def blob_copy(dest: Path, ref: BlobRef) -> Path:
    """Return where the copy of a blob lies."""
    return dest / f".{ref.path}"


def mapped_copy(dest: Path, ref: BlobRef) -> Path:
    """Return where the memory-mapped copy of a passage file lies."""
    return dest / ".mapped" / f"{ref.id.partition(':')[2]}.arrow"


def mapped_identity(ref: BlobRef) -> str:
    """Return what the stamp of a memory-mapped copy is named by: it has no digest of its own."""
    return f"mapped-{ref.id.partition(':')[2]}"


def stamps_of(dest: Path) -> Stamps:
    """Return the stamps of a folder's files, which lie in it: whoever mounts the folder has them too.

    A snapshot's folder that was copied elsewhere, alone, has its stamps in the cache.
    """
    return stamps_in(dest / ".verified") if (dest / ".blobs").is_dir() else cache_stamps()
