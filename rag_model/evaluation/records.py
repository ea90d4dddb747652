"""Stored evaluations: the value of each measure for each question, and comparisons of evaluations.

The file `values.json` of an evaluation contains the ids and the digests of the questions. For each
retriever and measure it has one number per question, or null if the measure does not apply to the
question. Questions are joined by their digests, because ids may be positions in a file.
"""

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rag_model.errors import StoreError, UsageError
from rag_model.evaluation.bootstrap import estimate_difference
from rag_model.evaluation.questions import Question, digest_question
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, EvaluationMetrics, MetricValue
from rag_model.untrusted_text import parse_json

VALUES_FILE = "values.json"
ValueColumns = Mapping[str, Sequence[float | None]]  # list of one value per question, by measure


@dataclass(frozen=True, slots=True)
class MeasureValues:
    """The values of each measure for each question of an evaluation."""

    questions: tuple[str, ...]  # ids of the questions
    retrievers: Mapping[str, ValueColumns]  # values by retriever expression
    # `digest_question` of each question; empty if an earlier version of bookwheel wrote the values
    digests: tuple[str, ...] = ()

    @classmethod
    def for_questions(cls, questions: Sequence[Question], retrievers: Mapping[str, ValueColumns]) -> Self:
        """Create the values of these questions."""
        return cls(tuple(question.id for question in questions), retrievers, tuple(map(digest_question, questions)))

    def write(self, path: Path) -> None:
        """Write the values to a file."""
        fields = {"questions": self.questions, "retrievers": self.retrievers, "digests": self.digests}
        path.write_text(json.dumps(fields, ensure_ascii=False, allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the content of a file that `write` wrote.

        Raises:
            ValueError: the content does not have the format of `write`.
        """
        questions, retrievers = value["questions"], value["retrievers"]
        columns = [column for measures in retrievers.values() for column in measures.values()]
        if not all(len(column) == len(questions) and all(map(_is_number_or_none, column)) for column in columns):
            raise ValueError("a column does not have one number per question")
        digests = tuple(map(str, value.get("digests", ())))
        if digests and len(digests) != len(questions):
            raise ValueError("there is not one digest per question")
        return cls(tuple(map(str, questions)), retrievers, digests)


def read_measure_values(store: Store, manifest: EvaluationManifest) -> MeasureValues:
    """Read the values of an evaluation from the store.

    Raises:
        StoreError: the file is missing or damaged.
    """
    try:
        return MeasureValues.from_json(parse_json(store.blobs.read(manifest.content.files[VALUES_FILE])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{VALUES_FILE} of evaluation {manifest.id[:12]} in {store.url} is damaged ({error}): "
            "delete it with `expire` and evaluate again, or restore it from a copy"
        ) from error


def _is_number_or_none(value: Any) -> bool:
    return value is None or (type(value) in {int, float} and math.isfinite(value))


@dataclass(frozen=True, slots=True)
class MeasureComparison:
    """One measure in two evaluations."""

    before: MetricValue  # metric of the first evaluation
    after: MetricValue  # metric of the second evaluation
    # after minus before; it has an interval if the evaluations have questions in common
    difference: MetricValue
    n: int  # number of shared questions; if 0, there is no interval


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """Two evaluations, and a comparison of each measure that they have in common."""

    before: EvaluationManifest
    after: EvaluationManifest
    # Comparisons by retriever and measure. If the retrievers differ, the key is `BEFORE -> AFTER`.
    pairs: Mapping[str, Mapping[str, MeasureComparison]]


def compare_evaluations(store: Store, before: EvaluationManifest, after: EvaluationManifest) -> EvaluationComparison:
    """Compare two evaluations question by question.

    If each evaluation has only one retriever, these two are compared. Otherwise retrievers with
    equal expressions are compared. Questions are joined by their texts and answers. If an earlier
    version of bookwheel recorded one of the evaluations, they are joined by id, and only if both
    evaluations have the same questions. A measure of the whole question set, such as BLEU, has no
    interval.

    Raises:
        UsageError: the evaluations have no retriever or no measure in common.
        StoreError: a file of an evaluation is missing or damaged.
    """
    before_values, after_values = (read_measure_values(store, manifest) for manifest in (before, after))
    has_same_questions = before.content.subject.questions == after.content.subject.questions
    before_keys, after_keys = _list_join_keys(before_values, after_values, has_same_questions=has_same_questions)
    comparisons: dict[str, dict[str, MeasureComparison]] = {}
    for before_name, after_name in _match_retrievers(before.content.metrics, after.content.metrics):
        name = after_name if before_name == after_name else f"{before_name} -> {after_name}"
        before_metrics, after_metrics = before.content.metrics[before_name], after.content.metrics[after_name]
        comparisons[name] = {
            measure: _compare_measure(
                before_metrics[measure],
                after_metrics[measure],
                _pair_values(
                    _get_column(before_keys, before_values, before_name, measure),
                    _get_column(after_keys, after_values, after_name, measure),
                ),
            )
            for measure in after_metrics
            if measure in before_metrics
        }
    if not any(comparisons.values()):
        raise UsageError(
            f"evaluations {before.id[:12]} and {after.id[:12]} share no measure of a retriever: "
            "compare two with the same retrievers and judgements"
        )
    return EvaluationComparison(before, after, comparisons)


def _match_retrievers(before: EvaluationMetrics, after: EvaluationMetrics) -> list[tuple[str, str]]:
    if len(before) == len(after) == 1:
        return [(next(iter(before)), next(iter(after)))]
    return [(name, name) for name in after if name in before]


def _list_join_keys(
    before_values: MeasureValues, after_values: MeasureValues, *, has_same_questions: bool
) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    """Return the keys of the questions of both evaluations; equal questions have equal keys."""
    if before_values.digests and after_values.digests:
        return _number_occurrences(before_values.digests), _number_occurrences(after_values.digests)
    return (before_values.questions, after_values.questions) if has_same_questions else ((), ())


def _number_occurrences(digests: Sequence[str]) -> list[tuple[str, int]]:
    """Return each digest together with the number of times that it occurs before.

    >>> _number_occurrences(["a", "b", "a"])
    [('a', 0), ('b', 0), ('a', 1)]
    """
    counts: Counter[str] = Counter()
    numbered_digests = []
    for digest in digests:
        numbered_digests.append((digest, counts[digest]))
        counts[digest] += 1
    return numbered_digests


def _pair_values(
    before_column: Mapping[Hashable, float], after_column: Mapping[Hashable, float]
) -> list[tuple[float, float]]:
    """Return pairs of values, (before, after), for the questions that are in both evaluations."""
    return [(before_column[key], after_value) for key, after_value in after_column.items() if key in before_column]


def _get_column(
    keys: Sequence[Hashable], evaluation: MeasureValues, retriever: str, measure: str
) -> dict[Hashable, float]:
    column = evaluation.retrievers.get(retriever, {}).get(measure, ())
    return {key: value for key, value in zip(keys, column, strict=False) if value is not None}


def _compare_measure(before: MetricValue, after: MetricValue, pairs: list[tuple[float, float]]) -> MeasureComparison:
    if not pairs:
        return MeasureComparison(before, after, MetricValue(after.value - before.value), 0)
    difference = estimate_difference(
        [after_value for _, after_value in pairs], [before_value for before_value, _ in pairs]
    )
    return MeasureComparison(before, after, MetricValue(difference.value, difference.low, difference.high), len(pairs))
