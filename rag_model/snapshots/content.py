"""Assemble a snapshot's content from the results of the stages."""

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from rag_model.corpus import chunk
from rag_model.corpus.records import Plan
from rag_model.encoders import embed
from rag_model.extras import get_versions
from rag_model.index.kind import get_kind
from rag_model.index.plan import IndexPlan
from rag_model.index.quality.results import TrainingStats
from rag_model.retrieve.attribution import find_licence
from rag_model.snapshots.encoding import COMMITS, StoredEncoder
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.reused_training import SHARDS, build_training_entry
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.manifest import (
    EMBEDDINGS,
    TEXT,
    Content,
    PartEntry,
    articles_path,
    embeddings_path,
    index_path,
    passages_path,
    question_encoder_path,
    spans_path,
    trained_path,
)

_RECORDED_LIBRARIES = (
    "bookwheel", "faiss-cpu", "numpy", "pyarrow", "torch", "transformers", "tokenizers",
    "apache-beam",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """A finished index."""

    name: str
    plan: IndexPlan
    blob: BlobRef  # the index file
    stats: Mapping[str, Any] = field(default_factory=dict)  # statistics of the merge of its shards
    # the trained file and its statistics, which later builds may reuse
    training: tuple[BlobRef, TrainingStats] | None = None
    # what the provenance records about its shards, so that later builds can update them
    shards: Mapping[str, Any] | None = None


def assemble_content(
    plan: Plan,
    recipe: Recipe,
    encoders: Mapping[str, StoredEncoder],
    chunk_results: Sequence[ChunkResult],
    embed_results: Mapping[str, Sequence[EmbedResult]],
    indexes: Sequence[BuiltIndex],
) -> Content:
    """Return the content of a snapshot: every file by its path, and everything that its id depends
    on.

    `chunk_results` holds one result per part, in the plan's order, and so does `embed_results` for
    each representation. Parts without passages are left out, and the previous part takes over their
    page range. So the ranges cover all page ids, and a later build finds the same ranges.
    """
    files: dict[str, BlobRef] = {}
    for representation, encoder in encoders.items():
        files |= {f"{question_encoder_path(representation)}/{name}": blob for name, blob in encoder.question}
    parts: list[PartEntry] = []
    part_numbers = [part_number for part_number, result in enumerate(chunk_results) if result.rows]
    for part_number, (first_page, last_page) in zip(part_numbers, _cover_page_ranges(plan, chunk_results), strict=True):
        name, result = f"part-{len(parts):05d}", chunk_results[part_number]
        files[passages_path(name)] = result.passages
        for representation, results in embed_results.items():
            files[embeddings_path(name, representation, encoders[representation].kind)] = results[part_number].vectors
        if result.article_log is not None:
            files[articles_path(name)] = result.article_log
        if result.spans is not None:
            files[spans_path(name)] = result.spans
        parts.append(PartEntry(name, first_page, last_page, result.rows))
    representation_entries = {
        representation: {"kind": encoder.kind, "space": encoder.space.to_json()}
        for representation, encoder in encoders.items()
    }
    corpus_entry = _build_corpus_entry(plan, chunk_results, recipe.licence)
    content = Content(
        corpus_entry,
        tuple(parts),
        files,
        recipe.content(),
        representation_entries,
        {},
        recipe.default_retriever,
    )
    return replace_indexes(content, indexes)


def replace_indexes(content: Content, indexes: Sequence[BuiltIndex]) -> Content:
    """Return the content with `indexes` added; each replaces an existing index of the same name."""
    index_names = {index.name for index in indexes}
    replaced_paths = {path for name in index_names for path in (trained_path(name), content.index_file(name))}
    files = {path: blob for path, blob in content.files.items() if path not in replaced_paths}
    files |= {_build_index_path(index): index.blob for index in indexes}
    files |= {trained_path(index.name): index.training[0] for index in indexes if index.training}
    return replace(
        content,
        files=files,
        indexes={**content.indexes, **{index.name: _build_index_entry(index) for index in indexes}},
    )


def _build_index_entry(index: BuiltIndex) -> dict[str, Any]:
    entry = index.plan.entry() | {"file": _build_index_path(index)}
    return entry | {"trained": build_training_entry(index.plan, index.training[1])} if index.training else entry


def _build_index_path(index: BuiltIndex) -> str:
    return index_path(index.name, get_kind(index.plan.kind).suffix)


def _cover_page_ranges(plan: Plan, chunk_results: Sequence[ChunkResult]) -> list[tuple[int, int]]:
    """Return the page range of each non-empty part, extended over the empty parts that follow."""
    first_pages = [part.first_page for part, result in zip(plan.parts, chunk_results, strict=True) if result.rows]
    part_starts = [plan.parts[0].first_page, *first_pages[1:]]
    return [(first_page, end - 1) for first_page, end in pairwise([*part_starts, plan.parts[-1].last_page + 1])]


def list_row_files(
    chunk_results: Sequence[ChunkResult], embed_results: Mapping[str, Sequence[EmbedResult]]
) -> dict[str, list[BlobRef]]:
    """Return the non-empty row files of each representation, in row order: the input of the
    indexes.
    """
    vectors_by_representation = {
        representation: [result.vectors for result in results if result.rows]
        for representation, results in embed_results.items()
    }
    return {TEXT: [result.passages for result in chunk_results if result.rows]} | vectors_by_representation


def list_precisions(
    embed_results: Mapping[str, Sequence[EmbedResult]], parent_provenance: Mapping[str, Any]
) -> list[str]:
    """Return the sorted precisions with which a build's rows were computed: a device type and a
    dtype, such as `cuda bfloat16`.

    If rows were reused from the parent, the precisions that its provenance names are included.
    """
    results = [result for part_results in embed_results.values() for result in part_results]
    precision_names = {result.arithmetic for result in results if result.arithmetic}
    if any(result.encoded < result.rows for result in results):
        precision_names.update(map(str, parent_provenance.get("arithmetic") or ()))
    return sorted(precision_names)


def describe_mixed_precisions(
    embed_results: Mapping[str, Sequence[EmbedResult]], parent_provenance: Mapping[str, Any]
) -> list[str]:
    """Return a note for each representation whose rows were computed with different devices or
    dtypes.

    The parent's provenance does not name representations, so it is used only if the build has a
    single representation.
    """
    precision_notes = []
    for name, results in embed_results.items():
        precisions = list_precisions({name: results}, parent_provenance if len(embed_results) == 1 else {})
        if len(precisions) > 1:
            precision_names = " and ".join(precisions)
            precision_notes.append(
                f"vectors of {name} were computed with {precision_names}, which agree to 1e-3 but not bit for bit"
            )
    return precision_notes


def build_provenance(
    dump: str,
    encoder: str,
    indexes: Sequence[BuiltIndex],
    seconds: Mapping[str, float],
    precisions: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the provenance of a snapshot: where and how it was built, and deviations from the
    recipe.

    The snapshot's id does not depend on it.
    """
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dump": dump,
        "encoder": encoder,
        "processor": platform.processor() or platform.machine(),
        "arithmetic": [*precisions],
        "notes": [f"index {index.name}: {note}" for index in indexes for note in index.plan.notes] + [*notes],
        "seconds": dict(seconds),
        SHARDS: {index.name: index.shards for index in indexes if index.shards},
        "code": {"chunk": chunk.VERSION, "embed": embed.VERSION},
        "versions": get_versions(*_RECORDED_LIBRARIES),
    }


def build_commits_provenance(encoders: Iterable[StoredEncoder]) -> dict[str, dict[str, str]]:
    """Return the provenance field with the commits of encoders from the hub; empty without such
    encoders.
    """
    hub_name_by_encoder = {name: hub_name for encoder in encoders for name, hub_name in encoder.commits}
    return {COMMITS: hub_name_by_encoder} if hub_name_by_encoder else {}


def count_passages(
    chunk_results: Sequence[ChunkResult],
    embed_results: Mapping[str, Sequence[EmbedResult]],
    dropped_files: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the counts of a run: articles, passages, and dropped pages by reason.

    `embedded` counts the passages that this run encoded for the representation `embeddings`;
    `reused` counts the passages whose vectors came from the parent or an earlier run. `truncated`
    counts the embedded passages that the encoder did not read to the end. `dropped_files` counts
    the files of a folder that planning dropped, by reason.
    """
    drop_counts = Counter(dropped_files or {})
    for result in chunk_results:
        drop_counts.update(result.stats.dropped)
    new_results = [result for result in embed_results.get(EMBEDDINGS, ()) if result.is_new]
    n_embedded = sum(result.encoded for result in new_results)
    n_passages = sum(result.rows for result in chunk_results)
    return {
        "articles": sum(result.stats.articles for result in chunk_results),
        "passages": n_passages,
        "embedded": n_embedded,
        "reused": n_passages - n_embedded,
        "truncated": sum(result.truncated for result in new_results),
        "dropped": dict(sorted(drop_counts.items())),
    }


def _build_corpus_entry(plan: Plan, chunk_results: Sequence[ChunkResult], licence: str) -> dict[str, Any]:
    siteinfo_fields = asdict(plan.siteinfo)
    return {
        "kind": plan.kind,
        "dbname": siteinfo_fields["dbname"],
        "language": siteinfo_fields["language"],
        "base": siteinfo_fields["base"],
        "licence": licence or plan.licence or (find_licence(siteinfo_fields["base"]) if plan.kind == "wiki" else ""),
        "newest_revision": max((result.stats.newest_revision for result in chunk_results), default=""),
    }
