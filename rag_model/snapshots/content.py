"""From what the stages report to what a snapshot holds."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from rag_model.corpus import chunk
from rag_model.corpus.records import Plan
from rag_model.encoders import embed
from rag_model.index.quality.fit import Trained
from rag_model.index.recipe import IndexPlan
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.heritage import trained_entry
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.manifest import Content, PartEntry
from rag_model.store.versions.paths import (
    QUESTION_ENCODER,
    articles_path,
    embeddings_path,
    index_path,
    passages_path,
    trained_path,
)

WIKIPEDIA_LICENCE = "CC BY-SA 4.0"
Facts = Mapping[str, Any]  # what a job reports of one part
_DECIDING = ("bookwheel", "faiss-cpu", "numpy", "pyarrow", "torch", "transformers", "tokenizers", "apache-beam")


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """An index that is finished."""

    name: str
    plan: IndexPlan
    blob: BlobRef  # the file that plain faiss opens
    facts: Facts = field(default_factory=dict)  # what its merge said
    trained: tuple[BlobRef, Trained] | None = None  # what its workers shared: later builds inherit it


def assemble(
    plan: Plan,
    recipe: Recipe,
    encoder: StoredEncoder,
    passages: Sequence[CutPart],
    embeddings: Sequence[Facts],
    indexes: Sequence[BuiltIndex],
) -> Content:
    """Return the content of the snapshot: every file by its path, and all that its id depends on.

    `passages` and `embeddings` hold one report a part, in the plan's order; a part without a passage is left out, and
    its range goes to the one before it: so ranges tile the page ids, and a later build finds the same ones.
    """
    files: dict[str, BlobRef] = {f"{QUESTION_ENCODER}/{name}": ref for name, ref in encoder.question}
    parts = []
    ranges = _tiled(plan, passages)
    filled = [made for made in zip(passages, embeddings, strict=True) if made[0].rows]
    for number, ((first, last), (cut, encoded)) in enumerate(zip(ranges, filled, strict=True)):
        name = f"part-{number:05d}"
        files[passages_path(name)] = cut.passages
        files[embeddings_path(name)] = BlobRef.from_json(encoded["embeddings"])
        if cut.article_log is not None:
            files[articles_path(name)] = cut.article_log
        parts.append(PartEntry(name, first, last, cut.rows))
    bare = Content(_corpus(plan, passages), tuple(parts), files, recipe.content(), encoder.space.to_json())
    return with_indexes(bare, indexes)


def with_indexes(content: Content, indexes: Sequence[BuiltIndex]) -> Content:
    """Return a content with indexes over its vectors beside those that it has, or in the place of their namesakes."""
    made = {index.name for index in indexes}
    files = {path: ref for path, ref in content.files.items() if path not in {trained_path(name) for name in made}}
    files |= {index_path(index.name): index.blob for index in indexes}
    files |= {trained_path(index.name): index.trained[0] for index in indexes if index.trained}
    return replace(content, files=files, indexes={**content.indexes, **{one.name: _entry(one) for one in indexes}})


def _entry(index: BuiltIndex) -> dict[str, Any]:
    entry = index.plan.entry()
    return entry | {"trained": trained_entry(index.plan, index.trained[1])} if index.trained else entry


def _tiled(plan: Plan, passages: Sequence[CutPart]) -> list[tuple[int, int]]:
    """Return the page range of each part that has passages, with those of the empty ones after it."""
    filled = [part.first_page for part, cut in zip(plan.parts, passages, strict=True) if cut.rows]
    starts = [plan.parts[0].first_page, *filled[1:]]
    return [(first, end - 1) for first, end in pairwise([*starts, plan.parts[-1].last_page + 1])]


def vectors_of(embeddings: Sequence[Facts]) -> list[BlobRef]:
    """Return the embeddings that hold a vector, in row order: what an index is built over."""
    return [BlobRef.from_json(encoded["embeddings"]) for encoded in embeddings if encoded["rows"]]


def provenance(dump: str, encoder: str, indexes: Sequence[BuiltIndex], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return where and how a snapshot was made, and what of the recipe could not be: nothing that its id depends on."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dump": dump,
        "encoder": encoder,
        "processor": platform.processor() or platform.machine(),
        "notes": [f"index {index.name}: {note}" for index in indexes for note in index.plan.notes],
        "seconds": dict(seconds),
        "code": {"chunk": chunk.VERSION, "embed": embed.VERSION},
        "versions": {name: version(name) for name in _DECIDING},
    }


def counts(passages: Sequence[CutPart], embeddings: Sequence[Facts]) -> dict[str, Any]:
    """Return what a run counted: articles, passages, drops by reason.

    `embedded` are the passages that this run's encoder read; `reused` those whose vectors were there, in the parent
    or because an earlier run had come so far.
    """
    dropped: Counter[str] = Counter()
    for cut in passages:
        dropped.update(cut.facts.dropped)
    embedded = sum(encoded["encoded"] for encoded in embeddings if encoded["made"])
    rows = sum(cut.rows for cut in passages)
    return {
        "articles": sum(cut.facts.articles for cut in passages),
        "passages": rows,
        "embedded": embedded,
        "reused": rows - embedded,
        "dropped": dict(sorted(dropped.items())),
    }


def _corpus(plan: Plan, passages: Sequence[CutPart]) -> dict[str, Any]:
    site = asdict(plan.siteinfo)
    return {
        "kind": plan.kind,
        "dbname": site["dbname"],
        "language": site["language"],
        "base": site["base"],
        "licence": WIKIPEDIA_LICENCE if plan.kind == "wiki" else "",
        "newest_revision": max((cut.facts.newest_revision for cut in passages), default=""),
    }
