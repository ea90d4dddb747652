"""The report is one safe, self-contained, well-formed page, also with hostile text."""

import re
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.evaluation.gate import GateRecipe, IndexRecalls, SnapshotSummary, check_snapshot
from rag_model.evaluation.reports.build import BuildReport, BuildStage, render_build_report
from rag_model.evaluation.reports.page import (
    ChartPoint,
    bar_chart,
    doubling_histogram,
    histogram,
    line_chart,
    tag,
    trade_off_chart,
)
from rag_model.index.kind import IndexMeasurement
from rag_model.index.quality.results import GraphStats, IndexHealth, ListStats, OperatingPoint
from rag_model.store.versions.build_history import PastBuild
from tests.fixtures.strict_html import XSS, assert_harmless, parse_balanced


@pytest.fixture
def report() -> BuildReport:
    verdict = check_snapshot(
        GateRecipe(), SnapshotSummary(9, None, ""), {"hnsw": IndexRecalls("HNSW32", np.full(9, 0.99))}
    )
    return BuildReport(
        title=XSS,
        snapshot="ab" * 32,
        created_at="2026-11-21T11:00:00Z",
        verdict=verdict,
        counts={"articles": 106, "passages": 12345, XSS: 0},
        dropped={"redirect": 95, XSS: 1},
        unknown_templates={"仮リンク": 4321, XSS: 1},
        language="ja",
        quarantined=[(XSS, XSS, XSS)],
        lengths={0: 3, 10: 0, 20: 400},
        measurements={
            "hnsw": IndexMeasurement(
                np.full(9, 0.99),
                [
                    OperatingPoint("efSearch=16", 0.9, 0.7, 0.1, 300),
                    OperatingPoint("efSearch=64", 0.99, 0.9, 0.3, 900),
                ],
                OperatingPoint("efSearch=32", 0.95, 0.8, 0.2, 500),
                IndexHealth("hnsw", 9, graph=GraphStats((0, 3, 6), 1, 0), quantization_error=0.0),
            ),
            XSS: IndexMeasurement(
                np.full(9, 0.99),
                [OperatingPoint(XSS, 0.9, 0.7, 0.1, 300)],
                health=IndexHealth(
                    "ivf", 9, lists=ListStats(4, (1, 0, 2, 1), 5_000_000, 1.25), quantization_error=0.0625
                ),
            ),
        },
        build_metrics={"hnsw": {"repaired": 2}},
        stages=[BuildStage("chunk", 12.5, 4, 2), BuildStage(XSS, 0.0, 0, 0)],
        sizes={"passages": 1_234_567, "embeddings": 0},
        lineage={"dump": XSS},
    )


def test_the_page_shows_the_contents_of_the_report(report: BuildReport) -> None:
    text = parse_balanced(render_build_report(report)).text
    for piece in (
        "12,345",
        "1.23 MB",
        "12.5 s, 2 reused",
        "efSearch=64",
        "redirect",
        "unknown templates, by name (ja)",
        "4,321",
        XSS,
        "ab" * 32,
    ):
        assert piece in text


def test_earlier_builds_are_shown_as_curves_and_as_a_table(report: BuildReport) -> None:
    recalls = [0.97, 0.97, 0.97, 0.97, 0.93, 0.92, 0.91]
    history = [
        PastBuild(f"{n:064x}", "2026-01-01", "s", 900, n, {"a": 1.5}, {"a": 2.0, XSS: 1.0 + n}, {"hnsw": {"recall": r}})
        for n, r in enumerate(recalls)
    ]
    html = render_build_report(replace(report, history=history))
    page = parse_balanced(html)
    assert_harmless(html)
    pictures = [attributes["aria-label"] for name, attributes in page.elements if name == "svg"]
    assert [label for label in pictures if label.endswith("by build")] == ["CPU seconds by build", "recall by build"]
    for text in ("<title>recall by build</title>", "<desc>cost from 3 to 9</desc>", "from 0.97 to 0.91</desc>"):
        assert text in html
    assert "Warning: the recall of hnsw is 0.920 in the last builds and was 0.970 before" in page.text
    assert html.count("<code>000000000000</code>") == 7
    assert "The last builds" not in parse_balanced(render_build_report(replace(report, history=history[:1]))).text
    html_without_cpu = render_build_report(replace(report, history=[replace(build, cpu={}) for build in history]))
    assert "<desc>cost from 1.5 to 1.5</desc>" in html_without_cpu


def test_the_page_fetches_and_runs_nothing(report: BuildReport) -> None:
    assert_harmless(render_build_report(report))


def test_a_title_with_invalid_characters_is_shown(report: BuildReport) -> None:
    assert "half ?" in parse_balanced(render_build_report(replace(report, title="half \ud800"))).text


def test_a_minimal_report_is_a_page(report: BuildReport) -> None:
    minimal_report = BuildReport("t", "ab" * 32, "2026-11-21T11:00:00Z", report.verdict, {})
    assert "svg" not in {name for name, _ in parse_balanced(render_build_report(minimal_report)).elements}


def test_a_refusal_names_the_check_and_the_remedy(report: BuildReport) -> None:
    verdict = check_snapshot(
        GateRecipe(), SnapshotSummary(9, None, ""), {"hnsw": IndexRecalls("HNSW32", np.full(9, 0.5))}
    )
    text = parse_balanced(render_build_report(replace(report, verdict=verdict))).text
    assert "The gate refused it: hnsw recall@20, mean is 0.500, wanted at least 0.950" in text
    assert "raise efSearch or nprobe" in text


@given(st.text(), st.text())
def test_text_never_becomes_markup(text: str, value: str) -> None:
    page = parse_balanced(tag("p", text, title=value).html)
    assert [name for name, _ in page.elements] == ["p"]


def test_each_index_shows_its_health_in_figures_and_pictures(report: BuildReport) -> None:
    page = parse_balanced(render_build_report(report))
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", render_build_report(report))
    assert rows[:7] == [
        ("mean links of a node", "1.67", "–"),
        ("nodes without a link from another node", "1", "–"),
        ("nodes unreachable before repair", "2", "–"),
        ("nodes unreachable", "0", "–"),
        ("imbalance of the lists (1: equal sizes)", "–", "1.25"),
        ("vectors in the largest list", "–", "5,000,000"),
        ("quantization error, |x - x̂|² / |x|²", "0", "0.0625"),
    ]
    pictures = [attributes["aria-label"] for name, attributes in page.elements if name == "svg"]
    assert pictures == [
        "recall@20 by distance computations per query",
        "recall@20 by milliseconds per query",
        "nodes by links of a node",
        "lists by vectors in a list",
        "passages by words in a passage",
    ]
    for title in (
        "hnsw, efSearch=64: mean 0.990, 5th percentile 0.900, 900 distances, 0.3 ms",
        "2 links of a node: 6 nodes",
        "4 to 7 vectors in a list: 1 lists",
        "20 to 29 words in a passage: 400 passages",
    ):
        assert title in page.text


def read_attributes(html: str, element: str) -> list[dict[str, float]]:
    """Return the numeric attributes of each element of a name, in order."""
    return [
        {key: float(value) for key, value in re.findall(r'(\w+)="([-+e\d.]+)"', element_text)}
        for element_text in re.findall(rf"<{element}( [^>]*)>", html)
    ]


def read_y_labels(html: str) -> dict[str, float]:
    """Return the y coordinate of each label of the vertical axis."""
    grid = re.findall(r'y1="([\d.]+)" y2="[\d.]+" class="grid"></line><text [^>]*>([^<]*)</text>', html)
    return {label: float(y) for y, label in grid}


def read_x_labels(html: str) -> dict[str, float]:
    """Return the x coordinate of each label of the horizontal axis."""
    labels = re.findall(r'<text x="([\d.]+)" y="252" text-anchor="middle">([^<]*)</text>', html)
    return {label: float(x) for x, label in labels}


@pytest.mark.parametrize("price", ["distances", "milliseconds"])
def test_points_are_drawn_at_their_values(price: Literal["distances", "milliseconds"]) -> None:
    curve = [
        OperatingPoint("a", 0.9, 0.5, 1, 100),
        OperatingPoint("b", 0.99, 0.95, 10, 1_000),
        OperatingPoint("c", 1.0, 1.0, 100, 10_000),
    ]
    html = trade_off_chart({"hnsw": curve}, 20, price, {"hnsw": OperatingPoint("d", 0.95, 0.9, 10, 1_000)}).html
    label_y, label_x, points, whiskers = (
        read_y_labels(html),
        read_x_labels(html),
        read_attributes(html, "circle"),
        read_attributes(html, "line"),
    )
    labels = ["100", "1,000", "10,000"] if price == "distances" else ["1", "10", "100"]
    assert [p["cx"] for p in points[:3]] == pytest.approx([label_x[label] for label in labels], abs=0.1)
    assert [p["cy"] for p in points[:3]] == pytest.approx([label_y["0.9"], label_y["0.99"], label_y["0.999+"]], abs=0.1)
    ends = [line["y2"] for line in whiskers if line["x1"] in {p["cx"] for p in points} and line["y1"] != line["y2"]]
    assert ends == pytest.approx([label_y["0.5"], label_y["0.95"]], abs=0.1)
    assert (points[3]["cx"], points[3]["cy"]) == pytest.approx((label_x[labels[1]], label_y["0.95"]), abs=0.1)
    assert label_y["0.9"] - label_y["0.99"] == pytest.approx(label_y["0.99"] - label_y["0.999+"], abs=0.1)


def test_every_line_has_a_colour_of_the_page(report: BuildReport) -> None:
    hnsw = report.measurements["hnsw"]
    page = render_build_report(replace(report, measurements={f"index {n}": hnsw for n in range(9)}))
    used_colours = set(re.findall(r'class="(?:s|swatch b)(\d+)"', page))
    page_colours = set(re.findall(r"--s(\d):", page))
    assert used_colours == page_colours == {"1", "2", "3", "4"}


def test_the_height_of_a_column_is_its_count() -> None:
    for html in (
        histogram({0: 40, 10: 0, 20: 100}, "passages", "words").html,
        doubling_histogram([40, 0, 100], "lists", "vectors").html,
    ):
        label_y = read_y_labels(html)
        assert [box["y"] for box in read_attributes(html, "rect")] == pytest.approx(
            [label_y["40"], label_y["0"], label_y["100"]]
        )
    assert "2 to 3 vectors: 100 lists" in html
    assert list(read_x_labels(html)) == ["0", "1", "2"]


def test_a_doubling_histogram_shows_only_used_buckets() -> None:
    html = doubling_histogram([0, 0, 0, 5, 7, 0], "lists", "vectors").html
    assert list(read_x_labels(html)) == ["4", "8"]
    assert len(read_attributes(html, "rect")) == 2
    assert "rect" not in doubling_histogram([], "lists", "vectors").html


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 10**9), max_size=30), st.lists(st.integers(0, 10**9)))
def test_histograms_of_any_counts_stay_in_the_picture(buckets: dict[int, int], counts: list[int]) -> None:
    for html in (
        histogram(buckets, "passages", "words").html,
        doubling_histogram(counts[:40], "lists", "vectors").html,
    ):
        parse_balanced(html)
        for box in read_attributes(html, "rect"):
            assert 0 <= box["x"] <= 460
            assert 0 <= box["x"] + box["width"] <= 461
            assert 0 <= box["y"] + box["height"] <= 281


EFFORTS = st.builds(
    OperatingPoint,
    st.just("nprobe=1"),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1e5, allow_subnormal=False),
    st.floats(0, 1e9, allow_subnormal=False),
)


@given(
    st.dictionaries(st.sampled_from(["hnsw", "ivfpq", "exact"]), st.lists(EFFORTS, max_size=6)),
    st.dictionaries(st.sampled_from(["hnsw", "ivfpq"]), EFFORTS),
    st.sampled_from(["distances", "milliseconds"]),
)
def test_curves_of_any_points_stay_in_the_picture(
    curves: dict[str, list[OperatingPoint]],
    settings: dict[str, OperatingPoint],
    price: Literal["distances", "milliseconds"],
) -> None:
    html = trade_off_chart(curves, 20, price, settings).html
    parse_balanced(html)
    points = read_attributes(html, "circle")
    assert len(points) == sum(map(len, curves.values())) + len(settings.keys() & curves.keys())
    assert all(0 <= p["cx"] <= 460 and 0 <= p["cy"] <= 280 for p in points)


def test_the_length_of_a_bar_is_its_share() -> None:
    widths = re.findall(r"width:([\d.]+)%", bar_chart([("a", 4, "4"), ("b", 1, "1"), ("c", 0, "0")]).html)
    assert widths == ["100.00", "25.00", "0.20"]
    assert parse_balanced(bar_chart([]).html).elements == [("div", {"class": "bars"})]


def test_a_line_chart_shows_its_points_and_their_intervals() -> None:
    points = [ChartPoint(4, 0.5, 0.4, 0.6), ChartPoint(1, 0.1, 0.1, 0.1), ChartPoint(2, 0.3, 0.2, 0.45)]
    html = line_chart({"EM": points, XSS: []}, "EM", "passages", log=True).html
    page = parse_balanced(html)
    assert "EM, 4: 0.5 [0.4, 0.6]" in page.text
    assert "EM, 1: 0.1" in page.text
    label_x = read_x_labels(html)
    marks = read_attributes(html, "circle")
    assert [mark["cx"] for mark in marks] == pytest.approx([label_x["1"], label_x["2"], label_x["4"]], abs=0.1)
    assert label_x["2"] - label_x["1"] == pytest.approx(label_x["4"] - label_x["2"], abs=0.1)  # a logarithmic axis
    levels = {float(label): y for label, y in read_y_labels(html).items()}
    pixels_per_unit = (levels[0.2] - levels[0.4]) / 0.2  # y grows downwards
    assert marks[1]["cy"] - marks[2]["cy"] == pytest.approx(0.2 * pixels_per_unit, abs=0.2)
    whisker = read_attributes(html, "line")[-2]  # the axis comes last
    assert whisker["y1"] - whisker["y2"] == pytest.approx(0.2 * pixels_per_unit, abs=0.2)


@pytest.mark.parametrize(
    "points", [[], [ChartPoint(5, 0.0, 0.0, 0.0)], [ChartPoint(5, -3.5, -3.5, -3.5), ChartPoint(900, -3.5, -4, -3)]]
)
@pytest.mark.parametrize("log", [True, False])
def test_a_line_chart_of_few_points_can_be_drawn(points: list[ChartPoint], log: bool) -> None:
    assert "nan" not in line_chart({"a": points}, "loss", "steps", log=log).html
