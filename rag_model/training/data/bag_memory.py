"""Search the bags of tokens of a snapshot's passages, which stay valid while the encoder trains."""

from pathlib import Path

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.ragged_file import SparseWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.bag import BagEncoder, compute_bag_space, compute_term_mask, read_bag_spec
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import BAG_POOLING, Space
from rag_model.encoders.sparse_spec import read_vocabulary_size
from rag_model.encoders.tokens import load_tokenizer
from rag_model.index.build import run_stages
from rag_model.index.kind import IndexFiles
from rag_model.index.postings.impact import KIND
from rag_model.index.postings.search import ImpactIndex
from rag_model.index.recipe import IndexRecipe
from rag_model.process import temporary_folder
from rag_model.retrieve.indexes import open_index, representation_kind
from rag_model.store.versions.manifest import TEXT
from rag_model.store.versions.snapshot import Snapshot


class BagMemory:
    """A search over a snapshot's bag index, or over a temporary one that is built here."""

    def __init__(self, snapshot: Snapshot, folder: Path, terms: int | None = None) -> None:
        """Open the first bag index of the tokenizer in `folder`, or build one.

        `terms` is the number of heaviest query terms that are looked up; None looks up all.

        Raises:
            InputError: a file is damaged.
            ResourceError: the disk has no space to build an index.
        """
        self.snapshot, self._parameters = snapshot, {} if terms is None else {"terms": terms}
        name = find_bag_index(snapshot, folder)
        self.is_temporary = name is None  # whether the index was built here
        self._index: ImpactIndex = _build_bag_index(snapshot, folder) if name is None else open_index(snapshot, name)

    def propose(self, query_terms: Vectors, k: int) -> list[list[Passage]]:
        """Return the k best passages of each query, best first; fewer if fewer share a term.

        `query_terms` (q, l, 2) are weighted terms as returned by `SparseEncoder.encode_questions`.
        """
        _, rows = self._index.search(query_terms, min(k, self.snapshot.n), **self._parameters)
        needed_rows = sorted({row for query_rows in rows.tolist() for row in query_rows if row >= 0})
        passages_by_row = (
            dict(zip(needed_rows, self.snapshot.passages(needed_rows), strict=True)) if needed_rows else {}
        )
        return [[passages_by_row[row] for row in query_rows if row >= 0] for query_rows in rows.tolist()]


def find_bag_index(snapshot: Snapshot, folder: Path) -> str | None:
    """Return the name of a snapshot's first bag index of the tokenizer in `folder`, or None."""
    expected_space, content = compute_bag_space(folder, read_bag_spec(folder)), snapshot.manifest.content
    for name in content.indexes:
        space = (
            content.space_of(content.representation_of(name))
            if representation_kind(snapshot, name) == "sparse"
            else None
        )
        if space and space["pooling"] == BAG_POOLING and Space.from_json(space).accepts_queries_of(expected_space):
            return name
    return None


def _build_bag_index(snapshot: Snapshot, folder: Path) -> ImpactIndex:
    spec = read_bag_spec(folder)
    tokenizer, size = load_tokenizer(folder, spec.max_length), read_vocabulary_size(folder)
    encoder = BagEncoder(folder, spec, tokenizer, compute_term_mask(tokenizer, size))
    plan = KIND.plan(IndexRecipe("Impact1"), snapshot.n, size)
    with temporary_folder("bags") as workdir:
        index_path, row_paths = workdir / f"index.{KIND.suffix}", list[Path]()
        for number, text in enumerate(snapshot.row_files(TEXT)):
            row_paths.append(workdir / f"{number}.sparse")
            with SparseWriter(row_paths[-1], size, 1) as writer:
                _encode_part(writer, encoder, text)
        run_stages(plan, row_paths, index_path, workdir)
        return KIND.open(
            IndexFiles(index_path, lambda: row_paths, snapshot.n), plan.entry()
        )  # the mapping outlives the file


def _encode_part(writer: SparseWriter, encoder: BagEncoder, text: Path) -> None:
    for batch in PassageFile(text).iter_batches(["title", "text"]):
        titles, texts = (batch.column(name).to_pylist() for name in ("title", "text"))
        writer.write(encoder.encode_passages(titles, texts))


def estimate_proposal_bytes(snapshot: Snapshot, folder: Path) -> int:
    """Return the memory in bytes of a search over the bags."""
    name = find_bag_index(snapshot, folder)
    if name is not None:
        return snapshot.manifest.content.files[snapshot.manifest.content.index_file(name)].size
    return KIND.estimate(KIND.plan(IndexRecipe("Impact1"), snapshot.n, 0)).peak_bytes(serving=True)
