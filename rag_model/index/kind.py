"""The protocol of an index kind: everything that bookwheel needs from a searchable structure; a new kind is one folder.

A kind is built over a *representation* of the passages, row i for passage i: `vectors` (one vector per passage, float16
or float32 `.npy`, one file per part), `tokens` (many vectors per passage, one Arrow file per part), `sparse` (weighted
terms, one Arrow file per part) or `text` (the passages themselves, one Parquet file per part). It is built in four
stages, each a function of files:

    train(rows)                        -> one small file, the same for every worker
    scatter(rows of one part)          -> one piece per part
    shard(slices of the pieces)        -> one piece per shard; only for kinds whose plans have shards
    merge(scattered, shards, rows)     -> the index file

A piece depends only on the trained file and its own part, never on the number of rows, so a rebuild reuses the pieces
of unchanged parts. The entry in the manifest is the plan's (`IndexPlan.entry`): it holds `kind`, `over`, `file` and how
the index is searched. A takedown builds an index again from rows without the page, and inherits nothing. A pull fetches
only new rows of a file whose entry says `row_bytes`: it ends in one row of that many bytes per passage. A
`deriving.DerivingKind` has the puller make the file.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Opener
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.quality.fit import Fit
from rag_model.index.quality.health import Effort, Health
from rag_model.index.quality.recall import FLOOR, Floor, Recalls
from rag_model.index.quality.tune import Tuned
from rag_model.index.sizing.estimate import PROCESS, Estimate

Represents = Literal["vectors", "tokens", "sparse", "text"]
Entry = Mapping[str, Any]  # an index's entry in a manifest
Plan = TypeVar("Plan", bound=IndexPlan)


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """The file of an index, and the rows that it was built over."""

    index: Path
    rows: Callable[[], list[Path]]  # of the representation, in row order; called only if they are read
    n: int  # passages of the snapshot


@dataclass(frozen=True, slots=True)
class TextTrial:
    """Questions whose passage is known: each is a sentence of one passage."""

    questions: Sequence[str]
    k: int  # depth of recall
    rows: Rows  # (q,): the row that each question was taken from


@dataclass(frozen=True, slots=True)
class TokenTrial:
    """Questions as token vectors, and a sample of the passages, among which exact MaxSim is affordable."""

    questions: Vectors  # (q, l, d)
    k: int  # depth of recall
    rows: Rows  # (m,) ascending: the sample; the passages that the questions were taken from are among them


@dataclass(frozen=True, slots=True)
class SparseTrial:
    """Questions as weighted terms; each is a sentence of one passage."""

    questions: Vectors  # (q, l, 2)
    k: int  # depth of recall
    rows: Rows  # (q,): the row that each question was taken from


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of an index for the gate and the report."""

    recalls: (
        Recalls  # (q,) in [0, 1]: recall@k of each question against exhaustive search, with the default search setting
    )
    curve: Sequence[Effort] = ()  # recall against work
    setting: Effort | None = None  # the default search setting, as a point of the curve
    health: Health | None = None  # statistics of a faiss file
    figures: Mapping[str, float | int] = field(default_factory=dict)  # more figures, by name, for the manifest


class TextIndex(Protocol):
    """An index that is searched by a question's text."""

    n: int  # passages held; rows are 0 … n-1

    def search(self, questions: Sequence[str], k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, best first: (q, k) float32 scores, (q, k) int64 rows.

        Larger is better; equal scores are ordered by row. If fewer than k are found, the rest is row -1 with score
        -inf.

        Raises:
            UsageError: `k` or a parameter does not fit the index.
        """
        ...


@runtime_checkable
class SkippingIndex(Protocol):
    """An index over text that skips what cannot be among the best, and can be asked not to, to be compared."""

    def every(self, questions: Sequence[str], k: int, **parameters: Any) -> Rows:
        """Return the rows that `TextIndex.search` does, having read all that could count for a question."""
        ...


class TokenIndex(Protocol):
    """An index that is searched by the token vectors of a question."""

    n: int  # passages held; rows are 0 … n-1
    dim: int  # components of a token's vector

    def search(self, questions: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, (q, l, d), by MaxSim over all passages; as `TextIndex.search`."""
        ...

    def score(self, question: Vectors, rows: Rows) -> Vectors:
        """Return the (m,) float32 MaxSim of a question, (l, d), with the passages at `rows`, (m,) in any order."""
        ...


class SparseIndex(Protocol):
    """An index that is searched by the weighted terms of a question."""

    n: int  # passages held; rows are 0 … n-1

    def search(self, questions: Vectors, k: int, **parameters: Any) -> tuple[Vectors, Rows]:
        """Return the k best rows of each question, (q, l, 2): terms and their weights; as `TextIndex.search`."""
        ...


class IndexKind(Protocol):
    """One kind of index."""

    name: ClassVar[str]  # in manifests
    represents: ClassVar[Represents]  # the type of representation that it is built over
    suffix: ClassVar[str]  # of its file
    learns: ClassVar[bool]  # whether later builds inherit its trained file
    threaded: ClassVar[bool]  # whether a shard has the same bytes with any number of threads, and so may use several
    libraries: ClassVar[tuple[str, ...]]  # packages whose versions affect its bytes
    VERSION: ClassVar[int]  # increased when the same plan and rows would give other bytes

    def takes(self, factory: str) -> bool:
        """Whether a recipe's `factory` asks for this kind."""
        ...

    def check(self, recipe: Any) -> None:
        """Check an `IndexRecipe` of this kind before any row exists.

        Raises:
            UsageError: a setting is unknown or wrong; the message names it.
        """
        ...

    def plan(
        self, recipe: Any, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> IndexPlan:
        """Choose every number that an `IndexRecipe` leaves open, for `n` rows.

        Args:
            recipe: what to build.
            n: rows, at least 1.
            width: components of a vector, or of a token's vector; terms of a vocabulary; 0 over text.
            memory: bytes that one machine has for the largest stage; None: unknown.
            part_rows: rows of the largest part.

        Raises:
            UsageError: the recipe does not fit.
            ResourceError: the build does not fit in memory.
        """
        ...

    def steady(self, recipe: Any, plan: IndexPlan, before: Mapping[str, Any]) -> IndexPlan:
        """Return the plan with numbers kept from the parent's index (`before`, its `shared()`) to allow reuse."""
        ...

    def train(self, plan: IndexPlan, rows: Sequence[Path], out: Path) -> Facts:
        """Train on all parts' rows and write the file that all workers share; the facts hold its `losses`."""
        ...

    def scatter(self, plan: IndexPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Write the piece of part `number`.

        If there are shards, the piece holds what each reads of it (`slices.write_sliced`).
        """
        ...

    def shard(self, plan: IndexPlan, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> Facts:
        """Build shard `number` of `plan.shards` and write its piece: equal slices give an equal one.

        `slices` are the shard's, in the order of the parts; parts of which it reads nothing are left out. They are
        verified, and of pieces that `scatter` wrote for this plan and this trained file.
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
    ) -> Facts:
        """Join the pieces, all given in order, into the index file."""
        ...

    def losses(self, plan: IndexPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors, (m, d) float32, lie from the trained values, by name: cells, lists, codes."""
        ...

    def fit(
        self,
        plan: IndexPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed: Sequence[tuple[Path, Sequence[Path]]],
        same: Sequence[Path],
    ) -> Fit:
        """Measure how an inherited trained file fits the rows of parts that `changed`, against their earlier rows."""
        ...

    def follow(self, plan: IndexPlan, trained: Path, rows: Sequence[Path], out: Path) -> Facts:
        """Adapt an inherited trained file to the current rows; called if `Fit.missed` requires it."""
        ...

    def open(self, files: IndexFiles, entry: Entry, *, mmap: bool = True) -> Any:
        """Open an index to search it: a `SearchIndex`, `TokenIndex`, `SparseIndex` or `TextIndex`, by what it is over.

        Raises:
            InputError: the file is missing, damaged or of another kind.
        """
        ...

    def measure(self, files: IndexFiles, entry: Entry, trial: Any) -> Measurement:
        """Measure an index with questions whose answers are known, in the form of what it is over: a `TextTrial`."""
        ...

    def check_search(self, entry: Entry, parameters: Mapping[str, Any]) -> None:
        """Check the parameters of one search, before the index is opened.

        Raises:
            UsageError: one is unknown or out of range; the message names it.
        """
        ...

    def tune(self, files: IndexFiles, entry: Entry, trial: Any, target: float) -> Tuned:
        """Return the cheapest search setting whose recall against exhaustive search is `target`."""
        ...

    def floor(self, factory: str) -> Floor:
        """Return the least recall that the gate accepts if the recipe sets none."""
        ...

    def estimate(self, plan: IndexPlan, part_rows: int | None = None) -> Estimate:
        """Return what an index costs, from its plan alone."""
        ...

    def seconds(self, plan: IndexPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Estimate the seconds that a task of a stage takes on one core, for `rows` rows of `size` bytes.

        `inherited`: from the parent there is a trained file that may fit (train), or pieces of most rows (scatter).
        """
        ...


class PlainKind(Generic[Plan]):
    """Defaults for a kind that has no shards and takes nothing over from the parent's index."""

    threaded: ClassVar[bool] = False

    @abstractmethod
    def scatter(self, plan: Plan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Write the piece of part `number`."""

    def steady(self, recipe: Any, plan: Plan, before: Mapping[str, Any]) -> Plan:
        """Return the plan unchanged."""
        return plan

    def shard(self, plan: Plan, trained: Path, slices: Iterable[bytes], number: int, out: Path) -> Facts:
        """Refuse: there are no shards, because the scattered pieces are merged directly.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{plan.factory} has no shards: merge the scattered pieces")


class UntrainedKind(PlainKind[IndexPlan]):
    """Defaults for a kind over text or weighted terms: it trains nothing, has no shards and is built part by part."""

    represents: ClassVar[Represents] = "text"
    learns: ClassVar[bool] = False
    libraries: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str]
    suffix: ClassVar[str]

    def check(self, recipe: Any) -> None:
        """Accept a recipe with the common settings; override it for further settings."""
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

    def train(self, plan: IndexPlan, rows: Sequence[Path], out: Path) -> Facts:
        """Write an empty file: nothing is trained."""
        out.write_bytes(b"")
        return {"losses": {}}

    def losses(self, plan: IndexPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return no losses: nothing is trained."""
        return {}

    def fit(
        self,
        plan: IndexPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed: Sequence[tuple[Path, Sequence[Path]]],
        same: Sequence[Path],
    ) -> Fit:
        """Return a perfect fit: nothing is trained."""
        return Fit(0, {})

    def follow(self, plan: IndexPlan, trained: Path, rows: Sequence[Path], out: Path) -> Facts:
        """Train: nothing is inherited."""
        return self.train(plan, rows, out)

    def check_search(self, entry: Entry, parameters: Mapping[str, Any]) -> None:
        """Refuse every parameter; override it if a search takes some."""
        if parameters:
            raise UsageError(f"{next(iter(parameters))} is not a search parameter of this index: it takes none")

    def tune(self, files: IndexFiles, entry: Entry, trial: Any, target: float) -> Tuned:
        """Return the entry's own search setting: `check` refuses a target."""
        return Tuned(dict(entry["search"]), 1.0)

    def floor(self, factory: str) -> Floor:
        """Return the floor of an index that loses almost nothing."""
        return FLOOR

    def estimate(self, plan: IndexPlan, part_rows: int | None = None) -> Estimate:
        """Return an estimate in which only the file grows with the corpus: 1 KB per passage."""
        size = plan.n << 10
        return Estimate(dict.fromkeys(("train", "scatter", "merge"), PROCESS), size + PROCESS, size, 2 * size)

    def seconds(self, plan: IndexPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return the seconds to read `size` bytes at 20 MB per second."""
        return 0.01 if stage == "train" else size / 2e7
