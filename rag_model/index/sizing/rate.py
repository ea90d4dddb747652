"""Estimate the time of a build, in seconds of one core: each kind says how long its stages take.

The kinds' rates were measured on one processor with AVX512; others are up to twice as slow, and real vectors differ.
"""

from rag_model.index.kind import Represents
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.impact import ROW_BYTES
from rag_model.index.registry import kind_named
from rag_model.index.tokens.kind import TOKENS

_TEXT = 240  # bytes of a passage of 100 words, in a compressed Parquet file


def row_bytes(represents: Represents, d: int) -> int:
    """Estimate the bytes of a passage's row in a file.

    A row is its text, weighted terms, or vectors of `d` components in float16.
    """
    return {"text": _TEXT, "sparse": ROW_BYTES, "vectors": 2 * d, "tokens": 2 * d * TOKENS}[represents]


def stage_seconds(plan: IndexPlan, d: int = 0) -> dict[str, float]:
    """Return the seconds of one core by stage, for vectors of `d` components; 0 over text."""
    kind, tasks = kind_named(plan.kind), {"train": 1, "scatter": 1, "shard": plan.shards, "merge": 1}
    size = plan.n * row_bytes(kind.represents, d)
    return {stage: n * kind.seconds(plan, stage, plan.n // n, size) for stage, n in tasks.items() if n}
