"""The HTML elements of all reports: a self-contained page of sections, tables and tiles.

Text is escaped by construction: it becomes a `Node` only through `tag` and `join`. A page has no
script and no font and fetches nothing, which its content policy also forbids.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files


class Node:
    """A piece of escaped markup; text becomes a node only through `tag` and `join`."""

    __slots__ = ("html",)

    def __init__(self, html: str) -> None:
        """Take `html`, which must be escaped already."""
        self.html = html


Child = Node | str | int


def tag(name: str, *children: Child, **attributes: str | float | None) -> Node:
    """Return an element with escaped text and attribute values; attributes that are None are left
    out.

    `class_` gives `class`; other underscores become hyphens: `stroke_width=2` gives
    `stroke-width="2"`.

    >>> tag("p", "1 < 2", class_="note").html
    '<p class="note">1 &lt; 2</p>'
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_format_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Node(f"<{name}{attribute_text}>{join(*children).html}</{name}>")


def join(*children: Child) -> Node:
    """Return the concatenated children."""
    return Node("".join(c.html if isinstance(c, Node) else escape(str(c)) for c in children))


def _format_attribute(value: str | float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_document(title: str, content: Iterable[Node]) -> str:
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
    # Titles may hold lone surrogates.
    return f"<!doctype html>\n{page.html}\n".encode(errors="replace").decode()


def section(title: str, *content: Child, class_: str | None = None) -> Node:
    """Return a section with a title."""
    return tag("section", tag("h2", title), *content, class_=class_)


def header(title: str, *content: Child) -> Node:
    """Return the title of the page and the text below it."""
    return tag("header", tag("h1", title), *content)


def note(*content: Child) -> Node:
    """Return a paragraph of explanation."""
    return tag("p", *content, class_="note")


def to_sentence(clause: str) -> str:
    """Return a clause with a capital letter and a full stop."""
    return f"{clause[0].upper()}{clause[1:]}."


def lineage_section(lineage: Mapping[str, str]) -> Iterator[Node]:
    """Yield the section with the ids and versions that a report is made from, if there are any."""
    if lineage:
        yield section("Lineage", table(("", ""), [(name, tag("code", value)) for name, value in lineage.items()]))


def pair(*pictures: Node) -> Node:
    """Return charts side by side, if the page is wide enough."""
    return tag("div", *pictures, class_="pair")


def columns(*sections: Node | None) -> Node:
    """Return sections in two columns, if the page is wide enough; None is left out."""
    return tag("div", *(section_node for section_node in sections if section_node is not None), class_="columns")


def tiles(values: Iterable[tuple[str, str]]) -> Node:
    """Return tiles with the main numbers, from pairs (name, value)."""
    return tag("div", *(_tile(name, value) for name, value in values), class_="tiles")


def _tile(name: str, value: str) -> Node:
    return tag("div", tag("b", value), tag("span", name), class_="tile")


def table(titles: Sequence[str], rows: Iterable[Sequence[Child]]) -> Node:
    """Return a table, which has no head if no column has a title."""
    head = [tag("tr", *(tag("th", title) for title in titles))] if any(titles) else []
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    # A narrow screen scrolls the table, not the page.
    return tag("div", tag("table", *head, *body), class_="scroll")


def format_bytes(n: int) -> str:
    """Return a number of bytes as text with a unit, such as `1.53 MB`."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
