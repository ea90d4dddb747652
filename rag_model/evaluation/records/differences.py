"""One evaluation beside another: figures side by side, and the difference question by question with its interval."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import difference_interval
from rag_model.evaluation.records.values import Values, read_values
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, Figure, Figures


@dataclass(frozen=True, slots=True)
class Pair:
    """One measure in two evaluations."""

    before: Figure
    after: Figure
    difference: Figure  # after minus before; an interval where both have a value for some of the same questions
    n: int  # questions that the interval rests on; 0: there is none


@dataclass(frozen=True, slots=True)
class Beside:
    """Two evaluations: what both measured, by retriever and measure."""

    before: EvaluationManifest
    after: EvaluationManifest
    pairs: Mapping[str, Mapping[str, Pair]]  # the retrievers' names are those of `after`, with `before`'s if it differs


def beside(store: Store, before: EvaluationManifest, after: EvaluationManifest) -> Beside:
    """Compare two evaluations: of one retriever each whatever they are, of several those that both asked.

    Questions are joined by id. A measure of the whole set, such as BLEU, has no interval.

    Raises:
        UsageError: they share no retriever or no measure.
        StoreError: a file of theirs is missing or damaged.
    """
    old, new = (read_values(store, one) for one in (before, after))
    found: dict[str, dict[str, Pair]] = {}
    for earlier, later in _retrievers(before.content.figures, after.content.figures):
        name = later if earlier == later else f"{earlier} -> {later}"
        known, now = before.content.figures[earlier], after.content.figures[later]
        found[name] = {
            measure: _pair(known[measure], now[measure], _paired(old, earlier, new, later, measure))
            for measure in now
            if measure in known
        }
    if not any(found.values()):
        raise UsageError(
            f"evaluations {before.id[:12]} and {after.id[:12]} have no measure of one retriever in common: compare two "
            "that were asked and judged alike"
        )
    return Beside(before, after, found)


def _retrievers(before: Figures, after: Figures) -> list[tuple[str, str]]:
    if len(before) == len(after) == 1:
        return [(next(iter(before)), next(iter(after)))]
    return [(name, name) for name in after if name in before]


def _paired(old: Values, earlier: str, new: Values, later: str, measure: str) -> list[tuple[float, float]]:
    """Return the values of the questions that both measured: before and after."""
    known = dict(_column(old, earlier, measure))
    return [(known[question], value) for question, value in _column(new, later, measure) if question in known]


def _column(values: Values, retriever: str, measure: str) -> Iterator[tuple[str, float]]:
    column = values.retrievers.get(retriever, {}).get(measure, ())
    yield from ((name, one) for name, one in zip(values.questions, column, strict=False) if one is not None)


def _pair(before: Figure, after: Figure, both: list[tuple[float, float]]) -> Pair:
    if not both:
        return Pair(before, after, Figure(after.value - before.value), 0)
    lost = difference_interval([new for _, new in both], [old for old, _ in both])
    return Pair(before, after, Figure(lost.value, lost.low, lost.high), len(both))
