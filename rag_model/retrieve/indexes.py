"""Open the indexes of a snapshot by name, or derive their files from those of a previous
snapshot.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rag_model.arrays import RowPartition
from rag_model.errors import BookwheelError, StoreError, UsageError
from rag_model.index.exact_search import ExactIndex
from rag_model.index.factory import FlatSpec, HnswSpec, parse_factory
from rag_model.index.files.engine import Metric, Rows
from rag_model.index.files.vectors import RemoteRowFiles
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.kind import DerivingKind, IndexFiles, RepresentationType, get_kind, get_kind_of_entry
from rag_model.index.search import get_opener
from rag_model.store.pulling.delta_files import read_new_terms
from rag_model.store.versions.manifest import EMBEDDINGS, EXACT, TEXT
from rag_model.store.versions.snapshot import Snapshot

# index kinds whose files can be searched by byte ranges without an outline
_RANGED_KINDS = ("bm25", "impact", "ivf")


def open_index(snapshot: Snapshot, name: str, *, mmap: bool = True) -> Any:
    """Open an index of a snapshot with the search parameters of its manifest.

    The index `exact` needs no file.

    The file is mapped, or loaded into memory if not `mmap`. Vectors with which the index reranks
    are always mapped.

    Returns:
        A `VectorIndex`, a `TokenIndex` (token vectors), a `SparseIndex` (weighted terms) or a
        `TextIndex`, depending on the kind.

    Raises:
        InputError: the file is damaged.
        StoreError: the number of rows differs from the number of passages, the kind is not
            installed, or files that the index needs were not pulled.
        UsageError: the snapshot has no such index.
    """
    index_entry = find_index_entry(snapshot, name)
    if index_entry is None:
        return open_exact_index(snapshot)
    try:
        searcher = get_opener(index_entry).open(get_index_files(snapshot, name), index_entry, mmap=mmap)
    except KeyError as missing_key:
        raise StoreError(
            f"the manifest of snapshot {snapshot.id[:12]} lacks {missing_key} of index {name}: rebuild the index"
        ) from missing_key
    except StoreError as error:
        if index_entry.get("refine") != "vectors" or snapshot.is_remote:
            raise
        raise StoreError(f"index {name} reranks its hits with the embeddings, but {error}") from error
    if searcher.n != snapshot.n:
        raise StoreError(f"index {name} holds {searcher.n} rows for {snapshot.n} passages: rebuild the snapshot")
    return searcher


def find_index_entry(snapshot: Snapshot, name: str) -> Mapping[str, Any] | None:
    """Return an index's entry in the manifest; None for `exact` without a file.

    Raises:
        UsageError: the snapshot has no such index.
    """
    index_entry = snapshot.manifest.content.indexes.get(name)
    if index_entry is None and name != EXACT:
        raise UsageError(describe_unknown_index(snapshot, name))
    return index_entry


def list_index_names(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the indexes that can be searched, including `exact`."""
    return tuple(dict.fromkeys([*snapshot.manifest.content.indexes, EXACT]))


def describe_unknown_index(snapshot: Snapshot, name: str) -> str:
    """Return the error message for an index that the snapshot does not have."""
    return f"snapshot {snapshot.id[:12]} has no index {name!r}: choose one of {', '.join(list_index_names(snapshot))}"


def get_representation_type(snapshot: Snapshot, name: str) -> RepresentationType:
    """Return the type of query that an index takes: `vectors`, `tokens`, `sparse` or `text`.

    Raises:
        StoreError: the kind of the index is not installed.
        UsageError: the snapshot has no such index.
    """
    index_entry = find_index_entry(snapshot, name)
    return "vectors" if index_entry is None else get_opener(index_entry).represents


def get_index_kind(snapshot: Snapshot, name: str) -> str:
    """Return the name of an index's kind, as in the manifest.

    Raises:
        StoreError: the kind of the index is not installed.
        UsageError: the snapshot has no such index.
    """
    index_entry = find_index_entry(snapshot, name)
    if index_entry is None:
        return EXACT
    return str(index_entry.get("kind") or get_kind_of_entry(index_entry).name)


def open_graph(snapshot: Snapshot, name: str) -> GraphFile:
    """Map the graph of an HNSW index, to read the neighbours of its rows.

    Raises:
        InputError: the file is missing, damaged, or not a graph.
        StoreError: the number of nodes differs from the number of passages.
    """
    graph = GraphFile.open(snapshot.path(snapshot.manifest.content.index_file(name)))
    if graph.n != snapshot.n:
        raise StoreError(f"index {name} holds {graph.n} rows for {snapshot.n} passages: rebuild the snapshot")
    return graph


def check_search_parameters(snapshot: Snapshot, name: str, parameters: Mapping[str, Any]) -> None:
    """Check the search parameters of an index without opening it.

    Raises:
        StoreError: the kind of the index is not installed.
        UsageError: the snapshot has no such index, or a parameter is unknown or out of range.
    """
    if not parameters:
        return
    index_entry = find_index_entry(snapshot, name)
    if index_entry is None:
        raise UsageError(f"{next(iter(parameters))} is not a search parameter of {EXACT}, which has none: remove it")
    get_opener(index_entry).check_search(index_entry, parameters)


def get_index_files(snapshot: Snapshot, name: str) -> IndexFiles:
    """Return the files of an index: its own, and those of the rows over which it was built."""
    content = snapshot.manifest.content
    list_files = partial(list_row_files, snapshot, content.representation_of(name))
    path = content.index_file(name)
    if can_read_by_ranges(snapshot, name):
        assert snapshot.ranges is not None
        file = snapshot.ranges.file(path)
        return IndexFiles(file.path, list_files, snapshot.n, file, snapshot.ranges.get_outline(path))
    return IndexFiles(snapshot.path(path), list_files, snapshot.n)


def can_read_by_ranges(snapshot: Snapshot, name: str) -> bool:
    """Return whether an index can be searched by reading byte ranges of its files in the store."""
    content, file_ranges = snapshot.manifest.content, snapshot.ranges
    if file_ranges is None or name not in content.indexes:
        return False
    index_entry, path = content.indexes[name], content.index_file(name)
    needs_no_outline = index_entry.get("kind") in _RANGED_KINDS and "Refine" not in str(index_entry.get("factory"))
    # Small files of other kinds have no outline; reading byte ranges of them is not worthwhile.
    if file_ranges.get_outline(path) is None and not needs_no_outline:
        return False
    row_paths = [content.rows_path(content.representation_of(name), part.name) for part in content.parts if part.rows]
    paths = [path, *(row_paths if index_entry.get("refine") == "vectors" else [])]
    return all(map(file_ranges.covers, paths))


def list_row_files(snapshot: Snapshot, representation: str) -> Sequence[Path]:
    """Return a representation's row files in row order; files in an object store are not
    fetched.
    """
    if not snapshot.is_remote:
        return snapshot.row_files(representation)
    content = snapshot.manifest.content
    names = [content.rows_path(representation, part.name) for part in snapshot.parts]
    ranges = snapshot.ranges
    if ranges is None or not all(map(ranges.covers, names)):
        return RemoteRowFiles(names, snapshot.path, snapshot.read_range, snapshot.open_file)
    sizes = [(part.rows, content.files[name].size) for part, name in zip(snapshot.parts, names, strict=True)]
    outlines = [*map(ranges.get_outline, names)]
    return RemoteRowFiles(names, snapshot.path, ranges.read, ranges.open_file, ranges.read_ranges, sizes, outlines)


def get_index_sizes(snapshot: Snapshot, name: str) -> dict[str, int]:
    """Return the size in bytes, by path, of each file that a search reads.

    These are the index file, and the vectors if the index searches or reranks with them.
    """
    content = snapshot.manifest.content
    index_entry = content.indexes.get(name)
    paths = [] if index_entry is None else [content.index_file(name)]
    if index_entry is None or index_entry.get("refine") == "vectors":
        paths += [content.rows_path(content.representation_of(name), part.name) for part in content.parts]
    return {path: content.files[path].size for path in paths if path in content.files}


def open_exact_index(snapshot: Snapshot, representation: str = EMBEDDINGS) -> ExactIndex:
    """Open exact search over the vectors of a representation, with the metric of its indexes."""
    return ExactIndex(
        snapshot.row_files(representation), get_index_metric(snapshot.manifest.content.indexes, representation)
    )


def get_index_metric(indexes: Mapping[str, Mapping[str, Any]], representation: str) -> Metric:
    """Return the metric of the indexes over a representation; inner product if there are none."""
    index_entries = (entry for entry in indexes.values() if entry.get("over", EMBEDDINGS) == representation)
    metric: Metric = next((entry["metric"] for entry in index_entries if "metric" in entry), "ip")
    return metric


def scores_are_products(indexes: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Return whether the scores of an index are exact inner products with the snapshot's
    `embeddings`.

    Codes (PQ, SQ8, fp16) only approximate inner products, unless the hits are reranked with the
    vectors. Distances are not inner products.
    """
    index_entry = indexes.get(name)
    if index_entry is None:
        # `exact` without a file compares the vectors
        return get_index_metric(indexes, EMBEDDINGS) == "ip"
    if index_entry.get("over", EMBEDDINGS) != EMBEDDINGS:
        return False  # the index is over another vector space or over text
    try:
        factory = parse_factory(str(index_entry.get("factory")))
    except UsageError:  # a factory string of a plugin, whose scores are unknown
        return False
    if isinstance(factory, FlatSpec):
        is_exact = True
    elif isinstance(factory, HnswSpec):
        is_exact = factory.storage == "Flat"
    else:
        # A transform may drop or shift dimensions.
        is_exact = factory.refine == "Flat" or (factory.codes.name == "Flat" and factory.rotation is None)
    return (is_exact or index_entry.get("refine") == "vectors") and index_entry.get("metric") == "ip"


def derive_index_file(
    previous: Snapshot,
    snapshot: Snapshot,
    path: str,
    previous_rows: Callable[[], Rows],
    new_terms: Path | None,
    out: Path,
) -> bool:
    """Derive an index file of a snapshot from a previous snapshot's file, if its kind supports it.

    Args:
        previous: the snapshot that was pulled last.
        snapshot: the snapshot that is being pulled; its passages are on this disk.
        path: path of the index file in `snapshot`.
        previous_rows: returns the row of each passage in `previous`, (n,); -1 for new passages.
        new_terms: file with the weighted terms of the new rows, for an index over weighted terms;
            None if the store has no such file for `previous`.
        out: path of the new file.

    Returns:
        Whether the file was written. Missing or damaged inputs are not an error, because the file
        can be fetched instead.
    """
    previous_content, content = previous.manifest.content, snapshot.manifest.content
    name = next((name for name in content.indexes if content.index_file(name) == path), None)
    if name is None or name not in previous_content.indexes or "kind" not in content.indexes[name]:
        return False
    previous_entry, index_entry = previous_content.indexes[name], content.indexes[name]
    try:
        kind = get_kind(index_entry["kind"])
        if not isinstance(kind, DerivingKind) or previous_entry.get("kind") != kind.name:
            return False
        arguments = previous_entry, index_entry, previous.path(previous_content.index_file(name))
        if kind.represents == TEXT:
            return kind.derive(*arguments, previous_rows(), _get_text_reader(snapshot), out) is not None
        if new_terms is None:
            return False
        base_rows, terms = read_new_terms(new_terms, content.files[path].size)
        return kind.derive(*arguments, base_rows, lambda rows: iter([terms]), out) is not None
    except BookwheelError:
        return False


def _get_text_reader(snapshot: Snapshot) -> Callable[[Rows], Iterator[pa.RecordBatch]]:
    """Return a function that yields title and text of the passages at ascending rows."""

    def read_texts(rows: Rows) -> Iterator[pa.RecordBatch]:
        for part_number, _, local_rows in RowPartition(part.rows for part in snapshot.parts).split(rows):
            with snapshot.passage_file(snapshot.parts[part_number].name) as file:
                yield from file.iter_selected(local_rows.tolist(), ["title", "text"])

    return read_texts
