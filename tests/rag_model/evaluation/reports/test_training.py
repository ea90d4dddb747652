"""The curves of a training, and the page that shows when its index was refreshed."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rag_model.evaluation.reports.training import TrainingCurves, read_training_curves, render_training_report
from tests.fixtures.strict_html import XSS, assert_harmless, parse_balanced


def write_metrics(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "metrics.jsonl"


@pytest.fixture
def refreshed_metrics(tmp_path: Path) -> Path:
    """Metrics of a training that switched to another index before its third and its fifth step."""
    rows: list[dict[str, Any]] = [{"kind": "dev", "step": 0, "snapshot": "a", "nll": 4.0}]
    for step, (snapshot, age, encoding, waited) in enumerate(
        [("a", 0, 0.0, 0.0), ("a", 1, 0.0, 0.0), ("b", 0, 2.5, 3.5), ("b", 1, 2.5, 0.0), ("c", 0, 2.0, 3.0)], start=1
    ):
        metrics = {
            "snapshot_age": age,
            "encoding_seconds": encoding,
            "rebuild_seconds": 1 + encoding,
            "swap_seconds": 0.1,
        }
        metrics |= {"waited_seconds": waited, "refreshes_failed": 0, "loss": 1 / step}
        rows.append({"kind": "train", "step": step, "snapshot": snapshot, **metrics})
    return write_metrics(tmp_path, [*rows, {"kind": "dev", "step": 5, "snapshot": "c", "nll": 2.0}])


def test_curves_are_read_from_metrics(tmp_path: Path) -> None:
    assert read_training_curves(tmp_path / "metrics.jsonl") == TrainingCurves()
    rows = [{"kind": "dev", "step": 0, "nll": 4.0, "EM": None, "F1": math.nan}, {"kind": "train", "step": 1, "loss": 3}]
    lines = [*map(json.dumps, rows), "[1]", "{", '{"step": 1}', json.dumps({"kind": "dev", "step": 1, "nll": 2.5})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    values = {"dev nll": [(0, 4.0), (1, 2.5)], "train loss": [(1, 3.0)]}
    assert read_training_curves(tmp_path / "metrics.jsonl") == TrainingCurves(values)


def test_a_long_curve_is_thinned(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, ({"kind": "train", "step": n, "loss": 1 / (n + 1)} for n in range(1000)))
    (points,) = read_training_curves(path).series.values()
    assert len(points) == 250
    assert points[:2] == [(0, 1.0), (4, 0.2)]


def test_moves_of_the_index_are_listed_and_waits_are_summed(refreshed_metrics: Path) -> None:
    curves = read_training_curves(refreshed_metrics)
    assert curves.index_moves == (3, 5)
    assert [value for _, value in curves.series["train waited_seconds"]] == [0, 0, 3.5, 3.5, 6.5]


def test_a_thinned_curve_keeps_the_sum_of_waits(tmp_path: Path) -> None:
    path = write_metrics(
        tmp_path, ({"kind": "train", "step": n, "waited_seconds": float(n == 501)} for n in range(1000))
    )
    assert read_training_curves(path).series["train waited_seconds"][-1][1] == 1


def test_the_page_shows_the_moving_index_beside_the_dev_measure(refreshed_metrics: Path) -> None:
    page = parse_balanced(render_training_report("rag-end2end", {"": read_training_curves(refreshed_metrics)}))
    labels = [attributes["aria-label"] for name, attributes in page.elements if name == "svg"]
    assert labels == [
        "dev nll by steps",
        "age of the index in steps by steps",
        "seconds to refresh the index in use by steps",
        "seconds waited so far by steps",
        "train loss by steps",
    ]
    assert "moved to a rebuilt index 2 times, at the dashed lines; 0 rebuilds failed" in page.text
    assert [attributes.get("class") for name, attributes in page.elements if name == "line"].count("dash") == 2 * len(
        labels
    )
    for piece in ("age, 4: 1", "encoding, 3: 2.5", "rebuild, 5: 3", "swap, 5: 0.1", "waited, 5: 6.5", "dev nll, 5: 2"):
        assert piece in page.text


def test_a_training_without_a_moving_index_shows_only_its_curves(tmp_path: Path) -> None:
    rows = [{"kind": "dev", "step": 0, "nll": 4.0}, {"kind": "train", "step": 1, "loss": 3.0}]
    page = parse_balanced(
        render_training_report(XSS, {"lm": read_training_curves(write_metrics(tmp_path, rows)), XSS: TrainingCurves()})
    )
    assert "moving index" not in page.text
    assert [attributes["aria-label"] for name, attributes in page.elements if name == "svg"] == [
        "dev nll by steps",
        "train loss by steps",
    ]


def test_the_page_fetches_and_runs_nothing(refreshed_metrics: Path) -> None:
    rows = [{"kind": "train", "step": 1, XSS: 1.0}]
    curves = read_training_curves(write_metrics(refreshed_metrics.parent, rows))
    assert_harmless(render_training_report(XSS, {XSS: curves}))
