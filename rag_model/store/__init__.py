"""The versioned store of immutable blobs, content-addressed versions, and refs (append-only logs).

```
store.json                       the version of this layout
blobs/ab/abcdef…                 immutable files, content-addressed
snapshots/<id>.json              manifest: content (its hash is the id), metrics, provenance
refs/<name>/00000007.json        a move of a ref; the highest number is current
models/<id>.json                 manifest of a trained model
models/refs/<name>/00000007.json a move of a ref of models
evaluations/<id>.json            manifest of an evaluation: metrics, rows, report
memo/<stage>/<key>.json          a stage's outputs for exact inputs; <key>.2.json if they were lost
runs/<run>/<stage>/<00042>.json  a running job's report of one element, such as a part
trainings/<key>/00000003.json    the newest checkpoint of an unfinished training
reports/<id>.html                the HTML report of a build, an evaluation or a training
intents/<name>.json              a running writer, and the files it needs
sweeps/<name>.json               a running deletion, and its files
takedowns/00000003.json          pages that no snapshot may contain
takedowns/<id>.json              the replacement of a taken-down snapshot
```

There are no locks. Files that must not be written twice (the next move of a ref, a memo record, a
manifest) are created exclusively; all other files may be written twice with the same bytes. Only
`expire` and `gc` delete files that others have written.

* `store`: the `Store`, with the reports of running jobs; `diff`: compare two snapshots
* `recorded_tasks`: tasks whose results the memo records
* `objects`: files, blobs, the memo, intents, clouds
* `versions`: manifests, refs, snapshots, models, evaluations, takedowns, signatures
* `pulling`: local copies and exports; `upkeep`: expire, collect garbage, verify
"""

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Record, StageResult
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
    "Record",
    "RefMove",
    "Snapshot",
    "StageResult",
    "Store",
]
