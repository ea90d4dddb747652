"""Data for a DPR training from a snapshot: hard negatives, missing positives, passages to rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.errors import ResourceError, UsageError
from rag_model.needs.reading import retriever_bytes
from rag_model.retrieve.factory import open_retriever
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.mine import Bm25, Mining, Search, mine, searching

SearchName = Literal["bm25", "snapshot", "own"]
_MOST = 2_000_000  # passages; BM25 holds all of them in memory
_HELD = 2000  # bytes of a passage in BM25


@dataclass(frozen=True, slots=True)
class NegativesRecipe:
    """The source of a DPR training's passages; examples with their own negatives keep them."""

    search: SearchName = "bm25"  # DPR, section 5: BM25; snapshot: by `retriever`; own: the file's negatives alone
    retriever: str | None = None  # of the snapshot, asked by the encoder that it carries; None: its default
    mining: Mining = field(default_factory=Mining)
    ranked: int = 10_000  # passages of the snapshot to rank for dev questions, in addition to the dev set's

    def __post_init__(self) -> None:
        if self.search not in get_args(SearchName) or self.ranked < 0:
            raise UsageError(
                f"search is {self.search!r} and ranked {self.ranked}: use one of "
                f"{', '.join(get_args(SearchName))}for search, and ranked >= 0"
            )


def with_negatives(examples: Sequence[Example], snapshot: Snapshot, recipe: NegativesRecipe) -> list[Example]:
    """Return the examples, in order; missing positives or negatives are mined in the snapshot.

    Raises:
        ResourceError: BM25 would hold more passages than fit.
        UsageError: the retriever is wrong.
    """
    lacking = [one for one in examples if not (one.positives and one.negatives)]
    if recipe.search == "own" or not lacking:
        return list(examples)
    mined = {one.id: one for one in mine(lacking, _search(snapshot, recipe), recipe.mining)}
    return [mined.get(one.id, one) for one in examples]


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
    return _HELD * snapshot.n if recipe.search == "bm25" else 0


def _search(snapshot: Snapshot, recipe: NegativesRecipe) -> Search:
    if recipe.search == "snapshot":
        retriever = open_retriever(snapshot, recipe.retriever)
        return searching(retriever, retriever.most)
    if snapshot.n > _MOST:
        raise ResourceError(
            f"BM25 would hold the {snapshot.n:,} passages of snapshot {snapshot.id[:12]} in memory: mine with "
            'search = "snapshot", or give negatives and use search = "own"'
        )
    return Bm25(snapshot.passages(range(snapshot.n))).search
