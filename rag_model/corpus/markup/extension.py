"""Extension tags and comments, whose contents are not wikitext: dropped, or kept as literal text.

They are processed first, because their contents must not be read as markup: a reference with half a template, a
formula with many braces. As in MediaWiki, a tag extends to the first closing tag of its name; of an unclosed one only
the tag itself is removed, and an unclosed comment hides the rest of the page.
"""

import html
import re
from collections.abc import Callable

from rag_model.corpus.markup.literal import GAP, protect
from rag_model.corpus.markup.tex import render_tex

# References, media and apparatus contain no running text. Blocks of code and preformatted text are dropped
# too, as in DPR: they are listings and diagrams, not prose. Code inside a sentence is kept.
_DROPPED = (
    "ref references gallery timeline score imagemap hiero includeonly templatedata templatestyles graph "
    "mapframe maplink inputbox categorytree indicator section labeledsectiontransclusion rss pre"
)


def _literal(attributes: str, body: str) -> str:
    return protect(html.unescape(body)) or GAP


def _dropped(attributes: str, body: str) -> str:
    return GAP


def _listing(attributes: str, body: str) -> str:
    return protect(html.unescape(body)) if "inline" in attributes or "none" in attributes else GAP


_RENDER: dict[str, Callable[[str, str], str]] = {
    **dict.fromkeys(_DROPPED.split(), _dropped),
    "syntaxhighlight": _listing,
    "source": _listing,
    "nowiki": _literal,
    "math": lambda _, body: protect(render_tex(body)),
    "chem": lambda _, body: protect(render_tex(body)),
    "ce": lambda _, body: protect(render_tex(body)),
}
_OPEN = re.compile(rf"<!--|<({'|'.join(_RENDER)})(?=[\s/>])([^<>]*)>", re.IGNORECASE)
_CLOSE = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in _RENDER}


def strip_extensions(text: str) -> str:
    """Remove comments and extension tags; text of theirs that a reader sees is kept as literal text.

    Linear: each position is searched once, and a name whose closing tag was not found is not searched for again.
    """
    kept: list[str] = []
    never_closed: set[str] = set()
    at = 0
    while opening := _OPEN.search(text, at):
        kept.append(text[at : opening.start()])
        shown, at = _replace(text, opening, never_closed)
        kept.append(shown)
    kept.append(text[at:])
    return "".join(kept)


def _replace(text: str, opening: re.Match[str], never_closed: set[str]) -> tuple[str, int]:
    """Return the replacement of the tag or comment that opens here, and where to read on."""
    if opening[1] is None:
        end = text.find("-->", opening.end())
        return "", len(text) if end < 0 else end + 3
    name, attributes = opening[1].lower(), opening[2]
    if attributes.endswith("/"):
        return _RENDER[name](attributes, ""), opening.end()
    closing = None if name in never_closed else _CLOSE[name].search(text, opening.end())
    if closing is None:
        never_closed.add(name)
        return "", opening.end()
    return _RENDER[name](attributes, text[opening.end() : closing.start()]), closing.end()
