"""Find the parent's inverted index, from which a build derives its own, and match the rows of both.

Unchanged parts need no comparison. For text, the delta that pulls use (`store.pulling.deltas`) says
which rows of a changed part are new, and contains their texts. Without it, passages are matched
by their hashes, and the texts of new passages are read. Weighted terms are compared with the
parent's, row by row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rag_model.arrays import RowPartition, Rows, match_digests
from rag_model.corpus.passage_delta import compute_base_rows
from rag_model.corpus.passages import PassageFile, read_hashes
from rag_model.corpus.ragged_file import SparseFile, SparseVectors
from rag_model.errors import BookwheelError, InputError
from rag_model.index.kind import DerivingKind, get_kind
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.deltas import DeltaStep, find_delta
from rag_model.store.pulling.overlap import PageRanges
from rag_model.store.store import Store
from rag_model.store.versions.manifest import TEXT, Content

_TEXT_COLUMNS = ["title", "text"]
# maximum bytes of new texts that stay in memory after deltas are first read; others are read again
_BUFFERED_BYTES = 32 << 20
# estimated decoded size of a delta as a multiple of its file size; a large delta is read twice
_DELTA_EXPANSION = 8


@dataclass(frozen=True, slots=True)
class PartWithParents:
    """A part of a build in one representation, and the parts of the parent that have the same
    pages.
    """

    file: BlobRef  # the part's passages, or its rows in another representation
    rows: int
    # the parent's files of these pages, as (file, its first row in the parent, number of rows)
    parent_files: tuple[tuple[BlobRef, int, int], ...]


def list_parts(parent_content: Content, content: Content, representation: str = TEXT) -> Iterator[PartWithParents]:
    """Yield the non-empty parts of a content, each with the parent's parts of the same pages.

    The listed files are rows of `representation`.
    """
    part_starts = RowPartition(part.rows for part in parent_content.parts).starts
    ranges = PageRanges(parent_content.parts)
    for part in content.parts:
        if not part.rows:
            continue
        parent_files = tuple(
            (
                parent_content.files[parent_content.rows_path(representation, parent_part.name)],
                part_starts[part_number],
                parent_part.rows,
            )
            for part_number, parent_part in ranges.find_overlapping(part.first_page, part.last_page)
            if parent_part.rows
        )
        yield PartWithParents(content.files[content.rows_path(representation, part.name)], part.rows, parent_files)


@dataclass(frozen=True, slots=True)
class ParentIndex:
    """An index of the parent that has the same kind and settings as an index of the build."""

    file: BlobRef
    entry: Mapping[str, Any]  # the index's entry in the parent's manifest
    parts: tuple[PartWithParents, ...]  # the build's parts, in row order

    @classmethod
    def find(
        cls, store: Store, parent_content: Content | None, content: Content, name: str, plan: IndexPlan
    ) -> Self | None:
        """Return the parent's index `name`; None if it is missing or differs in settings or
        encoder.

        Args:
            store: the store of both snapshots.
            parent_content: the parent's content.
            content: the build's content, without indexes.
            name: the name of the index.
            plan: the plan of the index in this build.
        """
        kind = get_kind(plan.kind)
        if parent_content is None or not isinstance(kind, DerivingKind):
            return None
        entry, file = parent_content.indexes.get(name, {}), parent_content.files.get(parent_content.index_file(name))
        is_same_plan = all(entry.get(key) == value for key, value in plan.entry().items() if key not in ("n", "search"))
        representation = TEXT if kind.represents == TEXT else plan.over
        is_same_index = is_same_plan and content.shares_space(parent_content, representation)
        if not is_same_index or file is None or not store.blobs.exists(file):
            return None
        return cls(file, entry, tuple(list_parts(parent_content, content, representation)))

    def derive(self, store: Store, plan: IndexPlan, out: Path) -> IndexStats | None:
        """Derive the build's index from the parent's, and write it to `out`.

        Return None if the index has to be built from scratch.

        Raises:
            InputError: the parent's file is damaged.
            StoreError: a file is missing or damaged.
            ResourceError: `out` cannot be written.
        """
        kind = get_kind(plan.kind)
        if not isinstance(kind, DerivingKind):
            return None
        arguments = self.entry, plan.entry(), store.blobs.get_local_path(self.file)
        if kind.represents != TEXT:
            return kind.derive(*arguments, *match_weighted_terms(store, self.parts), out)
        part_matches = match_parts(store, self.parts, _BUFFERED_BYTES)

        def read_texts(rows: Rows) -> Iterator[pa.RecordBatch]:
            for part_number, _, part_rows in RowPartition(len(part.parent_rows) for part in part_matches).split(rows):
                yield from part_matches[part_number].texts(part_rows)

        return kind.derive(*arguments, concatenate_parent_rows(part_matches), read_texts, out)


def match_parts(
    store: Store, parts: Iterable[PartWithParents], buffer_bytes: int = 0, *, by_text: bool = False
) -> list["PartMatch"]:
    """Compare parts with the parts of the parent; keep up to `buffer_bytes` of new texts in memory.

    `by_text` also finds rows that have the same text in another revision; their texts are not read.

    Raises:
        InputError: a file is damaged.
        StoreError: a file is damaged or missing.
    """
    part_matches = list[PartMatch]()
    for part in parts:
        part_matches.append(PartMatch.find(store, part, buffer_bytes, by_text=by_text))
        buffer_bytes -= _count_bytes(part_matches[-1].buffered_texts)
    return part_matches


def match_weighted_terms(
    store: Store, parts: Sequence[PartWithParents]
) -> tuple[Rows, Callable[[Rows], Iterator[SparseVectors]]]:
    """Return (parent_rows, read_rows): for each row, the row number of the equal row in the parent,
    or -1; and a function that yields the weighted terms of ascending rows.

    A part is not read if the parent has the same file.

    Raises:
        InputError: a file is damaged, or its weights have another scale than the parent's.
        StoreError: a file is damaged or missing.
    """
    parent_rows = [np.empty(0, np.int64), *(_match_terms_of_part(store, part) for part in parts)]

    def read_rows(rows: Rows) -> Iterator[SparseVectors]:
        for part_number, _, part_rows in RowPartition(part.rows for part in parts).split(rows):
            yield SparseFile(store.blobs.get_local_path(parts[part_number].file)).take(part_rows)

    return np.concatenate(parent_rows), read_rows


def _match_terms_of_part(store: Store, part: PartWithParents) -> Rows:
    for parent_file, first_row, n_rows in part.parent_files:
        if parent_file == part.file and n_rows == part.rows:
            return np.arange(first_row, first_row + n_rows)
    file = SparseFile(store.blobs.get_local_path(part.file))
    if file.n != part.rows:
        raise InputError(f"a part has {file.n} rows of weighted terms instead of {part.rows}: build it again")
    vectors_of_parents, parent_rows = [SparseVectors.empty()], [np.empty(0, np.int64)]
    for parent_file, first_row, n_rows in part.parent_files:
        if store.blobs.exists(parent_file):
            parent_sparse_file = SparseFile(store.blobs.get_local_path(parent_file))
            if (parent_sparse_file.scale, parent_sparse_file.n) != (file.scale, n_rows):
                raise InputError(f"{parent_sparse_file.path} has another scale or row count: build the index again")
            vectors_of_parents.extend(parent_sparse_file.iter_batches())
            parent_rows.append(np.arange(first_row, first_row + n_rows))
    positions = _find_equal_terms(
        SparseVectors.concatenate(vectors_of_parents),
        SparseVectors.concatenate([SparseVectors.empty(), *file.iter_batches()]),
    )
    return np.append(np.concatenate(parent_rows), -1)[positions]


def _find_equal_terms(parent_vectors: SparseVectors, vectors: SparseVectors) -> Rows:
    """Return, for each row of `vectors`, the position in `parent_vectors` of a row with the same
    terms and weights, or -1.
    """
    positions = match_digests(parent_vectors.compute_digests(), vectors.compute_digests())
    known_rows = np.flatnonzero(positions >= 0)
    old_vectors, new_vectors = parent_vectors.take(positions[known_rows]), vectors.take(known_rows)
    arrays = [(*sparse_vectors.columns(), sparse_vectors.offsets) for sparse_vectors in (old_vectors, new_vectors)]
    if all(map(np.array_equal, *arrays)):
        return positions
    raise InputError("two rows of weighted terms have the same digest: build the index again")


def concatenate_parent_rows(matches: Iterable["PartMatch"]) -> Rows:
    """Return the row number in the parent of each passage, (n,); -1 for a new passage."""
    return np.concatenate([np.empty(0, np.int64), *(part.parent_rows for part in matches)])


@dataclass(frozen=True, slots=True)
class PartMatch:
    """The rows of the parent that have the same passages as a part of the build."""

    parent_rows: Rows  # (n,) row number in the parent of each passage; -1 for a new passage
    get_passages_path: Callable[[], Path]
    get_delta_path: Callable[[], Path] | None = None  # path of a file with the new passages
    # titles and texts of the new passages, if they fit into the buffer
    buffered_texts: Sequence[pa.RecordBatch] = ()

    @classmethod
    def find(cls, store: Store, part: PartWithParents, buffer_bytes: int, *, by_text: bool = False) -> Self:
        """Compare a part with the parts of the parent; keep up to `buffer_bytes` of new texts in
        memory.

        Raises:
            InputError: a file is damaged.
            StoreError: a file is damaged or missing.
        """
        get_passages_path = partial(store.blobs.get_local_path, part.file)
        if len(part.parent_files) == 1:
            (parent_passages, start, n_rows), *_ = part.parent_files
            if parent_passages == part.file:
                return cls(np.arange(start, start + n_rows), get_passages_path)
            # without a usable delta, the passages are compared below
            with suppress(BookwheelError):
                if delta := find_delta(store, DeltaStep(part.file, parent_passages, is_passages=True)):
                    get_delta_path = partial(store.blobs.get_local_path, delta)
                    fits_buffer = _DELTA_EXPANSION * delta.size <= buffer_bytes
                    delta_file = pa.BufferReader(store.blobs.read(delta)) if fits_buffer else get_delta_path()
                    with PassageFile(delta_file) as file:
                        base_rows = compute_base_rows(file, n_rows, part.rows, by_text=by_text)
                        new_texts = list(file.iter_batches(_TEXT_COLUMNS)) if fits_buffer else []
                    buffered_texts = new_texts if _count_bytes(new_texts) <= buffer_bytes else ()
                    parent_rows = np.where(base_rows < 0, base_rows, base_rows + start)
                    return cls(parent_rows, get_passages_path, get_delta_path, buffered_texts)
        hashes, parent_rows = read_hashes(get_passages_path()), np.full(part.rows, -1, np.int64)
        if len(hashes) != part.rows:
            raise InputError(f"a part has {len(hashes)} passages instead of {part.rows}: build it again")
        for parent_passages, start, n_rows in part.parent_files:
            if store.blobs.exists(parent_passages):
                positions = (
                    pc.index_in(hashes, value_set=read_hashes(store.blobs.get_local_path(parent_passages)))
                    .fill_null(-1)
                    .to_numpy()
                )
                parent_rows = np.where((positions < 0) | (positions >= n_rows), parent_rows, positions + start)
        return cls(parent_rows, get_passages_path)

    def texts(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yield title and text of the part's passages at ascending `rows`."""
        if self.get_delta_path and np.array_equal(rows, np.flatnonzero(self.parent_rows < 0)):
            if self.buffered_texts:
                yield from self.buffered_texts
                return
            with PassageFile(self.get_delta_path()) as file:
                yield from file.iter_batches(_TEXT_COLUMNS)
        else:
            with PassageFile(self.get_passages_path()) as file:
                yield from file.iter_selected(rows.tolist(), _TEXT_COLUMNS)


def _count_bytes(batches: Sequence[pa.RecordBatch]) -> int:
    return sum(batch.nbytes for batch in batches)
