"""Examine a snapshot: ask it sentences of its own passages, and compare each index with exact search.

What comes out feeds the gate (recall as the index is searched by default) and the report (recall against
time). A snapshot need not be published to be examined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rag_model.evaluation.gate import GateRecipe
from rag_model.evaluation.recall import Effort, Findings, measure_effort, percentile5, recall_at
from rag_model.evaluation.sampling import sample_rows, sample_sentences
from rag_model.index.engine import Rows, Vectors
from rag_model.index.search import SearchIndex
from rag_model.retrieve.dense import EXACT, QuestionEncoder, index_of
from rag_model.store.snapshot import Snapshot

_TIES = 2  # exact search goes this many times deeper than k, so that ties at the border are seen
_STEPS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the default effort: the points of a curve


@dataclass(frozen=True, slots=True)
class Examination:
    """What the indexes of a snapshot showed."""

    k: int
    findings: Mapping[str, Findings]  # by index; empty for a snapshot without passages
    curves: Mapping[str, Sequence[Effort]]  # the indexes' trade-offs, and exact search as a point of its own

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return what a manifest keeps: by index, recall@k's mean and 5th percentile."""
        return {
            name: {
                f"recall@{self.k}": round(float(found.recalls.mean()), 4),
                f"recall@{self.k}_p5": round(percentile5(found.recalls), 4),
            }
            for name, found in self.findings.items()
        }


@dataclass(frozen=True, slots=True)
class Truth:
    """The queries, and what exact search finds for them."""

    queries: Vectors  # (q, d)
    rows: Rows  # (q, >= k), best first
    scores: Vectors
    k: int


def examine(snapshot: Snapshot, encoder: QuestionEncoder, recipe: GateRecipe) -> Examination:
    """Compare each index of the snapshot with exact search, on `recipe.queries` sampled sentences.

    Reads all vectors once; memory is bounded by the queries and a block of vectors.
    """
    sampled = sample_rows(snapshot.n, recipe.queries, recipe.seed)
    if not sampled:
        return Examination(recipe.k, {}, {})
    queries = encoder.encode_questions(sample_sentences(snapshot.passages(sampled), recipe.seed))
    truth, exact = _exact(snapshot, queries, recipe.k)
    entries = snapshot.manifest.content.indexes
    findings = {name: _findings(index_of(snapshot, name), entry, truth) for name, entry in entries.items()}
    curves = {name: found.curve for name, found in findings.items()}
    return Examination(recipe.k, findings, {**curves, EXACT: (exact,)})


def _exact(snapshot: Snapshot, queries: Vectors, k: int) -> tuple[Truth, Effort]:
    """Search all vectors once, timed; it is the one search too dear to repeat."""
    index = index_of(snapshot, EXACT)
    start = perf_counter()
    scores, rows = index.search(queries, min(snapshot.n, _TIES * k))
    milliseconds = 1000 * (perf_counter() - start) / len(queries)
    return Truth(queries, rows, scores, min(k, snapshot.n)), Effort("every vector", 1.0, 1.0, milliseconds)


def _findings(index: SearchIndex, entry: Mapping[str, Any], truth: Truth) -> Findings:
    """Measure an index as it is searched by default, then with less and more effort."""
    _, rows = index.search(truth.queries, truth.k)
    recalls = recall_at(rows, truth.rows, truth.scores, truth.k)
    settings = _settings(entry["search"]) or [{}]
    return Findings(entry["factory"], recalls, tuple(_effort(index, truth, setting) for setting in settings))


def _settings(search: Mapping[str, int]) -> list[dict[str, int]]:
    """Return search settings around the default ones, from an eighth to four times their effort."""
    return [
        {name: effort}
        for name, default in search.items()
        for effort in sorted({max(1, round(default * step)) for step in _STEPS})
    ]


def _effort(index: SearchIndex, truth: Truth, setting: Mapping[str, int]) -> Effort:
    label = ", ".join(f"{name}={value}" for name, value in setting.items()) or "every vector"
    return measure_effort(
        label,
        lambda: index.search(truth.queries, truth.k, **setting)[1],
        truth.rows,
        truth.scores,
        k=truth.k,
    )
