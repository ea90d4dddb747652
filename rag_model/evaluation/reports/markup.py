"""HTML that is escaped by construction: plain text cannot become markup."""

from html import escape


class Node:
    """A piece of finished markup; text becomes a node only through `tag` and `join`."""

    __slots__ = ("html",)

    def __init__(self, html: str) -> None:
        """Hold `html`, which must be escaped already."""
        self.html = html


Child = Node | str | int


def tag(name: str, *children: Child, **attributes: str | float | None) -> Node:
    """Return an element; text children and attribute values are escaped, attributes that are None left out.

    `class_` gives `class`, other underscores become hyphens: `stroke_width=2` gives `stroke-width="2"`.

    >>> tag("p", "1 < 2", class_="note").html
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Node(f"<{name}{written}>{join(*children).html}</{name}>")


def join(*children: Child) -> Node:
    """Return the concatenated children."""
    return Node("".join(c.html if isinstance(c, Node) else escape(str(c)) for c in children))


def _value(value: str | float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
