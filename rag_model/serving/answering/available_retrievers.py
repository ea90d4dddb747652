"""Choose and describe the retrievers of a snapshot that a service offers and has the memory for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rag_model.corpus.records import PROSE, STRUCTURES
from rag_model.errors import ResourceError, StoreError, UsageError
from rag_model.index.postings.base_kind import PostingsKind, estimate_decoded_bytes
from rag_model.process import format_bytes, get_free_bytes
from rag_model.retrieve.context import RetrieverNeeds
from rag_model.retrieve.expression import Call, Word, parse
from rag_model.retrieve.factory import plan_retriever
from rag_model.retrieve.indexes import can_read_by_ranges, get_representation_type
from rag_model.serving.settings import ServiceSettings
from rag_model.store.versions.manifest import Content, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot

_LIBRARY_BYTES = 450_000_000  # bytes of a process with torch and faiss, without an encoder
_INDEX_FOLDER = "index/"
_EXPLANATION_BY_KIND = {
    "exact": "by meaning: compares the question with every passage",
    "hnsw": "by meaning, along a graph of near passages: fast",
    "ivf": "by meaning, in lists of compressed vectors: little memory",
    "bm25": "by the words of the question; rare words count more",
    "impact": "by learned weights of words, also of related ones",
    "tokens": "by meaning, word by word",
}
_EXPLANATION_BY_FUNCTION = {
    "rrf": "joins the rankings of {}",
    "interpolate": "joins the scores of {}",
    "rerank": "a model reads the best passages of {} and orders them again",
    "maxsim": "compares the best passages of {} word by word",
    "where": "only some kinds of passages of {}",
}


def check_memory(content: Content, indexes: Sequence[str], settings: ServiceSettings) -> None:
    """Check that indexes fit into the free memory; indexes that are only mapped always fit.

    Raises:
        ResourceError: The indexes do not fit.
    """
    free_bytes = get_free_bytes()
    if not settings.in_memory or free_bytes is None:
        return
    index_files = [content.files.get(content.index_file(name)) for name in indexes]
    needed_bytes = sum(index_file.size for index_file in index_files if index_file is not None)
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the indexes need {format_bytes(needed_bytes)} of memory next to the ones in use, and "
            f"{format_bytes(free_bytes)} are free: give the service more memory, or serve without "
            "--in-memory"
        )


@dataclass(frozen=True, slots=True)
class AvailableRetrievers:
    """The retrievers that a service offers over a snapshot, and the indexes that they need."""

    retrievers: tuple[str, ...]  # expressions; the first is the default
    indexes: tuple[str, ...]  # opened indexes; requests may combine them to other retrievers
    needs_embeddings: bool  # whether the vectors of passages must be pulled
    notes: tuple[str, ...] = ()  # retrievers that are not served, and why

    @classmethod
    def plan_ranged(cls, snapshot: Snapshot, settings: ServiceSettings) -> Self:
        """Plan the retrievers that can be searched by byte ranges: those of `plan`, then other indexes.

        If the settings name retrievers, no other indexes are added.

        Raises:
            UsageError: No retriever and no index can be searched by byte ranges.
        """
        plan_with_pull = cls.plan(snapshot, replace(settings, pull_embeddings=True), uses_inner_products=False)
        other_indexes = () if settings.retrievers else snapshot.manifest.content.indexes
        candidates = (*plan_with_pull.retrievers, *other_indexes)
        retrievers = tuple(dict.fromkeys(name for name in candidates if can_search_by_ranges(snapshot, name)))
        if not retrievers:
            raise UsageError(
                f"none of {', '.join(plan_with_pull.retrievers)} of snapshot {snapshot.id[:12]} "
                "can be searched in the store by ranges: choose an index of the kind bm25 or ivf "
                "with --index, or pull the snapshot"
            )
        retriever_needs = RetrieverNeeds.merge(plan_retriever(snapshot, expression) for expression in retrievers)
        notes = [*plan_with_pull.notes]
        if unsearchable_retrievers := [name for name in plan_with_pull.retrievers if name not in retrievers]:
            consequence = "served once the snapshot is pulled" if settings.pull else "not served without a pull"
            notes.append(
                f"{', '.join(unsearchable_retrievers)} cannot be searched by ranges: {consequence}, and the "
                f"default is {retrievers[0]}; an index of inverted lists (IVF) can be searched by "
                "ranges"
            )
        return cls(retrievers, retriever_needs.index_names, needs_embeddings=False, notes=tuple(notes))

    @classmethod
    def plan(cls, snapshot: Snapshot, settings: ServiceSettings, *, uses_inner_products: bool) -> Self:
        """Plan the retrievers that the settings name, or all retrievers that the snapshot offers.

        If the settings name no retrievers, these are the snapshot's default retriever, its other
        indexes that fit into memory (`_choose_retrievers`), and the fusion of the default with BM25
        if the snapshot has both.

        Args:
            snapshot: The snapshot to serve.
            settings: The service's settings.
            uses_inner_products: Whether a model weighs the hits by inner products.

        Raises:
            UsageError: A retriever expression is invalid, it names an index that the snapshot does
                not have, or the retrievers need more memory than the settings allow.
        """
        content = snapshot.manifest.content
        notes: list[str] = []
        retrievers = settings.retrievers or _choose_retrievers(snapshot, settings, uses_inner_products, notes)
        retriever_needs = RetrieverNeeds.merge(
            plan_retriever(snapshot, expression, products=uses_inner_products) for expression in retrievers
        )
        if settings.retrievers and settings.memory_bytes is not None:
            needed_bytes = _count_bytes(snapshot, _list_resource_files(snapshot, retriever_needs, settings), settings)
            if needed_bytes > settings.memory_bytes:
                raise UsageError(
                    f"{', '.join(retrievers)} of snapshot {snapshot.id[:12]} need "
                    f"{format_bytes(needed_bytes)}, and --memory allows "
                    f"{format_bytes(settings.memory_bytes)}: allow more, or leave the choice of "
                    "retrievers to the service"
                )
        needs_vectors = settings.pull_embeddings or retriever_needs.reads_vectors(content)
        return cls(retrievers, retriever_needs.index_names, needs_vectors, tuple(notes))


def _choose_retrievers(
    snapshot: Snapshot, settings: ServiceSettings, uses_inner_products: bool, notes: list[str]
) -> tuple[str, ...]:
    """Return the default retriever, other indexes that can be opened, and a fusion with BM25.

    An index cannot be opened if its kind is not installed, if one of its files was not pulled, if
    it needs vectors that the settings do not pull, or if it needs more memory than is free. It
    needs memory for its encoder and, with `in_memory` or a memory limit, for its files.

    If the default does not fit into the memory limit, the first retriever is the index with the
    largest recall among those that fit. `notes` gets a sentence on each index that does not fit.

    Raises:
        UsageError: No index fits into the memory of the settings.
    """
    content = snapshot.manifest.content
    default = content.default_retriever
    default_needs = plan_retriever(snapshot, default, products=uses_inner_products)
    may_read_vectors = settings.pull_embeddings or default_needs.reads_vectors(content)
    opened_files = _list_resource_files(snapshot, default_needs, settings)
    free_bytes = get_free_bytes() if settings.memory_bytes is None else settings.memory_bytes
    index_names, retrievers = [name for name in content.indexes if name != default], [default]
    bytes_by_retriever = {default: _count_bytes(snapshot, opened_files, settings)}
    if settings.memory_bytes is not None and bytes_by_retriever[default] > settings.memory_bytes:
        default_representations = {content.representation_of(name) for name in default_needs.index_names}
        index_names.sort(
            key=lambda name: (
                content.representation_of(name) not in default_representations,
                -(_get_recall(snapshot, name)[1] or 0),
            )
        )
        retrievers, opened_files = [], {}
    for name in index_names:
        try:
            retriever_needs = plan_retriever(snapshot, name, products=uses_inner_products)
            files = _list_resource_files(snapshot, retriever_needs, settings)
        except (StoreError, UsageError):  # for example, the index kind is not installed
            continue
        if retriever_needs.reads_vectors(content) and not may_read_vectors:
            continue
        if isinstance(snapshot.location, Path) and not _are_pulled(
            snapshot, [*retriever_needs.files(snapshot), *files]
        ):
            continue
        bytes_by_retriever[name] = needed_bytes = _count_bytes(snapshot, opened_files | files, settings)
        if free_bytes is not None and needed_bytes > free_bytes and not files.keys() <= opened_files.keys():
            continue
        opened_files |= files
        retrievers.append(name)
    if settings.memory_bytes is not None:
        notes += _describe_unserved_indexes(snapshot, bytes_by_retriever, retrievers, settings.memory_bytes)
    text_index = next(
        (name for name in retrievers if name in content.indexes and _takes_text(snapshot, name)),
        None,
    )
    if retrievers[0] in content.indexes and text_index not in (None, retrievers[0]):
        retrievers.append(str(parse(f"rrf({retrievers[0]}, {text_index})")))
    return tuple(retrievers)


def _count_bytes(snapshot: Snapshot, sizes: Mapping[str, int], settings: ServiceSettings) -> int:
    """Return the bytes of memory that files need; with a memory limit, in all processes together.

    The processes share the index files, but each process has its own libraries, encoders and
    decoded posting lists.
    """
    if settings.memory_bytes is None:
        return sum(sizes.values())
    shared_bytes = sum(n_bytes for path, n_bytes in sizes.items() if path.startswith(_INDEX_FOLDER))
    decoded_bytes = sum(
        estimate_decoded_bytes(snapshot.n, n_bytes)
        for path, n_bytes in sizes.items()
        if path.endswith(f".{PostingsKind.suffix}")
    )
    process_bytes = sum(sizes.values()) - shared_bytes + decoded_bytes + _LIBRARY_BYTES
    return shared_bytes + process_bytes * settings.processes


def _describe_unserved_indexes(
    snapshot: Snapshot, bytes_by_retriever: Mapping[str, int], retrievers: Sequence[str], memory_bytes: int
) -> list[str]:
    """Return a sentence for each index that does not fit into the memory, with its recall if that
    can be compared with the default's.

    Raises:
        UsageError: No index fits.
    """
    if not retrievers:
        name, needed_bytes = min(bytes_by_retriever.items(), key=lambda item: item[1])
        raise UsageError(
            f"the smallest index of snapshot {snapshot.id[:12]} is {name}, which needs "
            f"{format_bytes(needed_bytes)} with the service, and --memory allows "
            f"{format_bytes(memory_bytes)}: allow more, or build a smaller index"
        )
    measure, served_recall = _get_recall(snapshot, retrievers[0])
    notes, indexes = [], snapshot.manifest.content.indexes
    for name, needed_bytes in bytes_by_retriever.items():
        if name in retrievers:
            continue
        note = (
            f"{name} is not served: it needs {format_bytes(needed_bytes)}, and {format_bytes(memory_bytes)} are allowed"
        )
        recall = _get_recall(snapshot, name)[1]
        # Recalls are only comparable within a representation, because each is measured against
        # exhaustive search of the same representation.
        representations = {
            snapshot.manifest.content.representation_of(index) for index in (name, retrievers[0]) if index in indexes
        }
        if served_recall is not None and recall is not None and len(representations) == 1:
            note += f"; {retrievers[0]} has {measure} {served_recall:.3f}, {name} has {recall:.3f}"
        notes.append(note)
    return notes


def _get_recall(snapshot: Snapshot, name: str) -> tuple[str, float | None]:
    """Return the name of the recall metric of an index, and the mean recall, from the manifest."""
    metrics = snapshot.manifest.metrics.get(name)
    for measure, recall in metrics.items() if isinstance(metrics, dict) else ():
        if re.fullmatch(r"recall@\d+", measure) and isinstance(recall, int | float):
            return measure, float(recall)
    return "recall", None


def explain_retriever(snapshot: Snapshot, expression: str) -> str:
    """Return a line for the search page on how a retriever works, with its recall if measured."""
    tree, indexes = parse(expression), snapshot.manifest.content.indexes
    if isinstance(tree, Call) and tree.name in _EXPLANATION_BY_FUNCTION:
        children = [str(child) for child in tree.arguments if isinstance(child, Word | Call)]
        children = children[:1] if tree.name in ("rerank", "maxsim", "where") else children
        return _EXPLANATION_BY_FUNCTION[tree.name].format(" and ".join(children))
    name = tree.name if isinstance(tree, Call) else tree.split_depth()[0]
    index_entry = indexes.get(name, {})
    kind = index_entry.get("kind", name) if isinstance(index_entry, dict) else name
    explanation = _EXPLANATION_BY_KIND.get(kind, f"by an index of the kind {kind}")
    measure, recall = _get_recall(snapshot, name)
    return f"{explanation}; {measure} {recall:.3f}" if recall is not None else explanation


def list_passage_kinds(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the kinds of passages in a snapshot, or () if all passages are prose."""
    chunk_recipe = snapshot.manifest.content.recipe.get("chunk")
    structures = chunk_recipe.get("structures") if isinstance(chunk_recipe, dict) else None
    kinds = [kind for kind, structure in STRUCTURES.items() if structure in (structures or ())]
    return (PROSE, *kinds) if kinds else ()


def can_search_by_ranges(snapshot: Snapshot, expression: str) -> bool:
    """Return whether a retriever can be searched by reading byte ranges, without pulling files."""
    try:
        retriever_needs = plan_retriever(snapshot, expression)
    except (StoreError, UsageError):
        return False
    if retriever_needs.graphs or not all(can_read_by_ranges(snapshot, name) for name in retriever_needs.index_names):
        return False
    content, range_files = snapshot.manifest.content, snapshot.ranges
    row_paths = [
        content.rows_path(name, part.name) for name in retriever_needs.vectors for part in content.parts if part.rows
    ]
    return range_files is not None and all(map(range_files.covers, row_paths))


def _takes_text(snapshot: Snapshot, name: str) -> bool:
    return get_representation_type(snapshot, name) == "text"


def _list_resource_files(
    snapshot: Snapshot, retriever_needs: RetrieverNeeds, settings: ServiceSettings
) -> dict[str, int]:
    """Return path and size in bytes of each file that a retriever loads into memory."""
    content = snapshot.manifest.content
    indexes = [name for name in retriever_needs.index_names if not _takes_text(snapshot, name)]
    folders = {f"{question_encoder_path(content.representation_of(name))}/" for name in indexes}
    size_by_path = {path: blob.size for path, blob in content.files.items() if path.startswith(tuple(folders))}
    counts_indexes = settings.in_memory or settings.memory_bytes is not None
    return size_by_path | (get_file_sizes(snapshot, retriever_needs.index_names) if counts_indexes else {})


def _are_pulled(snapshot: Snapshot, paths: Sequence[str]) -> bool:
    try:
        for path in paths:
            snapshot.path(path)
    except StoreError:
        return False
    return True


def get_file_sizes(snapshot: Snapshot, names: Sequence[str]) -> dict[str, int]:
    """Return path and size in bytes of each file of the indexes; `exact` has no file."""
    content = snapshot.manifest.content
    paths = [content.index_file(name) for name in names if name in content.indexes]
    return {path: content.files[path].size for path in paths}
