"""Build a snapshot's content from the reports of the stages."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from rag_model.corpus import chunk
from rag_model.corpus.records import Plan
from rag_model.encoders import embed
from rag_model.extras import versions
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.fit import TrainingFit
from rag_model.index.registry import kind_named
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.heritage import trained_entry
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.manifest import Content, PartEntry
from rag_model.store.versions.paths import (
    EMBEDDINGS,
    TEXT,
    articles_path,
    embeddings_path,
    index_path,
    passages_path,
    question_encoder,
    spans_path,
    trained_path,
)

WIKIPEDIA_LICENCE = "CC BY-SA 4.0"
_DECIDING = ("bookwheel", "faiss-cpu", "numpy", "pyarrow", "torch", "transformers", "tokenizers", "apache-beam")


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """A finished index."""

    name: str
    plan: IndexPlan
    blob: BlobRef  # its file
    facts: Mapping[str, Any] = field(default_factory=dict)  # the report of its merge
    trained: tuple[BlobRef, TrainingFit] | None = None  # the file that its workers shared; later builds inherit it


def assemble(
    plan: Plan,
    recipe: Recipe,
    encoders: Mapping[str, StoredEncoder],
    passages: Sequence[CutPart],
    embeddings: Mapping[str, Sequence[EncodedPart]],
    indexes: Sequence[BuiltIndex],
) -> Content:
    """Return the content of the snapshot: every file by its path, and everything that its id depends on.

    `passages` hold one report per part, in the plan's order, and so does each representation of `embeddings`, by name.
    A part without passages is left out, and its range is added to the part before it: so the ranges cover all page ids,
    and a later build finds the same ranges.
    """
    files: dict[str, BlobRef] = {}
    for over, encoder in encoders.items():
        files |= {f"{question_encoder(over)}/{name}": ref for name, ref in encoder.question}
    parts: list[PartEntry] = []
    filled = [place for place, cut in enumerate(passages) if cut.rows]
    for place, (first, last) in zip(filled, _tiled(plan, passages), strict=True):
        name, cut = f"part-{len(parts):05d}", passages[place]
        files[passages_path(name)] = cut.passages
        for over, reports in embeddings.items():
            files[embeddings_path(name, over, encoders[over].kind)] = reports[place].vectors
        if cut.article_log is not None:
            files[articles_path(name)] = cut.article_log
        if cut.spans is not None:
            files[spans_path(name)] = cut.spans
        parts.append(PartEntry(name, first, last, cut.rows))
    spaces = {over: {"kind": encoder.kind, "space": encoder.space.to_json()} for over, encoder in encoders.items()}
    bare = Content(_corpus(plan, passages), tuple(parts), files, recipe.content(), spaces, {}, recipe.answering)
    return with_indexes(bare, indexes)


def with_indexes(content: Content, indexes: Sequence[BuiltIndex]) -> Content:
    """Return a content with indexes added; an index replaces the one of the same name."""
    made = {index.name for index in indexes}
    gone = {path for name in made for path in (trained_path(name), content.index_file(name))}
    files = {path: ref for path, ref in content.files.items() if path not in gone}
    files |= {_file(index): index.blob for index in indexes}
    files |= {trained_path(index.name): index.trained[0] for index in indexes if index.trained}
    return replace(content, files=files, indexes={**content.indexes, **{one.name: _entry(one) for one in indexes}})


def _entry(index: BuiltIndex) -> dict[str, Any]:
    entry = index.plan.entry() | {"file": _file(index)}
    return entry | {"trained": trained_entry(index.plan, index.trained[1])} if index.trained else entry


def _file(index: BuiltIndex) -> str:
    return index_path(index.name, kind_named(index.plan.kind).suffix)


def _tiled(plan: Plan, passages: Sequence[CutPart]) -> list[tuple[int, int]]:
    """Return the page range of each part with passages, extended by those of the empty parts after it."""
    filled = [part.first_page for part, cut in zip(plan.parts, passages, strict=True) if cut.rows]
    starts = [plan.parts[0].first_page, *filled[1:]]
    return [(first, end - 1) for first, end in pairwise([*starts, plan.parts[-1].last_page + 1])]


def rows_of(passages: Sequence[CutPart], embeddings: Mapping[str, Sequence[EncodedPart]]) -> dict[str, list[BlobRef]]:
    """Return the row files of each representation that hold a row, in row order: indexes are built over them."""
    vectors = {over: [report.vectors for report in reports if report.rows] for over, reports in embeddings.items()}
    return {TEXT: [cut.passages for cut in passages if cut.rows]} | vectors


def provenance(dump: str, encoder: str, indexes: Sequence[BuiltIndex], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return where and how a snapshot was made, and what differs from the recipe; its id does not depend on it."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dump": dump,
        "encoder": encoder,
        "processor": platform.processor() or platform.machine(),
        "notes": [f"index {index.name}: {note}" for index in indexes for note in index.plan.notes],
        "seconds": dict(seconds),
        "code": {"chunk": chunk.VERSION, "embed": embed.VERSION},
        "versions": versions(*_DECIDING),
    }


def counts(passages: Sequence[CutPart], embeddings: Mapping[str, Sequence[EncodedPart]]) -> dict[str, Any]:
    """Return the counts of a run: articles, passages, drops by reason.

    `embedded` are the passages that this run encoded for the representation `embeddings`; `reused` those whose vectors
    came from the parent or from an earlier run.
    """
    dropped: Counter[str] = Counter()
    for cut in passages:
        dropped.update(cut.facts.dropped)
    embedded = sum(report.encoded for report in embeddings.get(EMBEDDINGS, ()) if report.made)
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
