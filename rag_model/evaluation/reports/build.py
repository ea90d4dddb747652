"""The report page of a build. The page is made from a record of plain values alone, so any run can fill it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rag_model.evaluation.gate import Check, Verdict
from rag_model.evaluation.reports.charts import bars, doublings, histogram, legend, trade_offs
from rag_model.evaluation.reports.markup import Child, Node, tag
from rag_model.evaluation.reports.page import columns, document, pair, section, sized, table, tiles
from rag_model.index.quality.health import Effort, Health


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the run."""

    name: str
    seconds: float
    made: int  # parts or shards made
    reused: int  # parts or shards reused from an earlier run


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Everything that the page shows; a section whose values are empty is left out."""

    title: str  # of the corpus: enwiki, 2026-11-01
    snapshot: str
    created_at: str  # ISO 8601 UTC
    verdict: Verdict
    counts: Mapping[str, int]  # articles, passages, embedded, reused, …
    k: int = 20  # of the recall curves
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> pages
    quarantined: Sequence[tuple[str, str, str]] = ()  # page id, title, reason
    lengths: Mapping[int, int] = field(default_factory=dict)  # words, lower bound of a bucket -> passages
    curves: Mapping[str, Sequence[Effort]] = field(default_factory=dict)  # index -> its trade-off
    settings: Mapping[str, Effort] = field(default_factory=dict)  # index -> its default setting
    health: Mapping[str, Health] = field(default_factory=dict)  # index -> statistics of its file
    repaired: Mapping[str, int] = field(default_factory=dict)  # index -> nodes unreachable before repair
    stages: Sequence[Stage] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # kind of file -> bytes
    lineage: Mapping[str, str] = field(default_factory=dict)  # dump, recipe, space, parent, versions


def render(report: BuildReport) -> str:
    """Return the whole HTML document."""
    return document(f"{report.title}: build report", _sections(report))


def _sections(report: BuildReport) -> Iterator[Node]:
    yield _header(report)
    yield _verdict(report.verdict)
    yield tiles((name, f"{n:,}") for name, n in report.counts.items())
    if report.curves:
        yield _indexes(report.curves, report.settings, report.k)
    if report.health:
        yield _health(report.health, report.repaired)
    yield columns(_lengths(report.lengths), _stages(report.stages), _sizes(report.sizes), _dropped(report))
    if report.quarantined:
        titles = ("page", "title", "reason")
        yield section("Pages that broke the parser", table(titles, report.quarantined))
    if report.lineage:
        yield section("Lineage", table(("", ""), [(name, tag("code", v)) for name, v in report.lineage.items()]))


def _header(report: BuildReport) -> Node:
    facts = tag("p", "Snapshot ", tag("code", report.snapshot), f", built {report.created_at}")
    return tag("header", tag("h1", report.title), facts)


def _verdict(verdict: Verdict) -> Node:
    said = "The gate passed it." if verdict.passed else f"The gate refused it: {verdict.reason}."
    whys = (tag("p", check.name, ": ", check.why, class_="note") for check in verdict.checks if not check.passed)
    checks = table(("check", "", "observed", "wanted"), [_check(check) for check in verdict.checks])
    return section(said, *whys, checks, class_="verdict" if verdict.passed else "verdict no")


def _check(check: Check) -> tuple[Child, ...]:
    mark, word, style = ("✓", " passed", "yes") if check.passed else ("✗", " failed", "no-mark")
    said = tag("span", mark, tag("span", word, class_="word"), class_=style)
    return check.name, said, check.observed, check.wanted


def _indexes(curves: Mapping[str, Sequence[Effort]], settings: Mapping[str, Effort], k: int) -> Node:
    rows = [
        (name, e.setting, f"{e.recall_mean:.3f}", f"{e.recall_p5:.3f}", f"{e.distances:,.0f}", f"{e.milliseconds:.3g}")
        for name, efforts in curves.items()
        for e in efforts
    ]
    titles = ("index", "setting", f"recall@{k}, mean", "5th percentile", "distances per query", "ms per query")
    rings = " A ring is the default setting of the index." if settings else ""
    return section(
        "Recall of each index against exact search, and its cost",
        legend(curves),
        pair(trade_offs(curves, k, "distances", settings), trade_offs(curves, k, "milliseconds", settings)),
        tag(
            "p",
            f"A point is the mean recall@{k} of the sampled queries, its whisker their 5th percentile.{rings} "
            "Distance computations are the same on every machine; of lists they count the codes compared.",
            class_="note",
        ),
        tag("details", tag("summary", "the numbers"), table(titles, rows)),
    )


_FIGURES: Mapping[str, str] = {  # of Health.metrics and of the merge, in the page's order
    "degree": "links of a node, mean",
    "unlinked": "nodes without a link from another node",
    "repaired": "nodes unreachable before repair",
    "unreachable": "nodes unreachable",
    "imbalance": "imbalance of the lists (1: all equal)",
    "largest_list": "vectors in the largest list",
    "quantization_error": "error of the codes, |x - x̂|² / |x|²",
}


def _health(health: Mapping[str, Health], repaired: Mapping[str, int]) -> Node:
    """Show the statistics of each index file: its figures, then the distribution of its links or lists."""
    seen = {name: one.metrics() for name, one in health.items()}
    seen = {name: seen[name] | ({"repaired": repaired[name]} if name in repaired else {}) for name in seen}
    rows = [
        (title, *(_figure(figures.get(figure)) for figures in seen.values()))
        for figure, title in _FIGURES.items()
        if any(figure in figures for figures in seen.values())
    ]
    pictures = [picture for name, one in health.items() for picture in _spread(name, one)]
    return section("Inside each index", table(("", *seen), rows), pair(*pictures))


def _figure(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _spread(name: str, health: Health) -> Iterator[Node]:
    if health.graph is not None:
        degrees = dict(enumerate(health.graph.degrees))
        yield tag("div", tag("h3", f"{name}: links"), histogram(degrees, "nodes", "links of a node"))
    if health.lists is not None:
        yield tag("div", tag("h3", f"{name}: lists"), doublings(health.lists.sizes, "lists", "vectors in a list"))


def _lengths(lengths: Mapping[int, int]) -> Node | None:
    return section("Passage lengths", histogram(lengths, "passages", "words in a passage")) if lengths else None


def _dropped(report: BuildReport) -> Node | None:
    rows = sorted(report.dropped.items(), key=lambda pair: -pair[1])
    shown = bars([(reason, n, f"{n:,}") for reason, n in rows])
    return section("Pages left out, by reason", shown) if rows else None


def _stages(stages: Sequence[Stage]) -> Node | None:
    rows = [(stage.name, stage.seconds, _stage_text(stage)) for stage in stages]
    return section("Time by stage", bars(rows)) if rows else None


def _stage_text(stage: Stage) -> str:
    return f"{stage.seconds:,.1f} s" + (f", {stage.reused} reused" if stage.reused else "")


def _sizes(sizes: Mapping[str, int]) -> Node | None:
    rows = sorted(sizes.items(), key=lambda pair: -pair[1])
    return section("Size by kind of file", bars([(kind, n, sized(n)) for kind, n in rows])) if rows else None
