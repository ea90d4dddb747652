"""The protocols of an index kind, the registry of kinds, and base classes with defaults.

An index is built over a *representation* of the passages. Row i belongs to passage i:

    vectors    one vector per passage, float16 or float32, one `.npy` file per part
    tokens     many vectors per passage, one Arrow file per part
    sparse     weighted terms per passage, one Arrow file per part
    text       the passages themselves, one Parquet file per part

A build runs four stages, each a function of files:

    train(rows)                       -> one small file, the same for every worker
    scatter(rows of one part)         -> one piece per part
    shard(slices of the pieces)       -> one piece per shard, if the plan has shards
    merge(scattered, shards, rows)    -> the index file

A piece depends only on the trained file and its own part, never on the number of rows, so a rebuild
reuses the pieces of unchanged parts. `IndexPlan.entry` is the index's entry in the manifest: its
kind, representation, file and search settings. A takedown rebuilds an index from rows without the
page and reuses nothing, unless the kind is a `DerivingKind` or a `ShardUpdatingKind`. A pull
fetches the whole file, with two exceptions: if the entry has `row_bytes`, the file ends in one row
of that many bytes per passage, and only new rows are fetched; if the kind is a `DerivingKind`, the
puller derives the file itself.

A kind implements three protocols: `IndexBuilder`, `IndexSearcher` and `IndexPlanner`. The planner
is optional: all of its methods have defaults.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from rag_model.errors import StoreError, UsageError
from rag_model.index.factory import parse_factory
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Opener
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.quality.results import (
    DEFAULT_FLOOR,
    PROCESS_BYTES,
    FitResult,
    IndexHealth,
    OperatingPoint,
    RecallFloor,
    Recalls,
    ResourceEstimate,
    TuningResult,
)
from rag_model.plugins import Registry
from rag_model.ranges import CachedFile

RepresentationType = Literal["vectors", "tokens", "sparse", "text"]
IndexEntry = Mapping[str, Any]  # an index's entry in a manifest
PlanT = TypeVar("PlanT", bound=IndexPlan)


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """The file of an index and the row files that it was built over."""

    index: Path
    # returns the row files in row order, or `RemoteRowFiles`; called only if needed
    rows: Callable[[], Sequence[Path]]
    n: int  # number of passages in the snapshot
    # loads ranges of `index` if the whole file is not on this disk; only for a `RangedKind`
    ranges: CachedFile | None = None
    # the result of the kind's `build_outline`, if `ranges` is given; None for a small file
    outline: Any = None

    def pin_ranges(self) -> None:
        """Load the ranges that every search reads, or all of a small file, and keep them.

        Raises:
            ResourceError: the disk of the cache is full.
            StoreError: a range cannot be read, is damaged, or is outside the file.
        """
        if self.ranges is not None:
            whole_file = [[0, self.ranges.size]]
            pinned_ranges = whole_file if self.outline is None else self.outline["pinned"]
            try:
                ranges = [(int(start), int(end)) for start, end in pinned_ranges]
                is_valid = all(0 <= start <= end <= self.ranges.size for start, end in ranges)
            except (TypeError, ValueError):
                is_valid = False
            if not is_valid:
                raise StoreError(f"the outline of {self.ranges.name} names ranges outside the file: pull the snapshot")
            self.ranges.pin(*ranges)


@dataclass(frozen=True, slots=True)
class TextQuerySet:
    """Text queries with known answers: each query is a sentence of one passage."""

    queries: Sequence[str]
    k: int  # depth of recall
    rows: Rows  # (q,): the row of the passage that each query was taken from


@dataclass(frozen=True, slots=True)
class TokenQuerySet:
    """Token-vector queries, and a sample of passages small enough for exact MaxSim."""

    queries: Vectors  # (q, l, d): l token vectors per query
    k: int  # depth of recall
    rows: Rows  # (m,) ascending rows of the sample, including the passage of each query


@dataclass(frozen=True, slots=True)
class SparseQuerySet:
    """Weighted-term queries with known answers: each query is a sentence of one passage."""

    queries: Vectors  # (q, l, 2): l pairs of term and weight per query
    k: int  # depth of recall
    rows: Rows  # (q,): the row of the passage that each query was taken from


@dataclass(frozen=True, slots=True)
class IndexMeasurement:
    """Measurements of an index for the gate and the report."""

    # (q,) in [0, 1]: recall@k of each query against exhaustive search, with the default search
    # setting
    recalls: Recalls
    curve: Sequence[OperatingPoint] = ()  # recall and cost of several search settings
    setting: OperatingPoint | None = None  # the default search setting, as a point of the curve
    health: IndexHealth | None = None  # statistics of a faiss file
    metrics: Mapping[str, float | int] = field(default_factory=dict)  # the kind's own metrics


class TextIndex(Protocol):
    """An index that is searched with query texts."""

    n: int  # number of passages; rows are 0 … n-1

    def search(self, queries: Sequence[str], k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each query: (q, k) float32 scores, (q, k) int64 rows.

        The best row comes first; larger scores are better; equal scores are ordered by row. If
        there are fewer than k hits, the remaining entries are row -1 with score -inf.

        Raises:
            UsageError: `k` or a parameter does not fit the index.
        """
        ...


@runtime_checkable
class PruningIndex(Protocol):
    """A text index that skips postings that cannot matter, but can also read all of them."""

    def search_exhaustively(self, queries: Sequence[str], k: int, **parameters: Any) -> Rows:
        """Return the same rows as `TextIndex.search`, reading every posting of the query terms."""
        ...


class TokenIndex(Protocol):
    """An index that is searched with the token vectors of a query."""

    n: int  # number of passages; rows are 0 … n-1
    dim: int  # components of a token's vector

    def search(self, queries: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows by MaxSim for each query, (q, l, d); see `TextIndex.search`."""
        ...

    def score(self, query: Vectors, rows: Rows) -> Vectors:
        """Return the (m,) float32 MaxSim of a query, (l, d), with the passages `rows`, (m,)."""
        ...


class SparseIndex(Protocol):
    """An index that is searched with the weighted terms of a query."""

    n: int  # number of passages; rows are 0 … n-1

    def search(self, queries: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each query; queries are (q, l, 2) pairs of term and weight."""
        ...


class IndexBuilder(Protocol):
    """Plan and build indexes of one kind."""

    name: ClassVar[str]  # the kind's name in manifests
    represents: ClassVar[RepresentationType]  # type of the indexed representation
    suffix: ClassVar[str]  # file name suffix of the index file
    learns: ClassVar[bool]  # whether later builds reuse its trained file
    threaded: ClassVar[bool]  # whether a shard has the same bytes with any number of threads
    libraries: ClassVar[tuple[str, ...]]  # distributions whose versions affect an index's bytes
    VERSION: ClassVar[int]  # increased when the same plan and rows would give other bytes

    def takes(self, factory: str) -> bool:
        """Return whether a recipe with this `factory` is of this kind."""
        ...

    def check(self, recipe: Any) -> None:
        """Check an `IndexRecipe` of this kind before any row exists.

        Raises:
            UsageError: a setting is unknown or invalid; the message names it.
        """
        ...

    def plan(
        self, recipe: Any, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> IndexPlan:
        """Choose every number that an `IndexRecipe` leaves open, for `n` rows.

        Args:
            recipe: the index to build.
            n: number of rows, at least 1.
            width: dimensions of a vector or of a token vector; size of the vocabulary; 0 over text.
            memory: bytes that one machine has for the largest stage; None if unknown.
            part_rows: number of rows of the largest part.

        Raises:
            UsageError: the recipe does not fit the rows.
            ResourceError: the build does not fit in memory.
        """
        ...

    def train(self, plan: IndexPlan, rows: Sequence[Path], out: Path) -> IndexStats:
        """Train on the rows of all parts and write the file that all workers share.

        The returned statistics contain `losses`.
        """
        ...

    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Write the piece of part `number`.

        A kind with shards writes the piece by `pieces.write_sliced_piece`, with one slice per
        shard.
        """
        ...

    def shard(self, plan: IndexPlan, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> IndexStats:
        """Build shard `number` and write its piece; equal slices give equal bytes.

        `slices` are the slices of this shard in the order of the parts, without empty ones. The
        caller has verified that `scatter` wrote the slices for this plan and this trained file.
        """
        ...

    def merge(
        self,
        plan: IndexPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> IndexStats:
        """Merge the pieces of all parts and shards, given in order, into the index file."""
        ...


class IndexOpener(Protocol):
    """Open indexes of one kind for search."""

    represents: ClassVar[RepresentationType]  # type of the indexed representation

    def open(self, files: IndexFiles, entry: IndexEntry, *, mmap: bool = True) -> Any:
        """Open an index for search.

        Returns:
            A `VectorIndex`, `TokenIndex`, `SparseIndex` or `TextIndex`, according to `represents`.

        Raises:
            InputError: the file is missing, damaged or of another kind.
        """
        ...

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Check the parameters of one search before the index is opened.

        Raises:
            UsageError: a parameter is unknown or out of range; the message names it.
        """
        ...


class IndexSearcher(IndexOpener, Protocol):
    """Open and evaluate indexes of one kind."""

    def measure(self, files: IndexFiles, entry: IndexEntry, query_set: Any) -> IndexMeasurement:
        """Measure an index with queries whose answers are known.

        `query_set` is a `VectorQuerySet`, `TokenQuerySet`, `SparseQuerySet` or `TextQuerySet`,
        according to `represents`.
        """
        ...

    def floor(self, factory: str) -> RecallFloor:
        """Return the lowest recall that the gate accepts if the recipe sets no limit."""
        ...


class IndexPlanner(Protocol[PlanT]):
    """Estimate, tune and reuse indexes of one kind.

    All methods are optional: the defaults suit a kind that trains nothing and has no search setting
    to tune.
    """

    def estimate(self, plan: PlanT, part_rows: int | None = None) -> ResourceEstimate:
        """Estimate memory and disk of an index from its plan alone.

        By default, assume a file of 1 KB per passage, and constant memory for each stage.
        """
        n_bytes = plan.n << 10
        return ResourceEstimate(
            dict.fromkeys(("train", "scatter", "merge"), PROCESS_BYTES), n_bytes + PROCESS_BYTES, n_bytes, 2 * n_bytes
        )

    def seconds(self, plan: PlanT, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Estimate the seconds of one task of a stage on one core, for `rows` rows of `size` bytes.

        `inherited` means that the parent index has a trained file that may fit (stage train), or
        pieces with most of the rows (stage scatter). The default is the time to read `size` bytes
        at 20 MB per second.
        """
        return 0.01 if stage == "train" else size / 2e7

    def tune(self, files: IndexFiles, entry: IndexEntry, query_set: Any, target: float) -> TuningResult:
        """Return the cheapest search setting whose recall against exhaustive search reaches
        `target`.

        By default, return the search setting of the entry. So a kind that does not override this
        method must refuse a recall target in `check`.
        """
        return TuningResult(dict(entry["search"]), 1.0)

    def steady(self, recipe: Any, plan: PlanT, parent_inputs: Mapping[str, Any]) -> PlanT:
        """Return the plan, changed to the parent's numbers if its pieces can then be reused.

        `parent_inputs` are the `IndexPlan.piece_inputs` of the parent index. The default is the
        plan itself.
        """
        return plan

    def losses(self, plan: PlanT, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the errors of the trained cells, lists and codes for vectors, (m, d) float32."""
        return {}

    def fit(
        self,
        plan: PlanT,
        trained: Path,
        losses: Mapping[str, float],
        changed_files: Sequence[tuple[Path, Sequence[Path]]],
        unchanged_files: Sequence[Path],
    ) -> FitResult:
        """Measure how well the parent's trained file fits the rows of a changed corpus.

        The default is a perfect fit.

        Args:
            plan: the plan of the index.
            trained: the parent's trained file.
            losses: the losses of the training vectors, from `train`.
            changed_files: each changed row file, with the row files that the parent has for the
                same range.
            unchanged_files: the unchanged row files.
        """
        return FitResult(0, {})

    def follow(self, plan: PlanT, trained: Path, rows: Sequence[Path], out: Path) -> IndexStats:
        """Adapt the parent's trained file to the current rows.

        The build calls this method if `FitResult.explain_missed_neighbors` returns a reason, or if
        a shard of a `ShardUpdatingKind` has grown too large.

        Raises:
            ValueError: by default, because the default of `fit` reports no missed neighbours.
        """
        raise ValueError(f"{plan.factory} cannot be adapted to new vectors: train it again")


@runtime_checkable
class IndexKind(IndexBuilder, IndexSearcher, IndexPlanner[IndexPlan], Protocol):
    """One kind of index, as registered."""


class UnshardedKind(IndexPlanner[PlanT]):
    """Defaults for a kind without shards, whose scattered pieces are merged directly."""

    threaded: ClassVar[bool] = False

    def shard(self, plan: PlanT, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> IndexStats:
        """Raise ValueError: there are no shards.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{plan.factory} has no shards: merge the scattered pieces")

    def floor(self, factory: str) -> RecallFloor:
        """Return the default lower limit of recall, for vectors that are stored almost without
        loss.
        """
        return DEFAULT_FLOOR


class UntrainedKind(UnshardedKind[IndexPlan]):
    """Defaults for a kind over text or weighted terms: no training and no shards."""

    represents: ClassVar[RepresentationType] = "text"
    learns: ClassVar[bool] = False
    libraries: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str]
    suffix: ClassVar[str]

    def check(self, recipe: Any) -> None:
        """Accept a recipe with the common settings; override this for further settings."""
        if recipe.recall_target is not None:
            raise UsageError(f"recall_target does not apply to {recipe.factory}: leave it out")

    def plan(
        self, recipe: Any, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> IndexPlan:
        """Return a plan with the recipe's own settings."""
        settings, search = dict(recipe.settings), dict(recipe.search)
        return IndexPlan(
            kind=self.name, factory=recipe.factory, n=n, search=search, over=recipe.over, settings=settings
        )

    def train(self, plan: IndexPlan, rows: Sequence[Path], out: Path) -> IndexStats:
        """Write an empty file, because nothing is trained."""
        out.write_bytes(b"")
        return {"losses": {}}

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Refuse every parameter; override this if a search takes parameters."""
        if parameters:
            raise UsageError(f"{next(iter(parameters))} is not a search parameter of this index: it takes none")


KINDS: "Registry[IndexKind]" = Registry(
    "index kind",
    "bookwheel.index_kinds",
    {
        "bm25": "rag_model.index.postings.kind:KIND",
        "exact": "rag_model.index.lists.kind:EXACT_KIND",
        "hnsw": "rag_model.index.graphs.kind:KIND",
        "impact": "rag_model.index.postings.impact:KIND",
        "ivf": "rag_model.index.lists.kind:KIND",
        "tokens": "rag_model.index.tokens.kind:KIND",
    },
    IndexKind,
)


def get_kind(name: str) -> "IndexKind":
    """Return the kind of that name.

    Raises:
        InputError: the package that provides the name does not provide an index kind.
        StoreError: no installed package provides it.
    """
    kind = KINDS.find(name)
    if kind is None:
        raise StoreError(
            f"there is no index kind {name!r} here, only {', '.join(KINDS.list_names())}: install its package"
        )
    return kind


def get_kind_for_factory(factory: str) -> "IndexKind":
    """Return the kind whose factory strings include `factory`.

    Raises:
        UsageError: no kind takes the string; the message explains why faiss's syntax does not match
            either.
    """
    for iter_kinds in (KINDS.iter_built_in, KINDS.iter_plugins):
        for kind in iter_kinds():
            if kind.takes(factory):
                return kind
    try:
        parse_factory(factory)
    except UsageError as error:
        raise UsageError(
            f"{error}; other kinds: BM25 over text, Impact or Impact1 over weighted terms, MaxSim "
            "over token vectors, or install the package of the kind"
        ) from error
    raise AssertionError(f"no index kind takes {factory!r}")  # pragma: no cover


def get_kind_of_entry(entry: Mapping[str, Any]) -> "IndexKind":
    """Return the kind of an index by its manifest entry; in format 1, the factory determines the
    kind.

    Raises:
        StoreError: no installed package provides it.
        UsageError: the entry is of format 1 and its factory is unknown.
    """
    return get_kind(str(entry["kind"])) if "kind" in entry else get_kind_for_factory(str(entry.get("factory")))


@runtime_checkable
class RangedKind(Protocol):
    """A kind that can be searched while only byte ranges of its file are on this disk.

    If `IndexFiles.ranges` is given, `open` loads the ranges that every search needs and keeps them
    in memory, and each search loads the other ranges that it needs.
    """

    name: ClassVar[str]
    # number of bytes that are verified together: about as many as a search reads in one place
    block_bytes: ClassVar[int]

    def build_outline(self, path: Path) -> Any:
        """Return facts about an index file that every search needs, as JSON values.

        The result is stored once and read at every opening, so it must be small: at most a kilobyte
        for each megabyte of the file. The fact `pinned` lists the ranges of the file that every
        search reads. The fact `bounds` lists the boundaries of the blocks that are verified
        together (`pack_bounds`); without them, each block has `block_bytes`.

        Returns:
            An object; None if this file cannot be searched by byte ranges.
        """
        ...


@runtime_checkable
class DerivingKind(Protocol):
    """A kind over text or weighted terms that can derive its file from the previous index.

    The derived file has the same bytes as a full build. A build that derives the file does not
    scatter and merge. A puller that derives it does not fetch it, but needs the passages, or a
    delta with the weighted terms of new passages.
    """

    name: ClassVar[str]
    represents: ClassVar[RepresentationType]

    def derive(
        self,
        previous_entry: IndexEntry,
        entry: IndexEntry,
        previous_path: Path,
        previous_rows: Rows,
        read_passages: Callable[[Rows], Iterator[Any]],
        out: Path,
    ) -> IndexStats | None:
        """Derive the index file; a full build writes the same bytes.

        Args:
            previous_entry: the manifest entry of the previous index.
            entry: the manifest entry of the new index.
            previous_path: the file of the previous index.
            previous_rows: (n,) the previous row of each passage; -1 if the passage is new.
            read_passages: a function that yields the passages at ascending rows: as record batches
                of title and text, or as `SparseVectors` for an index over weighted terms.
            out: the file to write.

        Returns:
            The statistics of a merge; None if nothing was written, so that the caller must build or
            fetch the file.

        Raises:
            BookwheelError: the index cannot be derived here.
        """
        ...

    def derive_memory_bytes(self, n: int) -> int:
        """Return the bytes of memory that `derive` takes for n passages."""
        ...


@dataclass(frozen=True, slots=True)
class PreviousPiece:
    """The piece of a part of the parent snapshot, built with the same trained file."""

    rows: Path  # the vectors of the parent's part, `.npy`
    piece: Opener
    number: int  # part number in the parent snapshot


@runtime_checkable
class PieceReusingKind(Protocol):
    """A kind that can copy the results of unchanged vectors from the parent's pieces.

    The result for a vector, such as its list and code, must depend only on the vector and the
    trained file. Each month nearly every part changes, but few of its vectors do.
    """

    def carries(self, plan: IndexPlan) -> bool:
        """Return whether reading a parent's piece is faster than encoding the vectors again."""
        ...

    def carry(
        self,
        plan: IndexPlan,
        trained: Path,
        rows: Path,
        number: int,
        previous_pieces: Sequence[PreviousPiece],
        out: Path,
    ) -> IndexStats:
        """Write the piece of part `number`, copying results from `previous_pieces`.

        `scatter` writes the same bytes.

        Raises:
            InputError: as for `scatter`, or a previous piece is missing or damaged.
            ResourceError: for the same reasons as `scatter`.
        """
        ...


@runtime_checkable
class ShardUpdatingKind(Protocol):
    """A kind that can update a shard of the parent instead of building it again.

    A takedown also updates shards. So `update` must leave no trace of a vector that is not in the
    slices, and `redact` no trace of a removed vector.
    """

    def can_follow(self, plan: IndexPlan, parent_inputs: Mapping[str, Any]) -> bool:
        """Return whether `follow` can adapt the trained file of a parent's plan to this plan.

        `parent_inputs` are the `IndexPlan.piece_inputs` of the parent's plan. If the result is
        True, the build updates the parent's shards. If this plan has more shards, the new ones
        come last. If it has fewer, `previous_shards` in the statistics of `follow` is the previous
        number of each shard.
        """
        ...

    def redact(
        self,
        plan: IndexPlan,
        trained: Path,
        rows: Sequence[Path],
        removed: Iterable[Vectors],
        out: Path,
    ) -> IndexStats:
        """Write an earlier trained file again, without a trace of the `removed` vectors.

        The shards of the earlier build are then updated. If the statistics have a `reason`, the
        file was trained again for that reason, and the shards are built again.

        Args:
            plan: the plan of a build without the `removed` vectors.
            trained: the trained file of an earlier build, which included them.
            rows: the remaining vectors, one file per part.
            removed: the vectors to remove, blocks of (r, d) float32.
            out: the file to write.

        Raises:
            InputError: for the same reasons as `train`, or the earlier file is damaged.
            ResourceError: for the same reasons as `train`.
        """
        ...

    def update(
        self, plan: IndexPlan, trained: Path, slices: Iterable[bytes], number: int, previous: Opener, out: Path
    ) -> IndexStats:
        """Write shard `number` from its slices and from `previous`, the shard of an earlier build.

        The earlier build had the same plan, and the same trained file or the one from which
        `follow` made `trained`. A build also calls `follow` if a shard has grown beyond its limit.
        `follow` may have given the shard another number. The result depends on the arguments
        alone. If the statistics have a `reason`, the shard was built again, for that reason.

        Raises:
            InputError: as for `shard`, or the previous shard is missing or damaged.
            ResourceError: for the same reasons as `shard`.
        """
        ...
