"""What every structure is: four stages, each a function of files, so that one job builds them all.

    train(vectors)                     -> one small file, the same for every worker
    scatter(vectors of one part)       -> one piece a part: its vectors, or their codes, sorted by cell or list
    shard(scattered, number)           -> one piece a cell: a graph over the cell's slices of every part
    merge(scattered, shards, vectors)  -> the index file

Lists have no shards of their own: what is scattered is what merges. A stage returns facts that JSON can hold. Give a
stage one faiss thread where its bytes must repeat; run parts and shards side by side instead. `VERSION` of a structure
belongs into the key of whatever remembers its outputs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rag_model.index.files.engine import Vectors
from rag_model.index.files.pieces import Opener, opener
from rag_model.index.graphs import hnsw
from rag_model.index.lists import ivf
from rag_model.index.recipe import Facts, IndexPlan


class Structure(Protocol):
    """Builds one kind of index; a module is one."""

    VERSION: int  # raised when the same plan and vectors would give other bytes

    def train(self, plan: IndexPlan, vectors: Sequence[Path], out: Path) -> Facts:
        """Learn from a sample of all parts' vectors what the workers share, and write it."""
        ...

    def losses(self, plan: IndexPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far vectors, (m, d) float32, lie from what was learnt, by what it is: cells, lists, codes.

        `train` says the same, as `losses`, of those that it learns from.
        """
        ...

    def scatter(self, plan: IndexPlan, trained: Path, vectors: Path, number: int, out: Path) -> Facts:
        """Sort the vectors of part `number` by cell or list, and write the piece.

        Where there are shards, the facts' `cells` are the rows that go to each of them, and `slices` the digests of
        all that it reads of this piece: shards are equal whose slices are.
        """
        ...

    def shard(self, plan: IndexPlan, trained: Path, scattered: Sequence[Opener], number: int, out: Path) -> Facts:
        """Build shard `number` of `plan.shards` from its slices of all parts, given in order, and write the piece."""
        ...

    def merge(
        self,
        plan: IndexPlan,
        trained: Path,
        vectors: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> Facts:
        """Join the pieces, all given in order, into one index file that plain `faiss.read_index` opens."""
        ...


STRUCTURES: Mapping[str, Structure] = {"hnsw": hnsw, "ivf": ivf, "exact": ivf}


def structure_of(plan: IndexPlan) -> Structure:
    """Return the structure that builds a plan."""
    return STRUCTURES[plan.kind]


def build(plan: IndexPlan, vectors: Sequence[Path], out: Path, workdir: Path) -> dict[str, list[Facts]]:
    """Run all stages here, one after another; return their facts by stage.

    Leaves the stages' files in `workdir`, which must exist.

    Raises:
        InputError: a vector file is missing, damaged, or not what the plan was made for.
        ResourceError: a file cannot be written, or memory ran out.
    """
    structure, trained = structure_of(plan), workdir / "trained"
    facts: dict[str, list[Facts]] = {"train": [structure.train(plan, vectors, trained)], "scatter": [], "shard": []}
    scattered: list[Opener] = []
    for number, path in enumerate(vectors):
        piece = workdir / f"scattered-{number:05d}"
        facts["scatter"].append(structure.scatter(plan, trained, path, number, piece))
        scattered.append(opener(piece))
    shards: list[Opener] = []
    for number in range(plan.shards):
        piece = workdir / f"shard-{number:05d}"
        facts["shard"].append(structure.shard(plan, trained, scattered, number, piece))
        shards.append(opener(piece))
    return facts | {"merge": [structure.merge(plan, trained, vectors, scattered, shards, out)]}
