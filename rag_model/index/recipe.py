"""The requested index (`IndexRecipe`), and the resolved one for n vectors (`VectorPlan`).

A recipe may leave numbers open: `HNSW`, `IVF,PQ`, `cells = None`. `resolve` fills them in from n and d, so
that the same recipe builds a demo of a thousand passages and the whole of Wikipedia, and notes what it had to change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from rag_model.errors import InputError, UsageError
from rag_model.index.factory import (
    Codes,
    Factory,
    Graph,
    Lists,
    Rotation,
    check,
    divisor,
    parse,
    structure_of,
    without_vectors,
)
from rag_model.index.files.engine import Metric
from rag_model.index.plan import IndexPlan
from rag_model.index.registry import kind_for

LINKS = 32  # M of HNSW: faiss's and most papers' choice for text vectors; 16 halves the graph and loses ~1 point
ONE_CELL = 100_000  # up to this size one graph takes one core minutes: not worth splitting
CELL_ROWS = 62_500  # vectors per cell of a larger corpus: measured at 1M / 16 cells, cheaper than one graph
POINTS_PER_LIST = 39  # faiss calls a centroid of fewer points badly trained
EMBEDDINGS = "embeddings"  # the default representation of indexes over vectors
MANY_LISTS = 8_192  # from here on finding centroids costs more than reading lists: use a graph over the centroids
REFINE = 10  # times k candidates are ranked again: with codes of one bit per dimension, 4 lost 7 points, 10 two
REFINED_LISTS = 256  # lists searched where candidates are ranked again: then only unread lists lose passages. Of 21,581
# passages, 32 of 512 lists lost 6.6 points of Success@20 against exact search, 128 lost 1.9, 256 lost .5
FEW_VECTORS = 1_024  # fewer cannot train 256 centroids per code piece, and need no compression
MERGE_THREADS = 8  # of the merge of a graph, at most: each marks every vector that a search has seen, a byte each
PQ_SAMPLE = 65_536  # training points of a product quantizer: 256 for each of 256 centroids


@dataclass(frozen=True, slots=True)
class IndexRecipe:
    """One index of a snapshot; the defaults are those of a build."""

    factory: str  # determines the kind; a faiss factory string (`HNSW` and `IVF,PQ`: numbers open), or another
    metric: Metric = "ip"  # inner product: cosine for encoders that normalise, else DPR's score
    ef_construction: int = 100  # candidates while a node is inserted; 200 takes twice the time for < 1 point
    cells: int | None = None  # HNSW shards; None: 1 up to 100,000 vectors, then one per 62,500
    border: float = 0.0  # further cells per vector whose graph it joins: `linked` has the same recall at lower cost
    linked: float = 1.2  # further cells per vector that it is linked into; 1.0 loses .001 of recall in small cells
    train_sample: int | None = None  # vectors that train centroids and codes; None: 39 per list, at least 65,536
    seed: int = 0
    search: Mapping[str, Any] = field(default_factory=dict)  # efSearch, or nprobe and refine; the default is chosen
    recall_target: float | None = None  # the tuner sets efSearch or nprobe for it; None: the default setting
    drift: float = 1.2  # largest ratio of the errors of new and training rows; above it cells, lists and codes
    # are trained again. Other samples of the same corpus stay below 1.1, another topic exceeds 1.3

    over: str = ""  # name of the representation; empty: `embeddings`, `tokens` or `text`, by what the kind is over
    settings: Mapping[str, Any] = field(default_factory=dict)  # what only this kind of index knows

    def __post_init__(self) -> None:
        kind_for(self.factory).check(self)


def check_vectors(recipe: IndexRecipe) -> None:
    """Check the settings of an index over vectors.

    Raises:
        UsageError: one is wrong, or does not apply to its factory.
    """
    if recipe.metric not in ("ip", "l2"):
        raise UsageError(f"metric is {recipe.metric!r}: choose ip (inner product) or l2")
    if not 0 <= recipe.border <= 1 or recipe.linked < 0:
        raise UsageError(f"border is {recipe.border} and linked {recipe.linked}: need 0 <= border <= 1 and linked >= 0")
    for name in ("ef_construction", "cells", "train_sample"):
        value = getattr(recipe, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if recipe.recall_target is not None and not 0 < recipe.recall_target < 1:
        raise UsageError(
            f"recall_target is {recipe.recall_target}: it is a share between 0 and 1, for example 0.95; "
            "Flat is the index with recall 1"
        )
    if recipe.drift < 1:
        raise UsageError(f"drift is {recipe.drift}: it is a factor of 1 or more; 1 trains again with every build")
    if recipe.settings:
        raise UsageError(f"settings do not apply to {recipe.factory}: put them in the index table itself")
    check_search(recipe.search, parameters_of(parse(recipe.factory)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorPlan(IndexPlan):
    """A recipe resolved for n vectors of d dimensions."""

    metric: Metric
    d: int
    ef_construction: int
    cells: int
    border: float
    linked: float
    train_sample: int
    refine: str | None = None  # vectors: candidates are ranked again by the corpus's vectors

    @property
    def shards(self) -> int:
        """Return how many shards are built between scattering and merging: one per cell of a graph."""
        return self.cells if self.kind == "hnsw" else 0

    def entry(self) -> dict[str, Any]:
        """Return the plan's fields in a manifest: kind, over, factory, metric, n, d, search.

        If they apply, also `refine` and `row_bytes`: the file then ends in one vector of that many bytes per row, in
        row order.
        """
        entry: dict[str, Any] = {
            "kind": self.kind,
            "over": self.over or EMBEDDINGS,
            "factory": self.factory,
            "metric": self.metric,
        }
        entry |= {"n": self.n, "d": self.d, "search": dict(self.search)}
        kept = {"refine": self.refine, "row_bytes": _row_bytes(parse(self.factory), self.d)}
        return entry | {name: value for name, value in kept.items() if value}


def _row_bytes(factory: Factory, d: int) -> int:
    """Return the bytes per vector at the end of the file; 0 if it does not end in vectors."""
    if isinstance(factory, Lists):
        return 0
    storage = factory.storage if isinstance(factory, Graph) else "Flat"
    return {"Flat": 4 * d, "SQfp16": 2 * d}.get(storage, 0)


def parameters_of(factory: Factory) -> tuple[str, ...]:
    """Return the names of the search parameters that an index of this factory takes."""
    if isinstance(factory, Graph):
        return ("efSearch",)
    if isinstance(factory, Lists):
        return ("nprobe", "refine") if factory.refine else ("nprobe",)
    return ()


def over_of(recipe: IndexRecipe) -> str:
    """Return the name of the representation that an index is built over."""
    wanted = kind_for(recipe.factory).represents
    return recipe.over or (EMBEDDINGS if wanted == "vectors" else wanted)


def lists_in(plan: VectorPlan) -> int:
    """Return the number of a plan's inverted lists; 1 where it has none."""
    factory = parse(plan.factory)
    return (factory.lists or 1) if isinstance(factory, Lists) else 1


def check_search(search: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that search parameters apply to an index, each an integer of at least 1.

    Raises:
        UsageError: one is unknown, too small or not an integer.
    """
    for name, value in search.items():
        if name not in known:
            raise UsageError(
                f"{name} is not a search parameter of this index: it takes {' and '.join(known) or 'none'}"
            )
        if type(value) is not int:
            raise UsageError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")


def resolve(recipe: IndexRecipe, n: int, d: int) -> VectorPlan:
    """Choose every number that `recipe` leaves open, for `n` vectors of `d` dimensions.

    Raises:
        InputError: there are no vectors.
        UsageError: the factory does not fit `d` dimensions.
    """
    if n < 1 or d < 1:
        raise InputError(f"an index over {n} vectors of {d} dimensions is impossible: give at least one vector")
    notes: list[str] = []
    factory = _complete(parse(recipe.factory), n, d, notes)
    check(factory, d)
    cells = _cells(recipe, factory, n, notes)
    sample = min(n, recipe.train_sample or _sample(factory))
    if sample < _least_sample(factory):
        raise UsageError(
            f"train_sample is {sample} but {factory} needs {_least_sample(factory)} vectors or more: raise it"
        )
    return VectorPlan(
        kind=structure_of(str(factory)),
        factory=str(without_vectors(factory)),
        metric=recipe.metric,
        n=n,
        d=d,
        ef_construction=recipe.ef_construction,
        cells=cells,
        border=recipe.border if cells > 1 else 0.0,
        linked=recipe.linked if cells > 1 else 0.0,
        train_sample=sample,
        seed=recipe.seed,
        search=_chosen_search(recipe, factory),
        refine=factory.refine if isinstance(factory, Lists) and factory.refine == "vectors" else None,
        recall_target=recipe.recall_target,
        drift=recipe.drift,
        notes=tuple(notes),
        over=recipe.over,
    )


def _chosen_search(recipe: IndexRecipe, factory: Factory) -> dict[str, int]:
    """Return the recipe's settings over the default ones; `refine` is dropped if n is too small for a refinement."""
    known = parameters_of(factory)
    return default_search(str(factory)) | {name: value for name, value in recipe.search.items() if name in known}


def _complete(factory: Factory, n: int, d: int, notes: list[str]) -> Factory:
    if isinstance(factory, Graph):
        return replace(factory, links=factory.links or LINKS)
    if isinstance(factory, Lists):
        return _complete_lists(factory, n, d, notes)
    return factory


def _complete_lists(factory: Lists, n: int, d: int, notes: list[str]) -> Lists:
    check(factory, d)  # a wrong number is refused for every n, also where a small n would replace it
    if n < FEW_VECTORS and (factory.codes.name == "PQ" or factory.rotation is not None):
        notes.append(f"{n} vectors are too few to train {factory}: the lists keep the vectors themselves")
        factory = replace(factory, rotation=None, codes=Codes("Flat"), refine=None)
    return _with_lists(_with_codes(factory, d), n, notes)


def _with_codes(factory: Lists, d: int) -> Lists:
    """Choose one byte per 4 dimensions: 192 at 768, so 21 million passages in 4 GB; rotate if d is not divisible."""
    rotation, codes = factory.rotation, factory.codes
    width = factory.code_dim(d)
    if codes.name == "PQ" and codes.pieces is None:
        codes = replace(codes, pieces=divisor(width, width // 4))
        if rotation is None and codes.pieces is not None and 8 * codes.pieces < width:
            codes = replace(codes, pieces=width // 4)
            rotation = Rotation("OPQ", width // 4, width // 4 * 4)
    if rotation is not None and rotation.name == "OPQ" and rotation.pieces is None:
        rotation = replace(rotation, pieces=codes.pieces or divisor(width, width // 4))
    return replace(factory, rotation=rotation, codes=codes)


def _with_lists(factory: Lists, n: int, notes: list[str]) -> Lists:
    """Choose about 4 sqrt(n) lists, a power of two: finding and reading them then cost about the same."""
    trained = max(1, n // POINTS_PER_LIST)
    lists = factory.lists or 1 << (min(4 * isqrt(n), trained).bit_length() - 1)
    if lists > n:
        notes.append(f"{n} vectors cannot train {lists} lists: there are {trained}")
        lists = trained
    coarse = factory.coarse or (LINKS if factory.lists is None and lists >= MANY_LISTS else None)
    return replace(factory, lists=lists, coarse=coarse)


def _cells(recipe: IndexRecipe, factory: Factory, n: int, notes: list[str]) -> int:
    if not isinstance(factory, Graph):
        return 1
    wanted = recipe.cells or (1 if n <= ONE_CELL else -(-n // CELL_ROWS))
    most = max(1, n // (4 * (factory.links or LINKS)))  # a smaller cell has too few nodes to choose links from
    if wanted > most:
        notes.append(f"{n} vectors are too few for {wanted} cells: there are {most}")
    return min(wanted, most)


def _sample(factory: Factory) -> int:
    lists = factory.lists or 1 if isinstance(factory, Lists) else 1
    return max(PQ_SAMPLE, POINTS_PER_LIST * lists)


def _least_sample(factory: Factory) -> int:
    """Return the vectors that k-means needs to have as many points as centroids."""
    if not isinstance(factory, Lists):
        return 1
    bits = 8 if factory.rotation is not None else factory.codes.bits if factory.codes.name == "PQ" else 0
    return max(factory.lists or 1, 1 << bits)


def default_search(text: str) -> dict[str, int]:
    """Return the default search parameters of a complete factory string.

    efSearch is 128 (recall@20 of .99 at a million); nprobe a sixteenth of the lists, 16 to 128 of them, because codes
    alone lose more than further lists would find. With a refinement, nprobe is 256 and refine 10: ten times k
    candidates are ranked again.
    """
    factory = parse(text)
    if isinstance(factory, Graph):
        return {"efSearch": 128}
    if isinstance(factory, Lists):
        lists = factory.lists or 1
        if factory.refine:
            return {"nprobe": min(lists, REFINED_LISTS), "refine": REFINE}
        return {"nprobe": min(lists, max(16, min(128, lists // 16)))}
    return {}
