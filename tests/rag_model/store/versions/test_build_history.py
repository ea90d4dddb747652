"""The build history gives forecasts of cost, and warnings if a build costs more or recalls less."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from rag_model.store.versions.build_history import (
    CostForecast,
    PastBuild,
    compute_trends,
    forecast_build,
    format_history,
    list_warnings,
    read_history,
)
from rag_model.store.versions.manifest import Content, Manifest

START = datetime(2026, 1, 1, tzinfo=UTC)


def make_manifest(number: int, parent: Manifest | None = None, minutes: float = 1.0, **provenance: Any) -> Manifest:
    created_at = (START + timedelta(minutes=minutes * number)).isoformat(timespec="seconds")
    fields = {"created_at": created_at, "embedded": number, "seconds": {"chunk": 1.0}, "cpu": {"chunk": 2.0}}
    metrics = {"hnsw": {"recall@20": 0.97, "recall@20_p5": 0.8, "degree": 30.5, "distances": 900, "repaired": 3}}
    content = Content({"kind": "wiki", "number": number}, (), {})
    return Manifest(content, metrics, provenance={**fields, **provenance, "history": format_history(parent)})


def make_builds(values: Sequence[float], measure: str, changed: Sequence[int] = ()) -> list[PastBuild]:
    """Return builds in which one measure varies; for the measure "cost", the CPU seconds."""
    builds = []
    for number, value in enumerate(values):
        indexes = {"hnsw": {"recall": 0.97, "distances": 900.0} | ({measure: value} if measure != "cost" else {})}
        cpu = {"chunk": value / 4, "embed": 3 * value / 4} if measure == "cost" else {"chunk": 1.0}
        n_changed = changed[number] if changed else 100
        builds.append(PastBuild(f"{number}", "", "same", 1000, n_changed, {"chunk": 9.0}, cpu, indexes))
    return builds


def test_history_keeps_recent_builds_and_a_few_of_past_years() -> None:
    manifest = make_manifest(0)
    assert [build.snapshot for build in read_history(manifest)] == [manifest.id]
    for number in range(1, 600):
        manifest = make_manifest(number, manifest)
    history = read_history(manifest)
    assert len(history) == 20
    assert history[-1] == PastBuild.from_manifest(manifest)
    assert history[-1].indexes == {"hnsw": {"recall": 0.97, "degree": 30.5, "distances": 900}}
    numbers = [build.changed for build in history]
    assert numbers[0] == 0
    assert numbers[-8:] == [*range(592, 600)]
    ages = [599 - (number or 0) for number in numbers[:-8]]
    assert all(age <= 3 * next_age for age, next_age in pairwise(ages)), ages
    assert read_history(replace(manifest, provenance=manifest.provenance | {"history": None})) == history[-1:]


@pytest.mark.parametrize("rows", [[None, 7, "x"], [{"seconds": {"a": math.nan, "b": "c", "d": -1}, "changed": True}]])
def test_invalid_history_has_no_values(rows: Any) -> None:
    manifest = replace(make_manifest(1), provenance={"history": rows, "created_at": 7})
    *past_builds, own_build = read_history(manifest)
    assert past_builds == [PastBuild("", "", "", 0, None)] * len(rows)
    assert list_warnings([*past_builds, own_build]) == []
    assert len(format_history(manifest)) == len(rows) + 1


def test_records_round_trip_through_json() -> None:
    for build in make_builds([1.0, 2.0], "cost"):
        assert PastBuild.from_json(asdict(build)) == build


@pytest.mark.parametrize("seed", range(20))
def test_cost_fit_equals_non_negative_least_squares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    changed = rng.integers(0, 1000, 9)
    costs = np.abs(rng.normal(5, 20, 9) + rng.normal(0, 0.1) * changed)
    (base, per_passage), _ = nnls(np.column_stack([np.ones(9), changed]), costs)
    fit = CostForecast.fit([*zip(changed.tolist(), costs.tolist(), strict=True)])
    assert (fit.base, fit.per_passage) == pytest.approx((base, per_passage), abs=1e-6)


def test_forecast_has_all_stages() -> None:
    builds = make_builds([4.0, 5.0, 6.0], "cost", [0, 100, 200])
    forecast = forecast_build([replace(builds[0], settings="other", cpu={"chunk": 99.0}), *builds], 400)
    assert (forecast["builds"], forecast["changed"]) == (3, 400)
    assert forecast["stages"]["chunk"] == {"seconds": 9.0, "cpu": 2.0, "per_passage": {"seconds": 0.0, "cpu": 0.0025}}
    cpu_seconds = forecast_build(make_builds([8.0], "cost", [400]), 100)["stages"]["chunk"]["cpu"]
    assert cpu_seconds == pytest.approx(0.5), "from one build no constant cost can be estimated"
    assert forecast_build([], 5) == forecast_build([replace(builds[0], changed=None)], 5) == {}


STEADY = [0.970, 0.972, 0.969, 0.971, 0.968, 0.970, 0.971, 0.969]
DECLINES: dict[str, tuple[str, list[float], str]] = {
    "recall falls": ("recall", [*STEADY, 0.955, 0.95, 0.951], "the recall of hnsw is 0.951 in the last builds and was"),
    "recall falls slowly": ("recall", [0.98 - 0.002 * i for i in range(20)], "build its graphs again"),
    "distances rise": ("distances", [900.0] * 8 + [1400, 1450, 1500], "computes 1,450 distances in the last builds"),
    "cost rises": ("cost", [4.0] * 8 + [9, 10, 11], "took 2.5 times as long as earlier ones"),
}
NORMAL: dict[str, tuple[str, list[float]]] = {
    "steady recall": ("recall", STEADY),
    "recall rises": ("recall", [*STEADY, 0.985, 0.99, 0.991]),
    "one outlier": ("recall", [*STEADY, 0.97, 0.90, 0.97]),
    "recall has recovered": ("recall", [*STEADY, 0.90, 0.90, 0.90, *STEADY]),
    "too few builds": ("recall", [0.97, 0.97, 0.97, 0.9, 0.9, 0.9]),
    "fewer distances": ("distances", [900.0] * 8 + [400] * 3),
    "one slow build": ("cost", [4.0] * 8 + [4, 40, 4]),
    "cost falls": ("cost", [4.0] * 8 + [1, 1, 1]),
}


@pytest.mark.parametrize(("measure", "values", "sentence"), DECLINES.values(), ids=DECLINES)
def test_decline_gives_a_warning(measure: str, values: list[float], sentence: str) -> None:
    (warning,) = list_warnings(make_builds(values, measure))
    assert sentence in warning


@pytest.mark.parametrize(("measure", "values"), NORMAL.values(), ids=NORMAL)
def test_normal_variation_gives_no_warning(measure: str, values: list[float]) -> None:
    assert list_warnings(make_builds(values, measure)) == []


def test_cost_is_compared_with_the_forecast_for_the_changed_passages() -> None:
    changed = [100_000, 100, 900, 300, 500, 1_000, 40, 20_000, 25_000, 15_000]
    costs = [3 + 0.001 * n for n in changed]
    assert list_warnings(make_builds(costs, "cost", changed)) == []
    (cost, *_) = compute_trends(make_builds([*costs[:-3], 70, 75, 60], "cost", changed))
    assert cost.ratio == pytest.approx(70 / 23)
    assert cost.warning
    far_changed = [*changed[1:7], 90_000, 90_000, 90_000]  # no earlier build changed nearly as many passages
    assert list_warnings(make_builds([3.0] * 6 + [90.0] * 3, "cost", far_changed)) == []
    slower = make_builds([4.0] * 8 + [10.0] * 3, "cost")
    without_cpu = [replace(slower[0], cpu={}), *slower[1:]]
    assert list_warnings(without_cpu) == [], "without CPU seconds, wall seconds are compared, and these are equal"


def test_builds_with_other_settings_are_not_compared() -> None:
    builds = make_builds([*STEADY, 0.9, 0.9, 0.9], "recall")
    assert list_warnings([replace(build, settings=f"{i > 7}") for i, build in enumerate(builds)]) == []
