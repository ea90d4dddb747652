"""The bags of a snapshot's passages, to be asked by weighted terms while their encoder learns: they never get stale."""

from pathlib import Path
from tempfile import TemporaryDirectory

from rag_model.corpus.passages import PassageFile
from rag_model.corpus.records import Passage
from rag_model.corpus.sparse_file import SparseWriter
from rag_model.encoders.bag import BagEncoder, bag_space, read_bag_spec, terms_of
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.space import BAG, Space
from rag_model.encoders.sparse_spec import vocabulary_of
from rag_model.encoders.tokens import load_tokenizer
from rag_model.index.kind import IndexFiles
from rag_model.index.postings.impact import KIND
from rag_model.index.postings.impacts import ImpactIndex
from rag_model.index.recipe import IndexRecipe
from rag_model.index.stages import build
from rag_model.retrieve.indexes import open_index_of, represents
from rag_model.store.versions.paths import TEXT
from rag_model.store.versions.snapshot import Snapshot


class BagMemory:
    """Finds passages by the bags that a snapshot has, else by bags that are made here, and gone with it."""

    def __init__(self, snapshot: Snapshot, folder: Path, terms: int | None = None) -> None:
        """Open the first index of bags of the tokenizer in `folder`, or build one.

        `terms`: how many of a question's terms are looked up, the heaviest; None: all.

        Raises:
            InputError: a file is damaged.
            ResourceError: the disk has no room to build one.
        """
        self.snapshot, self._parameters = snapshot, {} if terms is None else {"terms": terms}
        name = bag_index(snapshot, folder)
        self.built = name is None  # whether the index was made here
        self._index: ImpactIndex = _built(snapshot, folder) if name is None else open_index_of(snapshot, name)

    def propose(self, asked: Vectors, k: int) -> list[list[Passage]]:
        """Return the k best passages of each question, best first; fewer where fewer share a term with it.

        `asked` (q, l, 2): weighted terms, as `SparseEncoder.encode_questions` gives them.
        """
        _, rows = self._index.search(asked, min(k, self.snapshot.n), **self._parameters)
        wanted = sorted({row for own in rows.tolist() for row in own if row >= 0})
        known = dict(zip(wanted, self.snapshot.passages(wanted), strict=True)) if wanted else {}
        return [[known[row] for row in own if row >= 0] for own in rows.tolist()]


def bag_index(snapshot: Snapshot, folder: Path) -> str | None:
    """Return the name of a snapshot's first index of bags of the tokenizer in `folder`; None: it has none."""
    ours, content = bag_space(folder, read_bag_spec(folder)), snapshot.manifest.content
    for name in content.indexes:
        space = content.space_of(content.over(name)) if represents(snapshot, name) == "sparse" else None
        if space and space["pooling"] == BAG and Space.from_json(space).admits(ours):
            return name
    return None


def _built(snapshot: Snapshot, folder: Path) -> ImpactIndex:
    spec = read_bag_spec(folder)
    tokenizer, size = load_tokenizer(folder, spec.max_length), vocabulary_of(folder)
    encoder = BagEncoder(folder, spec, tokenizer, terms_of(tokenizer, size))
    plan = KIND.plan(IndexRecipe("Impact1"), snapshot.n, size)
    with TemporaryDirectory(prefix="bookwheel-bags-") as workdir:
        out, rows = Path(workdir) / f"index.{KIND.suffix}", list[Path]()
        for number, text in enumerate(snapshot.row_files(TEXT)):
            rows.append(Path(workdir) / f"{number}.sparse")
            with SparseWriter(rows[-1], size, 1) as writer:
                _write(writer, encoder, text)
        build(plan, rows, out, Path(workdir))
        return KIND.open(IndexFiles(out, lambda: rows, snapshot.n), plan.entry())  # a map outlives the file's name


def _write(writer: SparseWriter, encoder: BagEncoder, text: Path) -> None:
    for batch in PassageFile(text).iter_batches(["title", "text"]):
        titles, texts = (batch.column(name).to_pylist() for name in ("title", "text"))
        writer.write(encoder.encode_passages(titles, texts))


def propose_bytes(snapshot: Snapshot, folder: Path) -> int:
    """Return the memory in bytes of asking the bags."""
    name = bag_index(snapshot, folder)
    if name is not None:
        return snapshot.manifest.content.files[snapshot.manifest.content.index_file(name)].size
    return KIND.estimate(KIND.plan(IndexRecipe("Impact1"), snapshot.n, 0)).needed_bytes(serving=True)
