"""Run all stages of an index build in this process, one after another."""

from collections.abc import Sequence
from pathlib import Path

from rag_model.index.files.pieces import Opener, opener
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.registry import kind_named


def build(plan: IndexPlan, rows: Sequence[Path], out: Path, workdir: Path) -> dict[str, list[Facts]]:
    """Build an index file of the parts' row files; return the stages' facts by stage.

    Leaves the stages' files in `workdir`, which must exist.

    Raises:
        InputError: a row file is missing, damaged, or does not match the plan.
        ResourceError: a file cannot be written, or memory ran out.
    """
    kind, trained = kind_named(plan.kind), workdir / "trained"
    facts: dict[str, list[Facts]] = {"train": [kind.train(plan, rows, trained)], "scatter": [], "shard": []}
    scattered: list[Opener] = []
    for number, path in enumerate(rows):
        piece = workdir / f"scattered-{number:05d}"
        facts["scatter"].append(kind.scatter(plan, trained, path, number, piece))
        scattered.append(opener(piece))
    shards: list[Opener] = []
    for number in range(plan.shards):
        piece = workdir / f"shard-{number:05d}"
        facts["shard"].append(kind.shard(plan, trained, scattered, number, piece))
        shards.append(opener(piece))
    return facts | {"merge": [kind.merge(plan, trained, rows, scattered, shards, out)]}
