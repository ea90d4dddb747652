"""Whether a rebuild would make what is there: its exact inputs, and the record of the snapshot that they gave.

`reindex` itself reuses every finished stage, but it still reads the whole dump, and measures the indexes again. A
release that finds its inputs as they were does neither. A file of the dump is known by its size and the time or the tag
that its disk or server gives: copied again it counts as new, and is read.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rag_model.corpus import chunk
from rag_model.corpus.source import expand, stamp_of
from rag_model.encoders import embed
from rag_model.errors import StoreError
from rag_model.evaluation.questions.files import read_questions
from rag_model.evaluation.records.subject import digest_questions
from rag_model.extras import versions
from rag_model.snapshots.chunking import store_chunker
from rag_model.snapshots.encoders import store_encoders
from rag_model.snapshots.planning import CODE
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store

STAGE = "release"
_DECIDING = ("bookwheel", "faiss-cpu", "numpy", "pyarrow", "torch", "transformers", "tokenizers")

Inputs = Mapping[str, Any]


def inputs_of(store: Store, dump: str, encoder: str, recipe: Recipe, limit: int | None) -> Inputs | None:
    """Return what decides a snapshot and its gate, but for the snapshot that it inherits from.

    None: a server does not say when a file of the dump was written, so that a change of it would not be seen.

    Raises:
        BookwheelError: as `reindex`, for a dump, an encoder or a question file that cannot be read.
    """
    stamps = {url: stamp_of(url) for url in expand(dump)}
    if None in stamps.values():
        return None
    encoders = store_encoders(store, encoder, recipe)
    chunker = store_chunker(store, recipe.chunk)
    return {
        "dump": stamps,
        "limit": limit,
        "encoders": {
            name: [its.space.digest, *(ref.id for _, ref in (*its.passage, *its.question))]
            for name, its in encoders.items()
        },
        "recipe": replace(recipe, chunk=chunker.recipe).content(),
        "retriever": recipe.answering,
        "gate": asdict(recipe.gate),
        "questions": {name: digest_questions(read_questions(its.file)) for name, its in recipe.gate.questions.items()},
        "takedowns": len(store.takedowns.records()),
        "code": {"plan": CODE, "chunk": chunk.VERSION, "embed": embed.VERSION},
        "versions": versions(*_DECIDING),
    }


def known(store: Store, inputs: Inputs, base: str | None) -> str | None:
    """Return the snapshot that these inputs gave, inheriting from `base` and judged beside it; None if it is gone.

    Raises:
        StoreError: the store cannot be read.
    """
    record = store.memo.get(STAGE, store.memo.key(_with(inputs, base)))
    if record is None:
        return None
    try:
        return store.snapshots.get(str(record.facts["snapshot"])).id
    except (StoreError, KeyError):
        return None


def remember(store: Store, inputs: Inputs, base: str | None, snapshot: str) -> None:
    """Record the snapshot that these inputs gave, also for the next run, which inherits from that snapshot.

    Raises:
        StoreError: the store cannot be written.
    """
    for one in (base, snapshot):
        made = _with(inputs, one)
        store.memo.record(STAGE, store.memo.key(made), {}, {"snapshot": snapshot}, made)


def _with(inputs: Inputs, base: str | None) -> dict[str, Any]:
    return {**inputs, "base": base}
