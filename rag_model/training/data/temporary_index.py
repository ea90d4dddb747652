"""Search words or bags of tokens during training; build a temporary index if there is none.

Such an index stays valid while the encoder is trained, because words and bags do not change.
Building it reads all passages, so workers do this: an `Indexer` runs the jobs and records their
results.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.ragged_file import SparseWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.bag import BagEncoder, compute_bag_space, compute_term_mask, read_bag_spec
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import read_vocabulary_size
from rag_model.encoders.space import BAG_POOLING, Space
from rag_model.encoders.tokens import load_tokenizer
from rag_model.index.build import run_stages
from rag_model.index.files.engine import Rows
from rag_model.index.kind import IndexFiles, get_kind
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.impact import KIND
from rag_model.index.postings.search import ImpactIndex
from rag_model.index.recipe import IndexRecipe
from rag_model.process import temporary_folder
from rag_model.retrieve.indexes import get_representation_type, open_index
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.versions.manifest import TEXT
from rag_model.store.versions.snapshot import Snapshot

Indexer = Callable[[IndexPlan, Path | None], BlobRef]
"""Builds an index over the snapshot's passages on workers and puts it into the snapshot's store.

The index is over the texts. If a folder with a tokenizer is given, it is over the bags of tokens.
"""


class BagMemory:
    """Searches a snapshot's bag index, or a temporary one if the snapshot has none."""

    def __init__(
        self, snapshot: Snapshot, folder: Path, terms: int | None = None, indexer: Indexer | None = None
    ) -> None:
        """Open the snapshot's first bag index of the tokenizer in `folder`, or build one.

        `terms` is the number of heaviest query terms that are looked up; None looks up all.
        `indexer` builds the index; if None, this process builds it.

        Raises:
            InputError: a file is damaged.
            ResourceError: the disk has no space to build an index.
        """
        self.snapshot, self._parameters = snapshot, {} if terms is None else {"terms": terms}
        name = find_bag_index(snapshot, folder)
        if name is None:
            index_plan = KIND.plan(IndexRecipe("Impact1"), snapshot.n, read_vocabulary_size(folder))
            self._index: ImpactIndex = open_temporary_index(snapshot, index_plan, folder, indexer)
        else:
            self._index = open_index(snapshot, name)

    def propose(self, query_terms: Vectors, k: int) -> list[list[Passage]]:
        """Return the k best passages of each query, best first. There are fewer if fewer passages
        have a term of the query.

        `query_terms` (q, l, 2) are weighted terms as returned by `SparseEncoder.encode_questions`.
        """
        hit_rows = self.find_rows(query_terms, k)
        needed_rows = np.unique(hit_rows[hit_rows >= 0]).tolist()
        passages_by_row = dict(zip(needed_rows, self.snapshot.passages(needed_rows), strict=True))
        return [[passages_by_row[row] for row in query_rows if row >= 0] for query_rows in hit_rows.tolist()]

    def find_rows(self, query_terms: Vectors, k: int) -> Rows:
        """Return the (q, k) rows of the passages that `propose` returns, padded with -1."""
        rows: Rows = self._index.search(query_terms, min(k, self.snapshot.n), **self._parameters)[1]
        return rows


def find_bag_index(snapshot: Snapshot, folder: Path) -> str | None:
    """Return the name of the first index of a snapshot that has bags of the tokenizer in `folder`,
    or None.
    """
    expected_space, content = compute_bag_space(folder, read_bag_spec(folder)), snapshot.manifest.content
    for name in content.indexes:
        space = (
            content.space_of(content.representation_of(name))
            if get_representation_type(snapshot, name) == "sparse"
            else None
        )
        if space and space["pooling"] == BAG_POOLING and Space.from_json(space).accepts_queries_of(expected_space):
            return name
    return None


def open_temporary_index(
    snapshot: Snapshot, plan: IndexPlan, folder: Path | None = None, indexer: Indexer | None = None
) -> Any:
    """Build an index over a snapshot's passages, and open it; see `build_temporary_index`."""
    path = snapshot.store.blobs.get_local_path(build_temporary_index(snapshot, plan, folder, indexer))
    return get_kind(plan.kind).open(IndexFiles(path, list, snapshot.n), plan.entry())


def build_temporary_index(
    snapshot: Snapshot, plan: IndexPlan, folder: Path | None = None, indexer: Indexer | None = None
) -> BlobRef:
    """Build an index over a snapshot's passages, and put it into the snapshot's store, where `gc`
    will delete it.

    Args:
        snapshot: the snapshot with the passages.
        plan: the plan of an index over texts or over bags.
        folder: the folder with the tokenizer of the bags; None for an index over texts.
        indexer: builds the index; if None, this process builds it.

    Raises:
        ResourceError: the disk has no space for the index.
    """
    if indexer is not None:
        return indexer(plan, folder)
    with temporary_folder("index") as workdir:
        index_path, text_paths = workdir / f"index.{get_kind(plan.kind).suffix}", snapshot.row_files(TEXT)
        row_paths = text_paths if folder is None else _encode_bags(folder, text_paths, workdir)
        run_stages(plan, row_paths, index_path, workdir)
        return snapshot.store.blobs.put_file(index_path)


def _encode_bags(folder: Path, text_paths: list[Path], workdir: Path) -> list[Path]:
    """Write a file with the bags of the passages of each part; return the paths."""
    spec, vocabulary_size, row_paths = read_bag_spec(folder), read_vocabulary_size(folder), list[Path]()
    tokenizer = load_tokenizer(folder, spec.max_length)
    encoder = BagEncoder(folder, spec, tokenizer, compute_term_mask(tokenizer, vocabulary_size))
    for i, text_path in enumerate(text_paths):
        row_paths.append(workdir / f"{i}.sparse")
        with SparseWriter(row_paths[-1], vocabulary_size, 1) as writer:
            for batch in PassageFile(text_path).iter_batches(["title", "text"]):
                writer.write(encoder.encode_passages(*(column.to_pylist() for column in batch.columns)))
    return row_paths


def estimate_proposal_bytes(snapshot: Snapshot, folder: Path) -> int:
    """Return the estimated memory in bytes of a search over the bags."""
    name = find_bag_index(snapshot, folder)
    if name is not None:
        return snapshot.manifest.content.files[snapshot.manifest.content.index_file(name)].size
    return KIND.estimate(KIND.plan(IndexRecipe("Impact1"), snapshot.n, 0)).peak_bytes(serving=True)
