"""The gate passes good snapshots and names the checks that failed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.evaluation.gate import (
    GateRecipe,
    IndexRecalls,
    QuestionFloor,
    RetrieverScore,
    SnapshotSummary,
    check_snapshot,
)
from rag_model.index.quality.results import RecallFloor

PARENT = SnapshotSummary(passages=1000, space="sha256:aa", newest_revision="2026-10-01T00:00:00Z")
FACTORIES = {"hnsw": "HNSW32", "ivfpq": "IVF64,PQ48np"}


def create_recalls(**recalls: float) -> dict[str, IndexRecalls]:
    values = {"hnsw": 0.99, "ivfpq": 0.9, **recalls}
    return {name: IndexRecalls(FACTORIES.get(name, "Flat"), np.full(256, value)) for name, value in values.items()}


def list_failed_checks(
    summary: SnapshotSummary = PARENT,
    parent: SnapshotSummary | None = PARENT,
    recipe: GateRecipe | None = None,
    **recalls: float,
) -> list[str]:
    verdict = check_snapshot(recipe or GateRecipe(), summary, create_recalls(**recalls), parent)
    names = [check.name for check in verdict.checks if not check.passed]
    assert verdict.passed is (not names)
    assert bool(verdict.reason) is bool(names)
    return names


def test_a_good_snapshot_passes_with_and_without_a_parent() -> None:
    assert list_failed_checks() == []
    assert list_failed_checks(parent=None) == []


def test_recall_fails_by_its_mean_or_its_5th_percentile() -> None:
    assert list_failed_checks(hnsw=0.94) == ["hnsw recall@20, mean"]
    recalls = np.where(np.arange(256) < 20, 0.5, 1.0)  # 8 % of the queries have a recall of 0.5; the mean is 0.96
    verdict = check_snapshot(GateRecipe(), PARENT, {"hnsw": IndexRecalls("HNSW32", recalls)}, PARENT)
    assert [check.name for check in verdict.checks if not check.passed] == ["hnsw recall@20, 5th percentile"]


def test_each_index_has_its_own_floor() -> None:
    assert list_failed_checks(ivfpq=0.8) == []
    assert list_failed_checks(hnsw=0.7) == ["hnsw recall@20, mean", "hnsw recall@20, 5th percentile"]
    recipe = GateRecipe(floors={"ivfpq": RecallFloor(0.95, 0.9)})
    assert list_failed_checks(recipe=recipe, ivfpq=0.92) == ["ivfpq recall@20, mean"]
    assert list_failed_checks(recipe=recipe, hnsw=0.94, ivfpq=0.96) == ["hnsw recall@20, mean"]  # the floor of hnsw
    assert list_failed_checks(flat=0.94) == ["flat recall@20, mean"]


@pytest.mark.parametrize("refine", ["vectors", "SQfp16", "SQ8"])
def test_reranked_codes_have_the_floor_of_a_graph(refine: str) -> None:
    refined_floor, code_floor = (
        GateRecipe().floor("ivfpq", factory) for factory in (f"IVF64,PQ48np,Refine({refine})", "IVF,PQ")
    )
    assert refined_floor == GateRecipe().floor("hnsw", "HNSW32") == RecallFloor(0.95, 0.80)
    assert code_floor == RecallFloor(0.60, 0.30)


@pytest.mark.parametrize("settings", [{"k": 0}, {"queries": 0}, {"max_passage_loss": 10.0}])
def test_invalid_thresholds_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GateRecipe(**settings)


@pytest.mark.parametrize(("passages", "names"), [(900, []), (899, ["passages lost since the parent"]), (5000, [])])
def test_up_to_a_tenth_of_the_passages_may_be_lost(passages: int, names: list[str]) -> None:
    assert list_failed_checks(replace(PARENT, passages=passages)) == names


def test_an_empty_snapshot_never_passes() -> None:
    assert list_failed_checks(replace(PARENT, passages=0), parent=None) == ["passages"]


def test_another_space_is_refused_unless_allowed() -> None:
    other_space = replace(PARENT, space="sha256:bb")
    assert list_failed_checks(other_space) == ["encoder space"]
    assert list_failed_checks(other_space, recipe=GateRecipe(same_space=False)) == []
    assert list_failed_checks(other_space, parent=None) == []


def test_an_older_dump_is_refused() -> None:
    assert list_failed_checks(replace(PARENT, newest_revision="2026-09-30T23:59:59Z")) == ["newest revision"]
    assert list_failed_checks(replace(PARENT, newest_revision="2026-10-01T00:00:01Z")) == []
    verdict = check_snapshot(GateRecipe(), replace(PARENT, newest_revision=""), create_recalls(), PARENT)
    assert "publish them under another ref), wanted 2026-10-01T00:00:00Z or later" in verdict.reason


def test_the_reason_has_the_observed_and_the_required_value() -> None:
    verdict = check_snapshot(GateRecipe(), replace(PARENT, passages=100), create_recalls(), PARENT)
    assert verdict.reason == "passages lost since the parent is 90.0% (1,000 to 100), wanted at most 10.0%"


@pytest.mark.parametrize(("floor", "passed"), [(0.5, True), (0.51, False)])
def test_a_retriever_may_have_a_floor_on_questions(floor: float, passed: bool) -> None:
    recipe = GateRecipe(questions={"dev": QuestionFloor("dev.jsonl", floor, "Success@5")})
    scores = {"dev": RetrieverScore("rrf(hnsw, ivfpq)", estimate_mean([1.0, 0.0, 1.0, 0.0]))}
    verdict = check_snapshot(recipe, PARENT, create_recalls(), PARENT, scores)
    assert verdict.passed is passed
    (check,) = [check for check in verdict.checks if "questions dev" in check.name]
    assert check.name == "Success@5 of rrf(hnsw, ivfpq) on the questions dev"
    assert check.observed == "0.500 [0.000, 1.000]"
    assert check.wanted == f"at least {floor:.3f}"
