"""Skip a rebuild whose exact inputs gave a snapshot before.

`reindex` reuses every finished stage, but still reads the whole dump and measures the indexes
again. A release with unchanged inputs does neither. A dump file is identified by its size and the
time or tag that its disk or server reports: a new copy counts as changed, and is read.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rag_model.corpus import chunk
from rag_model.corpus.records import is_wiki_site
from rag_model.corpus.source import expand_pattern, get_stamp
from rag_model.encoders import embed
from rag_model.errors import StoreError
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.subject import digest_questions
from rag_model.extras import get_versions
from rag_model.snapshots.chunking import store_chunker
from rag_model.snapshots.encoding import NO_PINS, Pins
from rag_model.snapshots.planning import CODE, store_encoders
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store

STAGE = "release"
_DECIDING_LIBRARIES = ("bookwheel", "faiss-cpu", "numpy", "pyarrow", "torch", "transformers", "tokenizers")

Inputs = Mapping[str, Any]


def collect_inputs(
    store: Store, dump: str, encoder: str, recipe: Recipe, limit: int | None, pins: Pins = NO_PINS
) -> Inputs | None:
    """Return all inputs that decide a snapshot and its gate, except the parent.

    Return None if a server does not report when a dump file was written: a change would go
    unnoticed.

    Raises:
        BookwheelError: a dump, an encoder or a question file cannot be read.
    """
    stamps = {url: None if is_wiki_site(url) else get_stamp(url) for url in expand_pattern(dump)}
    if None in stamps.values():
        return None
    encoders = store_encoders(store, encoder, recipe, pins=pins)
    chunker = store_chunker(store, recipe.chunk)
    return {
        "dump": stamps,
        "limit": limit,
        "encoders": {
            name: [
                stored_encoder.space.digest,
                *(ref.id for _, ref in (*stored_encoder.passage, *stored_encoder.question)),
            ]
            for name, stored_encoder in encoders.items()
        },
        "recipe": replace(recipe, chunk=chunker.recipe).content(),
        "retriever": recipe.default_retriever,
        "gate": asdict(recipe.gate),
        "questions": {
            name: digest_questions(read_questions(floor.file)) for name, floor in recipe.gate.questions.items()
        },
        "takedowns": len(store.takedowns.list_records()),
        "code": {"plan": CODE, "chunk": chunk.VERSION, "embed": embed.VERSION},
        "versions": get_versions(*_DECIDING_LIBRARIES),
    }


def find_snapshot(store: Store, inputs: Inputs, base: str | None) -> str | None:
    """Return the snapshot that these inputs gave with parent `base`; None if there is none any
    more.

    Raises:
        StoreError: the store cannot be read.
    """
    record = store.memo.find(STAGE, store.memo.compute_key(_with_base(inputs, base)))
    if record is None:
        return None
    try:
        return store.snapshots.get(str(record.stats["snapshot"])).id
    except (StoreError, KeyError):
        return None


def record_snapshot(store: Store, inputs: Inputs, base: str | None, snapshot: str) -> None:
    """Record the snapshot that these inputs gave, also for the next run, whose parent is that
    snapshot.

    Raises:
        StoreError: the store cannot be written.
    """
    for parent in (base, snapshot):
        parent_inputs = _with_base(inputs, parent)
        store.memo.write_record(STAGE, store.memo.compute_key(parent_inputs), {}, {"snapshot": snapshot}, parent_inputs)


def _with_base(inputs: Inputs, base: str | None) -> dict[str, Any]:
    return {**inputs, "base": base}
