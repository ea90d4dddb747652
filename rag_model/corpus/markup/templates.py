"""Which template becomes which words.

A table leads from a template's name to a small function that writes what a reader sees of it. What is not in the table is
judged by where it stands: …
"""

import re
from functools import lru_cache

from rag_model.corpus.markup import dates, inline, measures, numbers
from rag_model.corpus.markup.call import Renderer, parse_call

RENDERERS: dict[str, Renderer] = {
    **inline.RENDERERS,
    **dates.RENDERERS,
    **numbers.RENDERERS,
    **measures.RENDERERS,
}

_DROPPED = re.compile(
    r"cite |citation|vcite|cit |harv|sfn|infobox|taxobox|automatic taxobox|speciesbox|navbox|reflist|refn?$|efn|notelist|"
    r"rp$|main|see also|further|about|for$|other uses|redirect|hatnote|portal|commons|wik|use |pp-|defaultsort"
)


@lru_cache(maxsize=65536)
def normalised(name: str) -> str:
    """Return a template's name as the table has it: lower case, blanks single, no namespace."""
    name = " ".join(name.replace("_", " ").split()).lower()
    return name.removeprefix("template:").removeprefix("subst:").strip()


@lru_cache(maxsize=65536)
def is_dropped(name: str) -> bool:
    """Tell whether nothing is ever shown of this template."""
    return _DROPPED.match(normalised(name)) is not None


class Templates:
    """Renders the templates of one page."""

    def __init__(self, title: str = "") -> None:
        self._title = title

    def render(self, arguments: list[str]) -> str:
        """Return the words that a reader sees of a template, its name first among the arguments."""
        name = normalised(arguments[0])
        renderer = RENDERERS.get(name) or inline.by_family(name)
        if renderer is None:
            return ""
        return renderer(parse_call(name, arguments[1:]))
