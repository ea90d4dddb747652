"""The requested index (`IndexRecipe`) and the index resolved for n vectors (`VectorPlan`).

A recipe may leave numbers open, as in `HNSW`, `IVF,PQ` and `cells = None`. `resolve` chooses them
from n and d, so that one recipe suits a demo of a thousand passages as well as all of Wikipedia.
Plans note every setting that had to be changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isqrt
from typing import Any

from rag_model.errors import InputError, UsageError, format_count
from rag_model.index.factory import (
    CodecSpec,
    FactorySpec,
    HnswSpec,
    IvfSpec,
    TransformSpec,
    check_dimensions,
    find_largest_divisor,
    get_structure,
    parse_factory,
    without_vector_refinement,
)
from rag_model.index.files.engine import Metric
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.plan import IndexPlan

# M of HNSW, as in faiss and most papers; 16 halves the graph and loses about 1 point of recall
DEFAULT_LINKS = 32
MAX_SINGLE_CELL_ROWS = 100_000  # up to this many vectors, one core builds the graph in minutes
CELL_ROWS = 62_500  # vectors per cell of a larger corpus; 16 cells cost less than one of 1M
POINTS_PER_LIST = 39  # faiss warns about centroids with fewer training points
DEFAULT_REPRESENTATION = "embeddings"  # name of the representation of indexes over vectors
# from this number of lists on, a graph over the centroids is cheaper than comparing all of them
MIN_GRAPH_LISTS = 8_192
# candidates to rerank per hit: with 1 bit per dimension, 10 lose 2 points of recall, and 4 lose 7
REFINE_FACTOR = 10
# Minimum number of lists to search if candidates are reranked, because passages are then lost only
# if their list is not searched. Over 21,581 passages, a search of 32 of 512 lists lost 6.6 points
# of Success@20 against exact search, a search of 128 lost 1.9, and a search of 256 lost 0.5.
MIN_REFINED_LISTS = 256
# Number of lists to search if the codes lose nothing after reranking. A recall@20 of .98 needs 92
# of 512 lists over 60,000 passages, 144 of 1,024 over 250,000 and 216 of 2,048 over 946,599. The
# number of compared codes is about 1.51 n^.807, so the number of lists to search is about
# _LISTS_FACTOR * lists ** _LISTS_POWER: 960 of 16,384 lists over 21 million passages.
_LISTS_FACTOR, _LISTS_POWER = 0.912, 0.717
# Rerank 5 * k candidates of a graph: with 4 bits per dimension, the first 100 candidates include
# the best 20.
GRAPH_REFINE_FACTOR = 5
# with fewer vectors, 256 centroids per sub-quantizer cannot be trained, and no codes are needed
MIN_TRAINING_VECTORS = 1_024
MERGE_THREADS = 8  # maximum threads that merge a graph; each takes a byte per vector
PQ_SAMPLE = 65_536  # training points of a product quantizer: 256 for each of 256 centroids


@dataclass(frozen=True, slots=True)
class IndexRecipe:
    """One index of a snapshot."""

    factory: str  # a faiss factory string (`HNSW`, `IVF,PQ`), or the string of another kind
    metric: Metric = "ip"  # inner product, which is the cosine of vectors of length 1
    # candidates per inserted node; 200 takes twice the time for less than 1 point of recall
    ef_construction: int = 100
    cells: int | None = None  # HNSW shards; default: 1 up to 100,000 vectors, then one per 62,500
    # mean number of further cells whose graph a vector joins; linking it costs less, see `linked`
    border: float = 0.0
    # mean number of further cells into which a vector is linked; 1.0 loses .001 of recall
    linked: float = 1.2
    train_sample: int | None = None  # training vectors; default: 39 per list, at least 65,536
    seed: int = 0
    search: Mapping[str, Any] = field(default_factory=dict)  # efSearch, or nprobe and refine
    recall_target: float | None = None  # the tuner chooses efSearch or nprobe to reach it
    # Largest accepted ratio of the errors of new and training rows; above it, cells, lists and
    # codes are trained again. Other samples of the same corpus stay below 1.1; another topic
    # exceeds 1.3.
    drift: float = 1.2

    over: str = ""  # the representation; default: `embeddings`, `tokens`, `sparse` or `text`
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of this kind only

    def __post_init__(self) -> None:
        get_kind_for_factory(self.factory).check(self)


def check_vector_recipe(recipe: IndexRecipe) -> None:
    """Check the settings of an index over vectors.

    Raises:
        UsageError: a setting is invalid or does not apply to the factory.
    """
    if recipe.metric not in ("ip", "l2"):
        raise UsageError(f"metric is {recipe.metric!r}: choose ip (inner product) or l2")
    if not 0 <= recipe.border <= 1 or recipe.linked < 0:
        raise UsageError(f"border is {recipe.border} and linked {recipe.linked}: need 0 <= border <= 1 and linked >= 0")
    for name in ("ef_construction", "cells", "train_sample"):
        setting = getattr(recipe, name)
        if setting is not None and setting < 1:
            raise UsageError(f"{name} must be at least 1, not {setting}")
    if recipe.recall_target is not None and not 0 < recipe.recall_target < 1:
        raise UsageError(
            f"recall_target is {recipe.recall_target}: it is a share between 0 and 1, for example "
            "0.95; Flat is the index with recall 1"
        )
    if recipe.drift < 1:
        raise UsageError(f"drift is {recipe.drift}: it is a factor of 1 or more; 1 trains again with every build")
    if recipe.settings:
        raise UsageError(f"settings do not apply to {recipe.factory}: put them in the index table itself")
    check_search_parameters(recipe.search, list_search_parameters(parse_factory(recipe.factory)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorPlan(IndexPlan):
    """A recipe resolved for n vectors of d dimensions; see `IndexRecipe` for the fields."""

    metric: Metric
    d: int
    ef_construction: int
    cells: int
    border: float
    linked: float
    train_sample: int
    refine: str | None = None  # "vectors": candidates are reranked with the corpus's vectors

    @property
    def shards(self) -> int:
        """The number of shards built between scatter and merge: one per cell of a graph."""
        return self.cells if self.kind == "hnsw" else 0

    def entry(self) -> dict[str, Any]:
        """Return the fields of the manifest entry: kind, over, factory, metric, n, d, search.

        `refine` and `row_bytes` are added if they apply to the index. With `row_bytes`, the file
        ends in one vector of that many bytes per row, in row order.
        """
        manifest_entry: dict[str, Any] = {
            "kind": self.kind,
            "over": self.over or DEFAULT_REPRESENTATION,
            "factory": self.factory,
            "metric": self.metric,
        }
        manifest_entry |= {"n": self.n, "d": self.d, "search": dict(self.search)}
        optional_fields = {"refine": self.refine, "row_bytes": _count_row_bytes(parse_factory(self.factory), self.d)}
        return manifest_entry | {name: value for name, value in optional_fields.items() if value}


def _count_row_bytes(factory: FactorySpec, d: int) -> int:
    """Return the bytes per vector at the end of the file; 0 if the file does not end in vectors."""
    if isinstance(factory, IvfSpec):
        return 0
    storage = factory.storage if isinstance(factory, HnswSpec) else "Flat"
    return {"Flat": 4 * d, "SQfp16": 2 * d}.get(storage, 0)


def list_search_parameters(factory: FactorySpec) -> tuple[str, ...]:
    """Return the names of the search parameters that an index with this factory takes."""
    if isinstance(factory, HnswSpec):
        return ("efSearch", "refine") if factory.refine else ("efSearch",)
    if isinstance(factory, IvfSpec):
        return ("nprobe", "refine") if factory.refine else ("nprobe",)
    return ()


def representation_of(recipe: IndexRecipe) -> str:
    """Return the name of the representation that an index is built over."""
    representation_type = get_kind_for_factory(recipe.factory).represents
    return recipe.over or (DEFAULT_REPRESENTATION if representation_type == "vectors" else representation_type)


def count_lists(plan: VectorPlan) -> int:
    """Return the number of inverted lists of a plan; 1 if it is not a plan of inverted lists."""
    factory = parse_factory(plan.factory)
    return (factory.lists or 1) if isinstance(factory, IvfSpec) else 1


def check_search_parameters(parameters: Mapping[str, Any], accepted_names: Sequence[str]) -> None:
    """Check that each search parameter applies to an index and is an integer of at least 1.

    Raises:
        UsageError: a parameter is unknown, too small or not an integer.
    """
    for name, parameter in parameters.items():
        if name not in accepted_names:
            raise UsageError(
                f"{name} is not a search parameter of this index: it takes {' and '.join(accepted_names) or 'none'}"
            )
        if type(parameter) is not int:
            from rag_model.toml import quote_value  # noqa: PLC0415 - searches import this module

            raise UsageError(f"{name} must be a whole number, not {quote_value(parameter)}")
        if parameter < 1:
            raise UsageError(f"{name} must be at least 1, not {parameter}")


def check_depth(k: int, n: int, noun: str = "passage") -> None:
    """Check that a search for `k` hits per query suits an index of `n` passages or vectors.

    Raises:
        UsageError: `k` is not in 1 … n.
    """
    if not 1 <= k <= n:
        raise UsageError(f"k is {k} but the index holds {format_count(n, noun)}: ask for 1 to {n}")


def resolve(recipe: IndexRecipe, n: int, d: int) -> VectorPlan:
    """Choose every number that `recipe` leaves open, for `n` vectors of `d` dimensions.

    Raises:
        InputError: there are no vectors.
        UsageError: the factory does not fit `d` dimensions.
    """
    if n < 1 or d < 1:
        raise InputError(f"an index over {n} vectors of {d} dimensions is impossible: give at least one vector")
    notes: list[str] = []
    factory = _complete_factory(parse_factory(recipe.factory), n, d, notes)
    check_dimensions(factory, d)
    n_cells = _choose_cells(recipe, factory, n, notes)
    n_samples = min(n, recipe.train_sample or _compute_train_sample(factory))
    min_sample = _compute_min_train_sample(factory)
    if n_samples < min_sample:
        raise UsageError(f"train_sample is {n_samples} but {factory} needs {min_sample} vectors or more: raise it")
    return VectorPlan(
        kind=get_structure(str(factory)),
        factory=str(without_vector_refinement(factory)),
        metric=recipe.metric,
        n=n,
        d=d,
        ef_construction=recipe.ef_construction,
        cells=n_cells,
        border=recipe.border if n_cells > 1 else 0.0,
        linked=recipe.linked if n_cells > 1 else 0.0,
        train_sample=n_samples,
        seed=recipe.seed,
        search=_resolve_search(recipe, factory),
        refine=None if factory == without_vector_refinement(factory) else "vectors",
        recall_target=recipe.recall_target,
        drift=recipe.drift,
        notes=tuple(notes),
        over=recipe.over,
    )


def _resolve_search(recipe: IndexRecipe, factory: FactorySpec) -> dict[str, int]:
    """Return the default search parameters, overridden by those of the recipe that apply."""
    names = list_search_parameters(factory)
    return choose_search(str(factory)) | {name: setting for name, setting in recipe.search.items() if name in names}


def _complete_factory(factory: FactorySpec, n: int, d: int, notes: list[str]) -> FactorySpec:
    if isinstance(factory, HnswSpec):
        return replace(factory, links=factory.links or DEFAULT_LINKS)
    if isinstance(factory, IvfSpec):
        return _complete_lists(factory, n, d, notes)
    return factory


def _complete_lists(factory: IvfSpec, n: int, d: int, notes: list[str]) -> IvfSpec:
    check_dimensions(factory, d)  # checked even if a small n replaces the numbers
    if n < MIN_TRAINING_VECTORS and (factory.codes.name == "PQ" or factory.rotation is not None):
        notes.append(f"{n} vectors are too few to train {factory}: the lists keep the vectors themselves")
        factory = replace(factory, rotation=None, codes=CodecSpec("Flat"), refine=None)
    return _choose_lists(_choose_codec(factory, d), n, notes)


def _choose_codec(factory: IvfSpec, d: int) -> IvfSpec:
    """Choose PQ codes of 1 byte per 4 dimensions, and add a rotation if the codes need one.

    At 768 dimensions, 21 million passages then take 4 GB. PQ needs a rotation (OPQ) if the
    dimensions have no divisor near a quarter. RaBitQ stores the sign of each dimension, so its
    error is small only if the length of a vector is spread evenly over the dimensions. A random
    rotation spreads the length evenly (Gao and Long. RaBitQ. SIGMOD 2024); faiss does not add this
    rotation.
    """
    rotation, codes = factory.rotation, factory.codes
    code_dim = factory.code_dim(d)
    if codes.name == "PQ" and codes.pieces is None:
        codes = replace(codes, pieces=find_largest_divisor(code_dim, code_dim // 4))
        if rotation is None and codes.pieces is not None and 8 * codes.pieces < code_dim:
            codes = replace(codes, pieces=code_dim // 4)
            rotation = TransformSpec("OPQ", code_dim // 4, code_dim // 4 * 4)
    if codes.name == "RaBitQ" and rotation is None:
        rotation = TransformSpec("RR", None, code_dim)
    if rotation is not None and rotation.name == "OPQ" and rotation.pieces is None:
        rotation = replace(rotation, pieces=codes.pieces or find_largest_divisor(code_dim, code_dim // 4))
    return replace(factory, rotation=rotation, codes=codes)


def _choose_lists(factory: IvfSpec, n: int, notes: list[str]) -> IvfSpec:
    """Choose about 4 sqrt(n) lists, a power of two.

    Finding the nearest lists then costs about as much as reading them.
    """
    max_lists = max(1, n // POINTS_PER_LIST)
    n_lists = factory.lists or 1 << (min(4 * isqrt(n), max_lists).bit_length() - 1)
    if n_lists > n:
        notes.append(f"{n} vectors cannot train {n_lists} lists: there are {max_lists}")
        n_lists = max_lists
    quantizer_links = factory.quantizer_links or (
        DEFAULT_LINKS if factory.lists is None and n_lists >= MIN_GRAPH_LISTS else None
    )
    return replace(factory, lists=n_lists, quantizer_links=quantizer_links)


def _choose_cells(recipe: IndexRecipe, factory: FactorySpec, n: int, notes: list[str]) -> int:
    if not isinstance(factory, HnswSpec):
        return 1
    n_cells = recipe.cells or (1 if n <= MAX_SINGLE_CELL_ROWS else -(-n // CELL_ROWS))
    # A smaller cell has too few nodes.
    max_cells = max(1, n // (4 * (factory.links or DEFAULT_LINKS)))
    if n_cells > max_cells:
        notes.append(f"{n} vectors are too few for {n_cells} cells: there are {max_cells}")
    return min(n_cells, max_cells)


def _compute_train_sample(factory: FactorySpec) -> int:
    n_lists = factory.lists or 1 if isinstance(factory, IvfSpec) else 1
    return max(PQ_SAMPLE, POINTS_PER_LIST * n_lists)


def _compute_min_train_sample(factory: FactorySpec) -> int:
    """Return the number of vectors that k-means needs to have a point per centroid."""
    if not isinstance(factory, IvfSpec):
        return 1
    is_learned = factory.rotation is not None and factory.rotation.name != "RR"
    code_bits = 8 if is_learned else factory.codes.bits if factory.codes.name == "PQ" else 0
    return max(factory.lists or 1, 1 << code_bits)


def count_needed_lists(n_lists: int) -> int:
    """Return how many of an index's lists contain .98 of a query's 20 nearest vectors."""
    needed_lists: float = _LISTS_FACTOR * n_lists**_LISTS_POWER
    return ceil(needed_lists)


def choose_search(text: str) -> dict[str, int]:
    """Return the default search parameters of a complete factory string.

    efSearch is 128 (recall@20 of .99 at a million vectors). nprobe is a sixteenth of the lists, but
    at least 16 and at most 128, because further lists would gain less than the codes lose. With a
    refinement, nprobe is 256, or more if there are many lists, and refine is 10: 10 k candidates
    are reranked. A graph with a refinement reranks 5 k candidates.
    """
    factory = parse_factory(text)
    if isinstance(factory, HnswSpec):
        return {"efSearch": 128} | ({"refine": GRAPH_REFINE_FACTOR} if factory.refine else {})
    if isinstance(factory, IvfSpec):
        n_lists = factory.lists or 1
        if factory.refine:
            nprobe = max(MIN_REFINED_LISTS, count_needed_lists(n_lists))
            return {"nprobe": min(n_lists, nprobe), "refine": REFINE_FACTOR}
        return {"nprobe": min(n_lists, max(16, min(128, n_lists // 16)))}
    return {}
