"""What a corpus too large for this machine would take: Wikipedia's 21 million passages of 768 dimensions.

Nothing here is measured at that size, and programs that print it say so. The cells are as large as in the build that
the figures come from, so a vector costs a shard as much there as here but for its dimensions; the stages whose cost a
vector grows with the number of cells are run with that number.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alone import Spent, alone
from hnsw_builds import Build

from rag_model.index.kind import get_kind
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve

WIKIPEDIA, BERT = 21_015_324, 768  # DPR's passages, and their dimensions
ASSUMPTION = (
    "cells as large as here, one worker a cell and a part; a vector costs every stage as much more as it has more "
    "dimensions (an upper bound: part of each stage does not depend on them); k-means and assignment run here with "
    "as many cells; the merge grows with n"
)


def extrapolated(
    recipe: IndexRecipe, plan: VectorPlan, parts: Sequence[Path], build: Build, folder: Path
) -> dict[str, Any]:
    """Return hours of CPU by stage and of the critical path, from a build of `plan` and its parts."""
    cells, more, wider = round(WIKIPEDIA * plan.cells / plan.n), WIKIPEDIA / plan.n, BERT / plan.d
    many = resolve(replace(recipe, cells=cells), plan.n, plan.d)
    structure, trained = get_kind(many.kind), folder / "many-trained"
    train = alone(structure.train, many, parts, trained)
    scatter = alone(structure.scatter, many, trained, parts[0], 0, folder / "many-scattered")
    lacking = cells / many.cells  # 1, where n allows as many cells as that
    shards, (merge,) = build.stages["shard"], build.stages["merge"]
    hours = {
        "train": train.cpu_seconds * lacking**2 * wider / 3600,
        "scatter": scatter.cpu_seconds * lacking * plan.n / _rows(scatter) * more * wider / 3600,
        "shard": sum(spent.cpu_seconds for spent in shards) * more * wider / 3600,
        "merge": merge.cpu_seconds * more * wider / 3600,
    }
    largest = max(spent.cpu_seconds for spent in shards) * wider / 3600
    return {
        "extrapolated": ASSUMPTION,
        "n": WIKIPEDIA,
        "dim": BERT,
        "factory": plan.factory,
        "cells": cells,
        "cells_measured": many.cells,
        "cpu_hours": {name: round(value, 2) for name, value in hours.items()},
        "critical_hours": round(hours["train"] + hours["scatter"] / cells + largest + hours["merge"], 2),
    }


def _rows(scatter: Spent) -> int:
    rows: int = scatter.value["rows"]
    return rows
