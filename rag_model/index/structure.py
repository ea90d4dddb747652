"""What every structure is: three stages, each a function of local files, so that one job builds them all.

    train(vectors)                -> one small file, the same for every shard
    shard(number) for each shard  -> one file each; independent of each other, so they run side by side
    merge(shards in order)        -> the index file

A stage returns facts that JSON can hold. Give a stage one faiss thread where its bytes must repeat; run
shards side by side instead. `VERSION` of a structure belongs into the key of whatever remembers its outputs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rag_model.index import hnsw, ivf
from rag_model.index.recipe import Facts, IndexPlan


class Structure(Protocol):
    """Builds one kind of index; a module is one."""

    VERSION: int  # raised when the same plan and vectors would give other bytes

    def reads(self, plan: IndexPlan, parts: int) -> list[tuple[int, ...]]:
        """Return, for each shard, the numbers of the parts that it reads, of `parts` in all."""
        ...

    def train(self, plan: IndexPlan, vectors: Sequence[Path], out: Path) -> Facts:
        """Learn from all parts' vectors what the shards share, and write it."""
        ...

    def shard(self, plan: IndexPlan, trained: Path, vectors: Sequence[Path], number: int, out: Path) -> Facts:
        """Build shard `number` of the vectors that `reads` named, and write it."""
        ...

    def merge(
        self, plan: IndexPlan, trained: Path, vectors: Sequence[Path], shards: Sequence[Path], out: Path
    ) -> Facts:
        """Join the shards, given in order, into one index file that plain `faiss.read_index` opens."""
        ...


STRUCTURES: Mapping[str, Structure] = {"hnsw": hnsw, "ivf": ivf, "exact": ivf}


def structure_of(plan: IndexPlan) -> Structure:
    """Return the structure that builds a plan."""
    return STRUCTURES[plan.kind]


def build(plan: IndexPlan, vectors: Sequence[Path], out: Path, workdir: Path) -> list[Facts]:
    """Run all stages here, one after another; return their facts: train, each shard, merge.

    Leaves the stages' files in `workdir`, which must exist.

    Raises:
        InputError: a vector file is missing, damaged, or not what the plan was made for.
        ResourceError: a file cannot be written, or memory ran out.
    """
    structure = structure_of(plan)
    trained = workdir / "trained"
    facts = [structure.train(plan, vectors, trained)]
    shards = []
    for number, parts in enumerate(structure.reads(plan, len(vectors))):
        shards.append(workdir / f"shard-{number:05d}")
        facts.append(structure.shard(plan, trained, [vectors[part] for part in parts], number, shards[-1]))
    return [*facts, structure.merge(plan, trained, vectors, shards, out)]
