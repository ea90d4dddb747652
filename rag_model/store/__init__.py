"""The versioned store: immutable blobs, content-addressed snapshots, refs moved by compare-and-swap.

```
store.json                       the format of this layout
blobs/ab/abcdef…                 content-addressed, immutable
snapshots/<id>.json              manifest: content (which the id hashes), then metrics, parents, provenance
refs/<name>/00000007.json        append-only numbered log; the highest number is current
models/<id>.json                 manifest of a trained model
models/refs/<name>/00000007.json log of a ref of models
evaluations/<id>.json            manifest of an evaluation: figures, and the files of rows and report
memo/<stage>/<key>.json          what a stage made from exact inputs; <key>.2.json when outputs were lost
runs/<run>/<stage>/<00042>.json  reports of a running job's elements
trainings/<key>/00000003.json    the newest checkpoint of an unfinished training; its files are in blobs/ there
reports/<id>.html                a page about the build of a snapshot, for people
intents/<name>.json              a running writer, and what it relies on
sweeps/<name>.json               a running deletion, and its files
takedowns/00000003.json          pages that must be in no snapshot; <snapshot id>.json: the snapshot that replaces it
```
There are no locks. What must not happen twice (a ref's next number, a memo record, a manifest) is created
exclusively; all other files may be written twice with the same bytes. Only `expire` and `gc` delete files of others.
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
