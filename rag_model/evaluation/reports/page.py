"""The parts of every report: one self-contained page of sections, tables and tiles.

It has no script and no font and fetches nothing (a content policy also forbids it), so a page stays readable. Text
is escaped by construction (`markup`).
"""

from collections.abc import Iterable, Sequence
from importlib.resources import files

from rag_model.evaluation.reports.markup import Child, Node, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, content: Iterable[Node]) -> str:
    """Return the whole HTML document."""
    style = Node((files("rag_model.evaluation.reports") / "report.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        Node('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Node(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", title),
        tag("style", style),
    )
    page = tag("html", head, tag("body", tag("main", *content)), lang="en")
    return f"<!doctype html>\n{page.html}\n".encode(errors="replace").decode()  # titles may hold lone surrogates


def section(title: str, *content: Child, class_: str | None = None) -> Node:
    """Return a titled part of the page."""
    return tag("section", tag("h2", title), *content, class_=class_)


def pair(*pictures: Node) -> Node:
    """Return charts side by side, if there is room."""
    return tag("div", *pictures, class_="pair")


def columns(*sections: Node | None) -> Node:
    """Return sections in two columns, if there is room; None is left out."""
    return tag("div", *(one for one in sections if one is not None), class_="columns")


def tiles(values: Iterable[tuple[str, str]]) -> Node:
    """Return the main figures, as (name, value)."""
    return tag("div", *(_tile(name, value) for name, value in values), class_="tiles")


def _tile(name: str, value: str) -> Node:
    return tag("div", tag("b", value), tag("span", name), class_="tile")


def table(titles: Sequence[str], rows: Iterable[Sequence[Child]]) -> Node:
    """Return a table; without a head if no column has a title."""
    head = [tag("tr", *(tag("th", title) for title in titles))] if any(titles) else []
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", *head, *body), class_="scroll")  # a narrow screen scrolls the table, not the page


def sized(n: int) -> str:
    """Return bytes for people: `1.53 MB`."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
