"""BM25 indexes over the passages of a benchmark, built by the stages of a build."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.index.build import run_stages
from rag_model.index.kind import IndexFiles
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.kind import KIND
from rag_model.index.postings.search import Bm25Index
from rag_model.index.recipe import IndexRecipe

SearchFunction = Callable[[Sequence[str], int], list[list[Passage]]]  # questions, k -> passages


def write_parts(passages: Iterable[Passage], size: int, folder: Path) -> list[Path]:
    """Write passages in parts of `size`."""
    paths, rest = list[Path](), iter(passages)
    while part_passages := list(islice(rest, size)):
        paths.append(folder / f"part-{len(paths):05d}.parquet")
        with PassageWriter(paths[-1]) as writer:
            for passage in part_passages:
                writer.write(passage)
    return paths


def words_plan(n: int) -> IndexPlan:
    """Return the plan of the default BM25 index."""
    return KIND.plan(IndexRecipe("BM25"), n, 0)


def open_words(path: Path, n: int) -> Bm25Index:
    """Open a BM25 index of `n` passages."""
    return KIND.open(IndexFiles(path, list, n), words_plan(n).entry())


def searching_words(passages: Sequence[Passage], folder: Path) -> SearchFunction:
    """Return a BM25 search of passages."""
    folder.mkdir(parents=True, exist_ok=True)
    run_stages(
        words_plan(len(passages)), write_parts(passages, len(passages), folder), folder / "bm25.postings", folder
    )
    index = open_words(folder / "bm25.postings", len(passages))

    def search(questions: Sequence[str], k: int) -> list[list[Passage]]:
        rows = index.search(questions, min(k, index.n))[1]
        return [[passages[row] for row in question_rows if row >= 0] for question_rows in rows.tolist()]

    return search
