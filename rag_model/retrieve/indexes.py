"""The indexes of a snapshot, opened by their names, whatever kind they are of."""

from collections.abc import Mapping
from typing import Any

from rag_model.errors import StoreError, UsageError
from rag_model.index.exact.scan import ExactIndex
from rag_model.index.files.engine import Metric
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.kind import IndexFiles, Represents
from rag_model.index.registry import kind_of
from rag_model.store.versions.paths import EMBEDDINGS, EXACT
from rag_model.store.versions.snapshot import Snapshot


def open_index_of(snapshot: Snapshot, name: str, *, mmap: bool = True) -> Any:
    """Open an index of a snapshot, searched as its manifest says; `exact` needs no file of its own.

    Its file is mapped, or without `mmap` loaded into memory. Rows that it ranks by are mapped in any case.

    Returns:
        By its kind a `SearchIndex` over vectors, a `TokenIndex` over token vectors, a `SparseIndex` over weighted terms
        or a `TextIndex` over text.

    Raises:
        InputError: its file is damaged.
        StoreError: the index was built over another number of rows than the snapshot has passages, its kind is not
            installed, or files that it needs were not pulled.
        UsageError: the snapshot has no such index.
    """
    entries = snapshot.manifest.content.indexes
    if name == EXACT and name not in entries:
        return exact_index_of(snapshot)
    entry = entry_of(snapshot, name)
    try:
        index = kind_of(entry).open(files_of(snapshot, name), entry, mmap=mmap)
    except KeyError as left_out:
        raise StoreError(
            f"the manifest of snapshot {snapshot.id[:12]} lacks {left_out} of index {name}: build it again"
        ) from left_out
    except StoreError as missing:
        if entry.get("refine") != "vectors":
            raise
        raise StoreError(f"index {name} ranks what it finds by the embeddings, but {missing}") from missing
    if index.n != snapshot.n:
        raise StoreError(f"index {name} holds {index.n} rows for {snapshot.n} passages: reindex the snapshot")
    return index


def entry_of(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """Return an index's entry in the manifest.

    Raises:
        UsageError: the snapshot has no such index.
    """
    entries = snapshot.manifest.content.indexes
    if name not in entries:
        raise UsageError(unknown_index(snapshot, name))
    return dict(entries[name])


def known_indexes(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the indexes that a snapshot can be searched by, `exact` among them."""
    return tuple(dict.fromkeys([*snapshot.manifest.content.indexes, EXACT]))


def unknown_index(snapshot: Snapshot, name: str) -> str:
    """Return the sentence that refuses an index which a snapshot does not have."""
    return f"snapshot {snapshot.id[:12]} has no index {name!r}: choose one of {', '.join(known_indexes(snapshot))}"


def represents(snapshot: Snapshot, name: str) -> Represents:
    """Return what an index is searched by: a vector of each question, its `tokens`, its `sparse` terms, or its `text`.

    Raises:
        StoreError: its kind is not installed.
        UsageError: the snapshot has no such index.
    """
    if name == EXACT and name not in snapshot.manifest.content.indexes:
        return "vectors"
    return kind_of(entry_of(snapshot, name)).represents


def kind_name(snapshot: Snapshot, name: str) -> str:
    """Return the kind of an index, as manifests name it.

    Raises:
        StoreError: its kind is not installed.
        UsageError: the snapshot has no such index.
    """
    if name == EXACT and name not in snapshot.manifest.content.indexes:
        return EXACT
    return kind_of(entry_of(snapshot, name)).name


def graph_of(snapshot: Snapshot, name: str) -> GraphFile:
    """Map the graph of an HNSW index, for the neighbours of its rows.

    Raises:
        InputError: the file is missing, damaged, or no graph.
        StoreError: the graph has another number of nodes than the snapshot has passages.
    """
    graph = GraphFile.open(snapshot.path(snapshot.manifest.content.index_file(name)))
    if graph.n != snapshot.n:
        raise StoreError(f"index {name} holds {graph.n} rows for {snapshot.n} passages: reindex the snapshot")
    return graph


def check_search(snapshot: Snapshot, name: str, parameters: Mapping[str, Any]) -> None:
    """Check the search parameters of an index, before it is opened.

    Raises:
        StoreError: its kind is not installed.
        UsageError: the snapshot has no such index, or a parameter is unknown or out of range.
    """
    if not parameters:
        return
    if name == EXACT and name not in snapshot.manifest.content.indexes:
        raise UsageError(f"{next(iter(parameters))} is not a search parameter of {EXACT}: it takes none")
    entry = entry_of(snapshot, name)
    kind_of(entry).check_search(entry, parameters)


def files_of(snapshot: Snapshot, name: str) -> IndexFiles:
    """Return where an index and its rows lie."""
    content = snapshot.manifest.content
    over = content.over(name)
    return IndexFiles(snapshot.path(content.index_file(name)), lambda: snapshot.row_files(over), snapshot.n)


def sizes_of(snapshot: Snapshot, name: str) -> dict[str, int]:
    """Return the files that a search of an index reads, in bytes by path: its own, and the rows that it ranks by."""
    content = snapshot.manifest.content
    entry = content.indexes.get(name)
    paths = [] if entry is None else [content.index_file(name)]
    if entry is None or entry.get("refine") == "vectors":
        paths += [content.rows_path(content.over(name), part.name) for part in content.parts]
    return {path: content.files[path].size for path in paths if path in content.files}


def exact_index_of(snapshot: Snapshot, representation: str = EMBEDDINGS) -> ExactIndex:
    """Return exact search over the vectors of a representation, by the metric of the indexes over it."""
    return ExactIndex(snapshot.row_files(representation), metric_of(snapshot.manifest.content.indexes, representation))


def metric_of(indexes: Mapping[str, Mapping[str, Any]], representation: str) -> Metric:
    """Return the metric of the indexes over a representation; inner product where there are none."""
    over = (entry for entry in indexes.values() if entry.get("over", EMBEDDINGS) == representation)
    metric: Metric = next((entry["metric"] for entry in over if "metric" in entry), "ip")
    return metric
