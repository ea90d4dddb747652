"""Comparisons of two evaluations have the bootstrap's paired differences, and name measures without pairs."""

import json
from pathlib import Path

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.evaluation.bootstrap import estimate_difference
from rag_model.evaluation.gate import ReleaseCriteria, check_release
from rag_model.evaluation.questions import digest_questions, read_questions
from rag_model.evaluation.records import (
    VALUES_FILE,
    MeasureComparison,
    MeasureValues,
    ValueColumns,
    compare_evaluations,
    read_measure_values,
)
from rag_model.store import Content, Manifest, Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, EvaluationSubject, MetricValue
from rag_model.store.versions.evaluations import record_evaluation

QUESTIONS = f"sha256:{'0' * 64}"
BEFORE = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
AFTER = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]


def record_values(
    store: Store,
    folder: Path,
    retrievers: dict[str, ValueColumns],
    ids: str = "abcdef",
    questions: str = QUESTIONS,
    values: MeasureValues | None = None,
    **k: int,
) -> EvaluationManifest:
    snapshot = store.snapshots.publish(Manifest(Content({"kind": "wiki"}, (), {})))
    metrics = {
        name: {measure: _mean(column) for measure, column in columns.items()} for name, columns in retrievers.items()
    }
    (values or MeasureValues(tuple(ids), retrievers)).write(folder / VALUES_FILE)
    record = record_evaluation(
        store, EvaluationSubject(snapshot, "", questions, k), metrics, {VALUES_FILE: folder / VALUES_FILE}, {}
    )
    return store.evaluations.get(record.evaluation)


def _mean(column: list[float | None]) -> MetricValue:  # type: ignore[misc]
    values = [value for value in column if value is not None]
    return MetricValue(sum(values) / len(values))


def test_differences_are_paired_by_question(store: Store, tmp_path: Path) -> None:
    earlier = record_values(
        store, tmp_path, {"hnsw": {"Success@20": BEFORE, "EM": [None, 0.0, 1.0, None, 1.0, 0.0]}}, k=1
    )
    later = record_values(store, tmp_path, {"exact": {"Success@20": AFTER[::-1], "EM": [1.0] * 6}}, "fedcba", k=2)
    (measures,) = compare_evaluations(store, earlier, later).pairs.values()
    expected = estimate_difference(AFTER[::-1], BEFORE[::-1])  # joined by id, in the order of the later evaluation
    assert measures["Success@20"].difference == MetricValue(expected.value, expected.low, expected.high)
    assert (measures["Success@20"].n, measures["EM"].n) == (6, 4)
    assert measures["EM"].difference.value == pytest.approx(0.5)
    assert list(compare_evaluations(store, earlier, later).pairs) == ["hnsw -> exact"]


def test_only_retrievers_of_both_evaluations_are_compared(store: Store, tmp_path: Path) -> None:
    earlier = record_values(store, tmp_path, {"hnsw": {"R": BEFORE}, "bm25": {"R": BEFORE}}, k=1)
    later = record_values(store, tmp_path, {"exact": {"R": AFTER}, "bm25": {"R": AFTER}}, k=2)
    assert list(compare_evaluations(store, earlier, later).pairs) == ["bm25"]


def test_other_questions_and_measures_of_a_set_have_no_interval(store: Store, tmp_path: Path) -> None:
    earlier = record_values(store, tmp_path, {"hnsw": {"R": BEFORE}}, k=1)
    later = record_values(store, tmp_path, {"hnsw": {"R": AFTER}}, "uvwxyz", k=2)
    pair = compare_evaluations(store, earlier, later).pairs["hnsw"]["R"]
    assert (pair.n, pair.difference.low, pair.difference.value) == (0, None, 0.0)
    without_shared_measure = record_values(store, tmp_path, {"hnsw": {"EM": AFTER}}, k=3)
    with pytest.raises(UsageError, match="share no measure of a retriever"):
        compare_evaluations(store, earlier, without_shared_measure)


def record_file(store: Store, folder: Path, lines: list[str], columns: ValueColumns) -> EvaluationManifest:
    """Record an evaluation of the questions in a file of DPR's format."""
    (folder / "questions.csv").write_text("".join(f"{line}\n" for line in lines))
    question_set = read_questions(folder / "questions.csv")
    values = MeasureValues.for_questions(question_set.questions, {"hnsw": columns})
    return record_values(store, folder, {"hnsw": columns}, questions=digest_questions(question_set), values=values)


def test_questions_are_joined_by_text_and_answers(store: Store, tmp_path: Path) -> None:
    lines = [f"what is {n // 2}?\t['{n // 2}']" for n in range(40)]  # each question occurs twice
    column = [float(n % 3 > 0) for n in range(40)]
    before = record_file(store, tmp_path, lines, {"R": column})
    after = record_file(store, tmp_path, ["who?\t['he']", *lines], {"R": [1.0, *column]})
    pair = compare_evaluations(store, before, after).pairs["hnsw"]["R"]
    assert (pair.n, pair.difference) == (40, MetricValue(0.0, 0.0, 0.0))
    others = record_file(store, tmp_path, [line.replace("what", "who") for line in lines], {"R": column})
    pair = compare_evaluations(store, before, others).pairs["hnsw"]["R"]
    assert (pair.n, pair.difference) == (0, MetricValue(0.0))


def test_values_without_digests_are_joined_by_id_for_equal_question_sets(store: Store, tmp_path: Path) -> None:
    before = record_values(store, tmp_path, {"hnsw": {"R": BEFORE}}, k=1)
    after, others = (
        record_values(store, tmp_path, {"hnsw": {"R": AFTER}}, questions=questions, k=2)
        for questions in (QUESTIONS, f"sha256:{'1' * 64}")
    )
    comparisons = [compare_evaluations(store, before, each).pairs["hnsw"]["R"] for each in (after, others)]
    assert [(pair.n, pair.difference.low is None) for pair in comparisons] == [(6, False), (0, True)]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "{",
        '{"questions": ["a"], "retrievers": {"hnsw": {"R": [1, 2]}}}',
        '{"questions": ["a"], "retrievers": {"hnsw": {"R": ["x"]}}}',
        '{"questions": ["a"], "retrievers": {"hnsw": [1]}}',
        '{"questions": ["a"], "retrievers": {"hnsw": {"R": [1]}}, "digests": ["0", "1"]}',
        '{"questions": 3, "retrievers": {"hnsw": {"R": [1]}}}',
    ],
)
def test_damaged_values_are_refused(store: Store, tmp_path: Path, text: str) -> None:
    manifest = record_values(store, tmp_path, {"hnsw": {"R": BEFORE}}, k=1)
    assert read_measure_values(store, manifest).questions == tuple("abcdef")
    path = tmp_path / VALUES_FILE
    path.write_text(text)
    subject = EvaluationSubject(manifest.content.subject.snapshot, "", QUESTIONS, {"k": 9})
    evaluation_id = record_evaluation(store, subject, {}, {VALUES_FILE: path}, {}).evaluation
    with pytest.raises(StoreError, match=r"values.json of evaluation .* is damaged"):
        read_measure_values(store, store.evaluations.get(evaluation_id))


METRICS = {"Success@20": MetricValue(0.6, 0.5, 0.7), "BLEU-4": MetricValue(0.2)}


def create_difference(value: float, low: float | None) -> dict[str, MeasureComparison]:
    return {
        "Success@20": MeasureComparison(
            MetricValue(0.6), MetricValue(0.6 + value), MetricValue(value, low, None if low is None else value), 3
        )
    }


@pytest.mark.parametrize(
    ("criteria", "pairs", "passed"),
    [
        (ReleaseCriteria(), None, True),  # a first release
        (ReleaseCriteria({"Success@20": 0.6}), None, True),  # a floor includes its own value
        (ReleaseCriteria({"Success@20": 0.61}), None, False),
        (ReleaseCriteria(), create_difference(-0.01, -0.02), True),  # the end of the interval may lie on the bound
        (ReleaseCriteria(), create_difference(-0.01, -0.021), False),
        (ReleaseCriteria(), create_difference(0.05, -0.03), False),  # the mean is better, but it may be worse
        (ReleaseCriteria(tolerance=None), create_difference(-0.9, -1.0), True),
        (ReleaseCriteria(tolerance=0.0), create_difference(0.0, 0.0), True),  # equal answers
        (ReleaseCriteria(), create_difference(-0.03, None), False),  # compared by its value, without an interval
        (ReleaseCriteria(), create_difference(-0.01, None), True),
    ],
)
def test_release_criteria_accept_or_refuse_a_difference(
    criteria: ReleaseCriteria, pairs: dict[str, MeasureComparison] | None, passed: bool
) -> None:
    verdict = check_release(criteria, METRICS, pairs, "Success@20")
    assert verdict.passed == passed
    assert bool(verdict.reason) != passed


def test_zero_has_no_minus_sign() -> None:
    verdict = check_release(ReleaseCriteria(tolerance=0.0), METRICS, create_difference(-0.0, -0.0001), "Success@20")
    assert "+0.000 [+0.000, +0.000]" in verdict.reason
    assert "a lower bound of +0.000 or more" in verdict.reason


def test_a_collapse_is_refused_whatever_the_metrics() -> None:
    verdict = check_release(ReleaseCriteria(), METRICS, None, "Success@20", "retrieval has collapsed")
    assert verdict.reason == "use of passages is retrieval has collapsed, wanted no collapse"


def test_a_withdrawn_snapshot_is_refused() -> None:
    verdict = check_release(
        ReleaseCriteria(), METRICS, create_difference(0.1, 0.1), "Success@20", withdrawn_version="latest@2"
    )
    assert verdict.reason == (
        "the candidate is a snapshot that the ref left after latest@2, wanted a snapshot that the ref never left"
    )


@pytest.mark.parametrize("criteria", [ReleaseCriteria({"EM": 0.1}), ReleaseCriteria(measures=("EM",))])
def test_a_measure_that_was_not_measured_is_named(criteria: ReleaseCriteria) -> None:
    with pytest.raises(UsageError, match="'EM' was not measured: choose from Success@20"):
        check_release(criteria, METRICS, create_difference(0.0, 0.0), "Success@20")


@pytest.mark.parametrize("settings", [{"floors": {"EM": 2.0}}, {"tolerance": 1.5}, {"tolerance": -0.1}])
def test_shares_outside_of_0_to_1_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="from 0 to 1"):
        ReleaseCriteria(**settings)  # type: ignore[arg-type]


def test_values_are_json(tmp_path: Path) -> None:
    MeasureValues(("a",), {"hnsw": {"R": [0.5]}}).write(tmp_path / VALUES_FILE)
    assert json.loads((tmp_path / VALUES_FILE).read_text()) == {
        "questions": ["a"],
        "retrievers": {"hnsw": {"R": [0.5]}},
        "digests": [],
    }
