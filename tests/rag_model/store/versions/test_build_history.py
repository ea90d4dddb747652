"""The history of the last builds: its records, its forecasts, and the alarms for values outside the band."""

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
    """Return builds in which one value varies; of a cost, the CPU time."""
    builds = []
    for number, value in enumerate(values):
        indexes = {"hnsw": {"recall": 0.97, "distances": 900.0} | ({measure: value} if measure != "cost" else {})}
        cpu = {"chunk": value / 4, "embed": 3 * value / 4} if measure == "cost" else {"chunk": 1.0}
        n_changed = changed[number] if changed else 100
        builds.append(PastBuild(f"{number}", "", "same", 1000, n_changed, {"chunk": 9.0}, cpu, indexes))
    return builds


def test_a_manifest_has_the_builds_before_it_and_those_of_years_stay() -> None:
    manifest = make_manifest(0)
    assert [build.snapshot for build in read_history(manifest)] == [manifest.id]
    for number in range(1, 3000):
        manifest = make_manifest(number, manifest)
    history = read_history(manifest)
    assert len(history) == 20
    assert history[-1] == PastBuild.from_manifest(manifest)
    assert history[-1].indexes == {"hnsw": {"recall": 0.97, "degree": 30.5, "distances": 900}}
    numbers = [build.changed for build in history]
    assert numbers[0] == 0
    assert numbers[-8:] == [*range(2992, 3000)]
    ages = [2999 - (number or 0) for number in numbers[:-8]]
    assert all(age <= 3 * next_age for age, next_age in pairwise(ages)), ages
    assert read_history(replace(manifest, provenance=manifest.provenance | {"history": None})) == history[-1:]


@pytest.mark.parametrize("rows", [[None, 7, "x"], [{"seconds": {"a": math.nan, "b": "c", "d": -1}, "changed": True}]])
def test_a_hostile_history_has_no_values(rows: Any) -> None:
    manifest = replace(make_manifest(1), provenance={"history": rows, "created_at": 7})
    *others, own = read_history(manifest)
    assert others == [PastBuild("", "", "", 0, None)] * len(rows)
    assert list_warnings([*others, own]) == []
    assert len(format_history(manifest)) == len(rows) + 1


def test_records_survive_json() -> None:
    for build in make_builds([1.0, 2.0], "cost"):
        assert PastBuild.from_json(asdict(build)) == build


@pytest.mark.parametrize("seed", range(20))
def test_costs_are_fitted_like_non_negative_least_squares(seed: int) -> None:
    draw = np.random.default_rng(seed)
    changed = draw.integers(0, 1000, 9)
    costs = np.abs(draw.normal(5, 20, 9) + draw.normal(0, 0.1) * changed)
    (base, per_passage), _ = nnls(np.column_stack([np.ones(9), changed]), costs)
    fit = CostForecast.fit([*zip(changed.tolist(), costs.tolist(), strict=True)])
    assert (fit.base, fit.per_passage) == pytest.approx((base, per_passage), abs=1e-6)


def test_the_forecast_of_a_build_has_its_stages() -> None:
    builds = make_builds([4.0, 5.0, 6.0], "cost", [0, 100, 200])
    forecast = forecast_build([replace(builds[0], settings="other", cpu={"chunk": 99.0}), *builds], 400)
    assert (forecast["builds"], forecast["changed"]) == (3, 400)
    assert forecast["stages"]["chunk"] == {"seconds": 9.0, "cpu": 2.0, "per_passage": {"seconds": 0.0, "cpu": 0.0025}}
    one = forecast_build(make_builds([8.0], "cost", [400]), 100)["stages"]["chunk"]["cpu"]
    assert one == pytest.approx(0.5), "one build tells no constant part"
    assert forecast_build([], 5) == forecast_build([replace(builds[0], changed=None)], 5) == {}


STEADY = [0.970, 0.972, 0.969, 0.971, 0.968, 0.970, 0.971, 0.969]
BENT: dict[str, tuple[str, list[float], str]] = {
    "recall falls": ("recall", [*STEADY, 0.955, 0.95, 0.951], "the recall of hnsw is 0.951 in the last builds and was"),
    "recall falls slowly": ("recall", [0.98 - 0.002 * i for i in range(20)], "build its graphs again"),
    "distances rise": ("distances", [900.0] * 8 + [1400, 1450, 1500], "computes 1,450 distances in the last builds"),
    "cost rises": ("cost", [4.0] * 8 + [9, 10, 11], "took 2.5 times as long as earlier ones"),
}
STRAIGHT: dict[str, tuple[str, list[float]]] = {
    "steady recall": ("recall", STEADY),
    "recall rises": ("recall", [*STEADY, 0.985, 0.99, 0.991]),
    "one outlier": ("recall", [*STEADY, 0.97, 0.90, 0.97]),
    "it has recovered": ("recall", [*STEADY, 0.90, 0.90, 0.90, *STEADY]),
    "too few builds": ("recall", [0.97, 0.97, 0.97, 0.9, 0.9, 0.9]),
    "fewer distances": ("distances", [900.0] * 8 + [400] * 3),
    "one slow build": ("cost", [4.0] * 8 + [4, 40, 4]),
    "cost falls": ("cost", [4.0] * 8 + [1, 1, 1]),
}


@pytest.mark.parametrize(("measure", "values", "sentence"), BENT.values(), ids=BENT)
def test_a_line_that_bends_gives_a_warning(measure: str, values: list[float], sentence: str) -> None:
    (warning,) = list_warnings(make_builds(values, measure))
    assert sentence in warning


@pytest.mark.parametrize(("measure", "values"), STRAIGHT.values(), ids=STRAIGHT)
def test_a_line_that_does_not_bend_gives_none(measure: str, values: list[float]) -> None:
    assert list_warnings(make_builds(values, measure)) == []


def test_a_cost_is_compared_with_the_forecast_for_as_many_passages() -> None:
    changed = [100_000, 100, 900, 300, 500, 1_000, 40, 20_000, 25_000, 15_000]
    costs = [3 + 0.001 * n for n in changed]
    assert list_warnings(make_builds(costs, "cost", changed)) == []
    (cost, *_) = compute_trends(make_builds([*costs[:-3], 70, 75, 60], "cost", changed))
    assert cost.ratio == pytest.approx(70 / 23)
    assert cost.warning
    beyond = [*changed[1:7], 90_000, 90_000, 90_000]  # no build before changed nearly as many
    assert list_warnings(make_builds([3.0] * 6 + [90.0] * 3, "cost", beyond)) == []
    slower = make_builds([4.0] * 8 + [10.0] * 3, "cost")
    elsewhere = [replace(slower[0], cpu={}), *slower[1:]]
    assert list_warnings(elsewhere) == [], "the seconds of all builds are compared, and these are equal"


def test_builds_of_other_settings_are_not_compared() -> None:
    builds = make_builds([*STEADY, 0.9, 0.9, 0.9], "recall")
    assert list_warnings([replace(build, settings=f"{i > 7}") for i, build in enumerate(builds)]) == []
