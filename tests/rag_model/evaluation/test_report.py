"""The report is one safe, self-contained, well-formed page, whatever its text holds."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.evaluation.charts import bars, histogram, trade_offs
from rag_model.evaluation.gate import Findings, GateRecipe, Vitals, judge
from rag_model.evaluation.markup import tag
from rag_model.evaluation.report import BuildReport, Stage, render
from rag_model.index.health import Effort

EVIL = "</title><script>alert('x')</script>\" onload=\"alert(1)"
VOID = {"meta"}


class Balanced(HTMLParser):
    """Collects the elements, their text and attributes; fails where a tag is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Balanced:
    page = Balanced()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


@pytest.fixture
def report() -> BuildReport:
    verdict = judge(GateRecipe(), Vitals(9, None, ""), {"hnsw": Findings("HNSW32", np.full(9, 0.99))})
    return BuildReport(
        title=EVIL,
        snapshot="ab" * 32,
        created_at="2026-11-21T11:00:00Z",
        verdict=verdict,
        counts={"articles": 106, "passages": 12345, EVIL: 0},
        dropped={"redirect": 95, EVIL: 1},
        quarantined=[(EVIL, EVIL, EVIL)],
        lengths={0: 3, 10: 0, 20: 400},
        curves={
            "hnsw": [Effort("efSearch=16", 0.9, 0.7, 0.1, 300), Effort("efSearch=64", 0.99, 0.9, 0.3, 900)],
            EVIL: [],
        },
        stages=[Stage("chunk", 12.5, 4, 2), Stage(EVIL, 0.0, 0, 0)],
        sizes={"passages": 1_234_567, "embeddings": 0},
        lineage={"dump": EVIL},
    )


def test_the_page_shows_what_it_was_given(report: BuildReport) -> None:
    text = parsed(render(report)).text
    for piece in (
        "12,345",
        "1.23 MB",
        "12.5 s, 2 reused",
        "efSearch=64",
        "redirect",
        EVIL,
        "ab" * 32,
    ):
        assert piece in text


def test_nothing_is_fetched_and_nothing_runs(report: BuildReport) -> None:
    page = parsed(render(report))
    names = {name for name, _ in page.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    assert not any(key.startswith("on") or key == "src" for _, attributes in page.seen for key in attributes)
    assert not re.search(r"url\(|@import", render(report))
    assert "default-src 'none'" in render(report)


def test_the_page_is_text_whatever_a_title_holds(report: BuildReport) -> None:
    assert "half ?" in parsed(render(replace(report, title="half \ud800"))).text


def test_a_report_of_nearly_nothing_is_still_a_page(report: BuildReport) -> None:
    bare = BuildReport("t", "ab" * 32, "2026-11-21T11:00:00Z", report.verdict, {})
    assert "svg" not in {name for name, _ in parsed(render(bare)).seen}


def test_a_refusal_says_which_check_and_what_to_do(report: BuildReport) -> None:
    refused = judge(GateRecipe(), Vitals(9, None, ""), {"hnsw": Findings("HNSW32", np.full(9, 0.5))})
    text = parsed(render(replace(report, verdict=refused))).text
    assert "The gate said no: hnsw recall@20, mean is 0.500, wanted at least 0.950" in text
    assert "search it harder" in text


@given(st.text(), st.text())
def test_text_never_becomes_markup(text: str, value: str) -> None:
    page = parsed(tag("p", text, title=value).html)
    assert [name for name, _ in page.seen] == ["p"]


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 10**9), max_size=30))
def test_histograms_of_any_counts_stay_in_the_picture(buckets: dict[int, int]) -> None:
    page = parsed(histogram(buckets, "words").html)
    for name, box in page.seen:
        if name == "rect":
            assert 0 <= float(box["x"] or "") <= 720
            assert 0 <= float(box["y"] or "") + float(box["height"] or "") <= 301


EFFORTS = st.builds(
    Effort,
    st.just("nprobe=1"),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1e5, allow_subnormal=False),
    st.just(1.0),
)


@given(st.dictionaries(st.sampled_from(["hnsw", "ivfpq", "exact"]), st.lists(EFFORTS, max_size=6)))
def test_curves_of_any_points_stay_in_the_picture(curves: dict[str, list[Effort]]) -> None:
    page = parsed(trade_offs(curves, 20).html)
    places = [box for name, box in page.seen if name == "circle"]
    assert len(places) == sum(map(len, curves.values()))
    assert all(0 <= float(p["cx"] or "") <= 720 and 0 <= float(p["cy"] or "") <= 300 for p in places)


def test_bars_are_as_long_as_their_share() -> None:
    widths = re.findall(r"width:([\d.]+)%", bars([("a", 4, "4"), ("b", 1, "1"), ("c", 0, "0")]).html)
    assert widths == ["100.00", "25.00", "0.20"]
    assert parsed(bars([]).html).seen == [("div", {"class": "bars"})]
