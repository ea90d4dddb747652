"""The report is one safe, self-contained, well-formed page, whatever its text holds."""

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
from rag_model.index.quality.results import GraphStats, IndexHealth, ListStats, OperatingPoint
from rag_model.store.versions.build_history import PastBuild
from tests.fixtures.strict_html import EVIL, assert_harmless, parsed


@pytest.fixture
def report() -> BuildReport:
    verdict = check_snapshot(
        GateRecipe(), SnapshotSummary(9, None, ""), {"hnsw": IndexRecalls("HNSW32", np.full(9, 0.99))}
    )
    return BuildReport(
        title=EVIL,
        snapshot="ab" * 32,
        created_at="2026-11-21T11:00:00Z",
        verdict=verdict,
        counts={"articles": 106, "passages": 12345, EVIL: 0},
        dropped={"redirect": 95, EVIL: 1},
        unknown_templates={"仮リンク": 4321, EVIL: 1},
        language="ja",
        quarantined=[(EVIL, EVIL, EVIL)],
        lengths={0: 3, 10: 0, 20: 400},
        curves={
            "hnsw": [
                OperatingPoint("efSearch=16", 0.9, 0.7, 0.1, 300),
                OperatingPoint("efSearch=64", 0.99, 0.9, 0.3, 900),
            ],
            EVIL: [],
        },
        settings={"hnsw": OperatingPoint("efSearch=32", 0.95, 0.8, 0.2, 500)},
        health={
            "hnsw": IndexHealth("hnsw", 9, graph=GraphStats((0, 3, 6), 1, 0), quantization_error=0.0),
            EVIL: IndexHealth("ivf", 9, lists=ListStats(4, (1, 0, 2, 1), 5_000_000, 1.25), quantization_error=0.0625),
        },
        build_metrics={"hnsw": {"repaired": 2}},
        stages=[BuildStage("chunk", 12.5, 4, 2), BuildStage(EVIL, 0.0, 0, 0)],
        sizes={"passages": 1_234_567, "embeddings": 0},
        lineage={"dump": EVIL},
    )


def test_the_page_shows_what_it_was_given(report: BuildReport) -> None:
    text = parsed(render_build_report(report)).text
    for piece in (
        "12,345",
        "1.23 MB",
        "12.5 s, 2 reused",
        "efSearch=64",
        "redirect",
        "unknown templates, by name (ja)",
        "4,321",
        EVIL,
        "ab" * 32,
    ):
        assert piece in text


def test_the_last_builds_are_lines_with_their_names_and_a_table(report: BuildReport) -> None:
    recalls = [0.97, 0.97, 0.97, 0.97, 0.93, 0.92, 0.91]
    history = [
        PastBuild(
            f"{n:064x}", "2026-01-01", "s", 900, n, {"a": 1.5}, {"a": 2.0, EVIL: 1.0 + n}, {"hnsw": {"recall": r}}
        )
        for n, r in enumerate(recalls)
    ]
    html = render_build_report(replace(report, history=history))
    page = parsed(html)
    assert_harmless(html)
    pictures = [attributes["aria-label"] for name, attributes in page.seen if name == "svg"]
    assert [label for label in pictures if label.endswith("by build")] == ["CPU seconds by build", "recall by build"]
    for text in ("<title>recall by build</title>", "<desc>cost from 3 to 9</desc>", "from 0.97 to 0.91</desc>"):
        assert text in html
    assert "Warning: the recall of hnsw is 0.920 in the last builds and was 0.970 before" in page.text
    assert html.count("<code>000000000000</code>") == 7
    assert "The last builds" not in parsed(render_build_report(replace(report, history=history[:1]))).text
    no_cpu = render_build_report(replace(report, history=[replace(build, cpu={}) for build in history]))
    assert "<desc>cost from 1.5 to 1.5</desc>" in no_cpu


def test_nothing_is_fetched_and_nothing_runs(report: BuildReport) -> None:
    assert_harmless(render_build_report(report))


def test_the_page_is_text_whatever_a_title_holds(report: BuildReport) -> None:
    assert "half ?" in parsed(render_build_report(replace(report, title="half \ud800"))).text


def test_a_report_of_nearly_nothing_is_still_a_page(report: BuildReport) -> None:
    bare = BuildReport("t", "ab" * 32, "2026-11-21T11:00:00Z", report.verdict, {})
    assert "svg" not in {name for name, _ in parsed(render_build_report(bare)).seen}


def test_a_refusal_says_which_check_and_what_to_do(report: BuildReport) -> None:
    refused = check_snapshot(
        GateRecipe(), SnapshotSummary(9, None, ""), {"hnsw": IndexRecalls("HNSW32", np.full(9, 0.5))}
    )
    text = parsed(render_build_report(replace(report, verdict=refused))).text
    assert "The gate refused it: hnsw recall@20, mean is 0.500, wanted at least 0.950" in text
    assert "raise efSearch or nprobe" in text


@given(st.text(), st.text())
def test_text_never_becomes_markup(text: str, value: str) -> None:
    page = parsed(tag("p", text, title=value).html)
    assert [name for name, _ in page.seen] == ["p"]


def test_each_index_shows_its_health_in_figures_and_pictures(report: BuildReport) -> None:
    page = parsed(render_build_report(report))
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
    pictures = [attributes["aria-label"] for name, attributes in page.seen if name == "svg"]
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


def boxes(html: str, element: str) -> list[dict[str, float]]:
    """Return the numbers of each such element, in order."""
    return [
        {key: float(value) for key, value in re.findall(r'(\w+)="([-+e\d.]+)"', found)}
        for found in re.findall(rf"<{element}( [^>]*)>", html)
    ]


def heights(html: str) -> dict[str, float]:
    """Return where the grid lies: each level's label and its height."""
    grid = re.findall(r'y1="([\d.]+)" y2="[\d.]+" class="grid"></line><text [^>]*>([^<]*)</text>', html)
    return {label: float(y) for y, label in grid}


def feet(html: str) -> dict[str, float]:
    places = re.findall(r'<text x="([\d.]+)" y="252" text-anchor="middle">([^<]*)</text>', html)
    return {label: float(x) for x, label in places}


@pytest.mark.parametrize("price", ["distances", "milliseconds"])
def test_a_point_lies_where_its_numbers_are_on_the_axes(price: Literal["distances", "milliseconds"]) -> None:
    curve = [
        OperatingPoint("a", 0.9, 0.5, 1, 100),
        OperatingPoint("b", 0.99, 0.95, 10, 1_000),
        OperatingPoint("c", 1.0, 1.0, 100, 10_000),
    ]
    html = trade_off_chart({"hnsw": curve}, 20, price, {"hnsw": OperatingPoint("d", 0.95, 0.9, 10, 1_000)}).html
    level, foot, points, whiskers = heights(html), feet(html), boxes(html, "circle"), boxes(html, "line")
    across = ["100", "1,000", "10,000"] if price == "distances" else ["1", "10", "100"]
    assert [p["cx"] for p in points[:3]] == pytest.approx([foot[label] for label in across], abs=0.1)
    assert [p["cy"] for p in points[:3]] == pytest.approx([level["0.9"], level["0.99"], level["0.999+"]], abs=0.1)
    ends = [line["y2"] for line in whiskers if line["x1"] in {p["cx"] for p in points} and line["y1"] != line["y2"]]
    assert ends == pytest.approx([level["0.5"], level["0.95"]], abs=0.1)
    assert (points[3]["cx"], points[3]["cy"]) == pytest.approx((foot[across[1]], level["0.95"]), abs=0.1)
    assert level["0.9"] - level["0.99"] == pytest.approx(level["0.99"] - level["0.999+"], abs=0.1)


def test_every_line_has_a_colour_of_the_page(report: BuildReport) -> None:
    curve = report.curves["hnsw"]
    page = render_build_report(replace(report, curves={f"index {n}": curve for n in range(9)}))
    worn = set(re.findall(r'class="(?:s|swatch b)(\d+)"', page))
    known = set(re.findall(r"--s(\d):", page))
    assert worn == known == {"1", "2", "3", "4"}


def test_columns_are_as_high_as_their_counts() -> None:
    for html in (
        histogram({0: 40, 10: 0, 20: 100}, "passages", "words").html,
        doubling_histogram([40, 0, 100], "lists", "vectors").html,
    ):
        level = heights(html)
        assert [box["y"] for box in boxes(html, "rect")] == pytest.approx([level["40"], level["0"], level["100"]])
    assert "2 to 3 vectors: 100 lists" in html
    assert list(feet(html)) == ["0", "1", "2"]


def test_doublings_show_the_buckets_in_use() -> None:
    html = doubling_histogram([0, 0, 0, 5, 7, 0], "lists", "vectors").html
    assert list(feet(html)) == ["4", "8"]
    assert len(boxes(html, "rect")) == 2
    assert "rect" not in doubling_histogram([], "lists", "vectors").html


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 10**9), max_size=30), st.lists(st.integers(0, 10**9)))
def test_histograms_of_any_counts_stay_in_the_picture(buckets: dict[int, int], counts: list[int]) -> None:
    for html in (
        histogram(buckets, "passages", "words").html,
        doubling_histogram(counts[:40], "lists", "vectors").html,
    ):
        parsed(html)
        for box in boxes(html, "rect"):
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
    parsed(html)
    places = boxes(html, "circle")
    assert len(places) == sum(map(len, curves.values())) + len(settings.keys() & curves.keys())
    assert all(0 <= p["cx"] <= 460 and 0 <= p["cy"] <= 280 for p in places)


def test_bars_are_as_long_as_their_share() -> None:
    widths = re.findall(r"width:([\d.]+)%", bar_chart([("a", 4, "4"), ("b", 1, "1"), ("c", 0, "0")]).html)
    assert widths == ["100.00", "25.00", "0.20"]
    assert parsed(bar_chart([]).html).seen == [("div", {"class": "bars"})]


def test_a_course_goes_through_its_points_and_shows_their_intervals() -> None:
    points = [ChartPoint(4, 0.5, 0.4, 0.6), ChartPoint(1, 0.1, 0.1, 0.1), ChartPoint(2, 0.3, 0.2, 0.45)]
    html = line_chart({"EM": points, EVIL: []}, "EM", "passages", log=True).html
    page = parsed(html)
    assert "EM, 4: 0.5 [0.4, 0.6]" in page.text
    assert "EM, 1: 0.1" in page.text
    places = feet(html)
    marks = boxes(html, "circle")
    assert [mark["cx"] for mark in marks] == pytest.approx([places["1"], places["2"], places["4"]], abs=0.1)
    assert places["2"] - places["1"] == pytest.approx(places["4"] - places["2"], abs=0.1)  # it doubles
    levels = {float(label): y for label, y in heights(html).items()}
    per_unit = (levels[0.2] - levels[0.4]) / 0.2  # downwards
    assert marks[1]["cy"] - marks[2]["cy"] == pytest.approx(0.2 * per_unit, abs=0.2)
    whisker = boxes(html, "line")[-2]  # the axis comes last
    assert whisker["y1"] - whisker["y2"] == pytest.approx(0.2 * per_unit, abs=0.2)


@pytest.mark.parametrize(
    "points", [[], [ChartPoint(5, 0.0, 0.0, 0.0)], [ChartPoint(5, -3.5, -3.5, -3.5), ChartPoint(900, -3.5, -4, -3)]]
)
@pytest.mark.parametrize("log", [True, False])
def test_a_course_of_nearly_nothing_is_still_a_picture(points: list[ChartPoint], log: bool) -> None:
    assert "nan" not in line_chart({"a": points}, "loss", "steps", log=log).html
