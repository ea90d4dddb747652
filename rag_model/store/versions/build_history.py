"""The history of a corpus's builds: their costs, the quality of their indexes, and warnings of
changes.

The provenance of a snapshot contains a short record of each earlier build. So one manifest has the
whole history, including snapshots that `expire` has deleted.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from statistics import fmean, median
from typing import Any, Self

from rag_model.digest import digest_json
from rag_model.store.versions.manifest import Manifest

HISTORY = "history"  # provenance field with the history
# maximum number of recorded builds; number of newest builds that are always recorded
_MAX_BUILDS, _N_NEWEST = 20, 8
# Number of newest builds, and minimum number of earlier builds, whose medians are compared. Medians
# are used so that a single outlier gives no warning.
_N_RECENT, _N_EARLIER = 3, 4
# Limits for the newest builds, as multiples of the value of the earlier builds. With 256 queries,
# recall is exact to about .01.
MIN_RECALL_RATIO, MAX_DISTANCES_RATIO, MAX_COST_RATIO = 0.99, 1.5, 2.0
_INDEX_METRICS = ("distances", "degree", "replaced")
_MAX_NAME_LENGTH = 100  # characters
# Names are labels of metrics, so the names in a hostile manifest are restricted.
_INDEX_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True)
class PastBuild:
    """The record of one build of a corpus."""

    snapshot: str
    created_at: str  # ISO 8601 UTC
    # digest of recipe and encoder spaces, because only builds with equal settings are compared
    settings: str
    passages: int
    # number of encoded passages; None if it was not recorded, or if the snapshot was derived
    changed: int | None
    seconds: Mapping[str, float] = field(default_factory=dict)  # elapsed seconds by stage
    # CPU seconds by stage; empty if workers ran on other machines
    cpu: Mapping[str, float] = field(default_factory=dict)
    # recall, degree and other metrics, by index
    indexes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the record of the build of a snapshot."""
        provenance, content = manifest.provenance, manifest.content
        is_derived = any(name in provenance for name in ("takedown", "indexed"))
        return cls(
            manifest.id,
            _parse_text(provenance, "created_at"),
            digest_json([content.recipe, content.representations])[-16:],
            content.n,
            None if is_derived else _parse_count(provenance.get("embedded")),
            _parse_numbers(provenance.get("seconds")),
            _parse_numbers(provenance.get("cpu")),
            {name: _read_metrics(metrics) for name, metrics in _iter_indexes(manifest.metrics)},
        )

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse the JSON value of `asdict`; fields of a wrong type are left empty."""
        fields = value if isinstance(value, dict) else {}
        return cls(
            _parse_text(fields, "snapshot"),
            _parse_text(fields, "created_at"),
            _parse_text(fields, "settings"),
            _parse_count(fields.get("passages")) or 0,
            _parse_count(fields.get("changed")),
            _parse_numbers(fields.get("seconds")),
            _parse_numbers(fields.get("cpu")),
            {name: _parse_numbers(metrics) for name, metrics in _iter_indexes(fields.get("indexes"))},
        )


@dataclass(frozen=True, slots=True)
class CostForecast:
    """A linear model of a build's cost in seconds: a constant, and a cost per changed passage."""

    base: float
    per_passage: float

    @classmethod
    def fit(cls, costs: Sequence[tuple[int, float]]) -> Self:
        """Fit pairs (number of changed passages, cost) by least squares; the constant and the slope
        are at least 0.
        """
        mean_x, mean_y = fmean(x for x, _ in costs), fmean(y for _, y in costs)
        spread = sum((x - mean_x) ** 2 for x, _ in costs)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in costs) / spread if spread else math.inf
        base_cost = mean_y - slope * mean_x if spread else -1.0
        if base_cost < 0:  # a negative constant: fit a line through zero instead
            sum_of_squares = sum(x * x for x, _ in costs)
            base_cost, slope = (0.0, sum(x * y for x, y in costs) / sum_of_squares) if sum_of_squares else (mean_y, 0.0)
        return cls(base_cost, slope) if slope >= 0 else cls(mean_y, 0.0)

    def estimate(self, n_changed: int) -> float:
        """Return the cost of a build with `n_changed` changed passages."""
        return self.base + self.per_passage * n_changed


@dataclass(frozen=True, slots=True)
class Trend:
    """The median of a metric or cost over the last builds, and over the builds before them."""

    measure: str  # `recall`, `distances` or `cost`; a cost is relative to the forecast
    index: str  # name of the index; empty if the measure is `cost`
    before: float
    now: float

    @property
    def ratio(self) -> float:
        """The median of the last builds as a multiple of the earlier builds' median."""
        return self.now / self.before if self.before else 1.0

    @property
    def warning(self) -> str:
        """A warning if the value exceeds its limit; otherwise an empty string."""
        if self.measure == "recall" and self.ratio < MIN_RECALL_RATIO:
            return (
                f"the recall of {self.index} is {self.now:.3f} in the last builds and was "
                f"{self.before:.3f} before: build its graphs again (--rebuild-graphs), or raise "
                "its recall_target"
            )
        if self.measure == "distances" and self.ratio > MAX_DISTANCES_RATIO:
            return (
                f"a query of {self.index} computes {self.now:,.0f} distances in the last builds "
                f"and {self.before:,.0f} before: build its graphs again (--rebuild-graphs)"
            )
        if self.measure == "cost" and self.ratio > MAX_COST_RATIO:
            return (
                f"the last builds took {self.now:.1f} times as long as earlier ones for as many "
                "changed passages: compare the stages in the report, and look for other work on "
                "the machine"
            )
        return ""


def read_history(manifest: Manifest | None) -> tuple[PastBuild, ...]:
    """Return the recorded builds, oldest first; the last is the snapshot's own build. A manifest
    may be hostile.
    """
    if manifest is None:
        return ()
    history_json = manifest.provenance.get(HISTORY)
    records = map(PastBuild.from_json, history_json[-_MAX_BUILDS:] if isinstance(history_json, list) else ())
    return (*(record for record in records if record.snapshot != manifest.id), PastBuild.from_manifest(manifest))


def format_history(parent: Manifest | None) -> list[dict[str, Any]]:
    """Return the history up to a parent as JSON values for the provenance of its successor.

    The first build and the newest builds are kept. Between them, builds that are close in time are
    left out, so that even the history of a corpus that is built each minute covers years.
    """
    builds = [*read_history(parent)]
    while len(builds) >= _MAX_BUILDS:
        times = [_parse_time(build.created_at) for build in builds]
        # for each build, the gap in time that its deletion would leave, relative to its age
        gaps = [(times[i + 1] - times[i - 1]) / (times[-1] - times[i] + 1) for i in range(1, len(builds) - _N_NEWEST)]
        del builds[1 + gaps.index(min(gaps))]
    return [asdict(build) for build in builds]


def forecast_build(builds: Sequence[PastBuild], n_changed: int) -> dict[str, Any]:
    """Forecast the cost of a build as JSON values, from past builds with the last build's settings.

    `stages` has the `seconds` and `cpu` of each stage, and in `per_passage` the seconds that each
    of the `n_changed` passages adds. The result is empty if no build has recorded its cost.
    """
    comparable_builds = [build for build in _select_comparable(builds) if build.changed is not None]
    if not comparable_builds:
        return {}
    costs_by_stage: dict[str, dict[str, Any]] = {}
    for stage in dict.fromkeys(stage for build in comparable_builds for stage in build.seconds):
        forecast_by_unit = dict(_iter_forecasts(comparable_builds, stage))
        costs_by_stage[stage] = {
            **{unit: round(forecast.estimate(n_changed), 3) for unit, forecast in forecast_by_unit.items()},
            "per_passage": {unit: round(forecast.per_passage, 7) for unit, forecast in forecast_by_unit.items()},
        }
    return {"builds": len(comparable_builds), "changed": n_changed, "stages": costs_by_stage}


def compute_trends(builds: Sequence[PastBuild]) -> list[Trend]:
    """Compare the last builds with earlier builds; metrics that only few builds recorded are left
    out.
    """
    comparable_builds = _select_comparable(builds)
    trends = list(_iter_cost_trends([build for build in comparable_builds if build.changed is not None]))
    for name in comparable_builds[-1].indexes if comparable_builds else ():
        for measure in ("recall", "distances"):
            metrics = [build.indexes.get(name, {}) for build in comparable_builds]
            metric_values = [index_metrics[measure] for index_metrics in metrics if measure in index_metrics]
            if len(metric_values) >= _N_EARLIER + _N_RECENT:
                trends.append(
                    Trend(measure, name, median(metric_values[:-_N_RECENT]), median(metric_values[-_N_RECENT:]))
                )
    return trends


def list_warnings(builds: Sequence[PastBuild]) -> list[str]:
    """Return the warnings about trends that exceed their limits."""
    return [trend.warning for trend in compute_trends(builds) if trend.warning]


def _select_comparable(builds: Sequence[PastBuild]) -> list[PastBuild]:
    """Return the builds since the settings were last changed."""
    other_build_numbers = [number for number, build in enumerate(builds) if build.settings != builds[-1].settings]
    return [*builds[other_build_numbers[-1] + 1 if other_build_numbers else 0 :]]


def _iter_forecasts(builds: Iterable[PastBuild], stage: str) -> Iterator[tuple[str, CostForecast]]:
    for unit in ("seconds", "cpu"):
        recorded_costs = [(build.changed or 0, getattr(build, unit).get(stage)) for build in builds]
        known_costs = [(n_changed, cost) for n_changed, cost in recorded_costs if cost is not None]
        if known_costs:
            yield unit, CostForecast.fit(known_costs)


def _iter_cost_trends(builds: Sequence[PastBuild]) -> Iterator[Trend]:
    """Compare the costs of the last builds with a forecast from earlier builds.

    Yield nothing if one of the last builds changed more than twice as many passages as every
    earlier build, because the forecast would be an extrapolation.
    """
    if len(builds) < _N_EARLIER + _N_RECENT:
        return
    unit = "cpu" if all(build.cpu for build in builds) else "seconds"
    costs = [(build.changed or 0, sum(getattr(build, unit).values())) for build in builds]
    earlier_costs, recent_costs = costs[:-_N_RECENT], costs[-_N_RECENT:]
    forecast, max_changed = CostForecast.fit(earlier_costs), 2 * max(n_changed for n_changed, _ in earlier_costs)
    if all(n_changed <= max_changed and forecast.estimate(n_changed) > 0 for n_changed, _ in recent_costs):
        yield Trend("cost", "", 1.0, median(cost / forecast.estimate(n_changed) for n_changed, cost in recent_costs))


def _parse_text(fields: Mapping[str, Any], name: str) -> str:
    return str(fields.get(name, ""))[:_MAX_NAME_LENGTH]


def _parse_count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _parse_numbers(value: Any) -> dict[str, float]:
    """Return only those entries of a JSON object that are finite numbers of at least 0."""
    named_numbers = value.items() if isinstance(value, dict) else ()
    return {
        str(name)[:_MAX_NAME_LENGTH]: number
        for name, number in named_numbers
        if type(number) in (int, float) and 0 <= number < 1 << 53
    }


def _iter_indexes(value: Any) -> Iterator[tuple[str, Any]]:
    named_metrics = value.items() if isinstance(value, Mapping) else ()
    return ((name, metrics) for name, metrics in named_metrics if isinstance(name, str) and _INDEX_NAME.fullmatch(name))


def _read_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics of an index to record; the first recall@k is recorded as `recall`."""
    numbers = _parse_numbers(metrics)
    recalls = [number for name, number in numbers.items() if name.startswith("recall@") and name[7:].isdecimal()]
    values = {name: numbers[name] for name in _INDEX_METRICS if name in numbers}
    return ({"recall": recalls[0]} if recalls else {}) | values


def _parse_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
