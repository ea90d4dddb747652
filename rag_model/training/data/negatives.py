"""Data for a DPR training from a snapshot: hard negatives, missing positives, passages to rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.index.kind import IndexFiles
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_for, kind_of
from rag_model.index.stages import build
from rag_model.needs.reading import retriever_bytes
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.lexical import TextRetriever
from rag_model.store.versions.paths import TEXT
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.mine import Mining, Search, mine, searching
from rag_model.training.data.teaching import Tell

SearchName = Literal["bm25", "snapshot", "own"]
_BM25 = "bm25"  # the index kind


@dataclass(frozen=True, slots=True)
class NegativesRecipe:
    """The source of a DPR training's passages; examples with their own negatives keep them."""

    search: SearchName = "bm25"  # DPR, section 5: BM25; snapshot: by `retriever`; own: the file's negatives alone
    retriever: str | None = None  # of the snapshot, asked by the encoder that it carries; not set: its default
    mining: Mining = field(default_factory=Mining)
    ranked: int = 10_000  # passages of the snapshot to rank for dev questions, in addition to the dev set's

    def __post_init__(self) -> None:
        if self.search not in get_args(SearchName) or self.ranked < 0:
            raise UsageError(
                f"search is {self.search!r} and ranked {self.ranked}: use one of "
                f"{', '.join(get_args(SearchName))}for search, and ranked >= 0"
            )


def with_negatives(
    examples: Mapping[str, Sequence[Example]],
    snapshot: Snapshot,
    recipe: NegativesRecipe,
    tell: Tell = lambda _, __: None,
) -> dict[str, list[Example]]:
    """Return the examples of every set, in order; missing positives or negatives are mined in the snapshot.

    `tell` is called with the number of questions searched, and of how many.

    Raises:
        ResourceError: the snapshot has no index of words, and the disk has no room to build one for this training.
        UsageError: the retriever is wrong.
    """
    places = [
        (name, place)
        for name, some in examples.items()
        for place, one in enumerate(some)
        if not (one.positives and one.negatives)
    ]
    found = {name: list(some) for name, some in examples.items()}
    if recipe.search == "own" or not places:
        return found
    lacking = [found[name][place] for name, place in places]
    mined = mine(lacking, _search(snapshot, recipe), recipe.mining, tell)
    for (name, place), one in zip(places, mined, strict=True):
        found[name][place] = one
    return found


def ranked_passages(snapshot: Snapshot, count: int) -> list[Passage]:
    """Return up to `count` passages of a snapshot, evenly spaced over its rows."""
    rows = np.unique(np.linspace(0, snapshot.n - 1, min(count, snapshot.n), dtype=np.int64))
    return snapshot.passages(rows.tolist())


def mining_bytes(snapshot: Snapshot, recipe: NegativesRecipe) -> int:
    """Return the memory in bytes of the search for negatives.

    Raises:
        UsageError: the recipe's retriever is wrong.
    """
    if recipe.search == "snapshot":
        return retriever_bytes(snapshot, recipe.retriever)
    if recipe.search == "own":
        return 0
    name = _index_of_words(snapshot)
    if name is not None:
        return retriever_bytes(snapshot, name)
    own = IndexRecipe("BM25")
    return kind_for(own.factory).estimate(kind_for(own.factory).plan(own, snapshot.n, 0)).needed_bytes(serving=True)


def _search(snapshot: Snapshot, recipe: NegativesRecipe) -> Search:
    if recipe.search == "snapshot":
        retriever = open_retriever(snapshot, recipe.retriever)
        return searching(retriever, retriever.most)
    name = _index_of_words(snapshot)
    retriever = _built(snapshot) if name is None else open_retriever(snapshot, name)
    return searching(retriever, snapshot.n)


def _index_of_words(snapshot: Snapshot) -> str | None:
    """Return the name of the snapshot's first BM25 index; None: it has none."""
    entries = snapshot.manifest.content.indexes.items()
    return next((name for name, entry in entries if kind_of(entry).name == _BM25), None)


def _built(snapshot: Snapshot) -> SnapshotRetriever:
    """Return BM25 over a snapshot that has no such index: it is built here, and is gone when it is closed."""
    recipe, rows = IndexRecipe("BM25"), snapshot.row_files(TEXT)
    kind = kind_for(recipe.factory)
    plan = kind.plan(recipe, snapshot.n, 0)
    with TemporaryDirectory(prefix="bookwheel-words-") as workdir:
        out = Path(workdir) / f"index.{kind.suffix}"
        build(plan, rows, out, Path(workdir))
        opened = kind.open(IndexFiles(out, lambda: rows, snapshot.n), plan.entry())  # a map outlives the file's name
    return TextRetriever(snapshot, _BM25, opened)
