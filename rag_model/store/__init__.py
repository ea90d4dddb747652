"""The versioned store: immutable blobs, content-addressed snapshots, refs moved by compare-and-swap.

```
store.json                       the format of this layout
blobs/ab/abcdef…                 content-addressed, immutable
snapshots/<id>.json              manifest: content (which the id hashes), then metrics, parents, provenance
refs/<name>/00000007.json        append-only numbered log; the highest number is current
models/<id>.json                 the same of a trained model
models/refs/<name>/00000007.json the log of a model's name
memo/<stage>/<key>.json          what a stage made of exact inputs; <key>.2.json when outputs were lost
runs/<run>/<stage>/<00042>.json  reports of a running job's elements
reports/<id>.html                what the build of a snapshot looked like, for people
intents/<name>.json              who is writing just now, and what it relies on
sweeps/<name>.json               who is deleting just now, and what
takedowns/00000003.json          pages that must be in no snapshot; <snapshot id>.json: what stands in its place
```
Nothing is locked. What must not happen twice (a ref's next number, a memo record, a manifest) is created
exclusively; everything else may be written twice with the same bytes. Only `expire` and `gc` delete what others made.
"""

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Produced, Record
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.model_manifest import ModelContent, ModelManifest
from rag_model.store.versions.refs import RefMove
from rag_model.store.versions.snapshot import Snapshot

__all__ = [
    "BlobRef",
    "Content",
    "Manifest",
    "ModelContent",
    "ModelManifest",
    "PartEntry",
    "Produced",
    "Record",
    "RefMove",
    "Snapshot",
    "Store",
]
