"""The versioned store: immutable blobs, content-addressed snapshots, refs moved by compare-and-swap."""

from rag_model.store.blobs import BlobRef
from rag_model.store.manifest import Content, Manifest, PartEntry
from rag_model.store.memo import Produced, Record
from rag_model.store.refs import RefMove
from rag_model.store.snapshot import Snapshot
from rag_model.store.store import Store

__all__ = [
    "BlobRef",
    "Content",
    "Manifest",
    "PartEntry",
    "Produced",
    "Record",
    "RefMove",
    "Snapshot",
    "Store",
]
