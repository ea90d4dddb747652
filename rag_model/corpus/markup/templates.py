"""Render templates as the words that a reader sees.

A table gives for a template's name a small function that writes the text a reader sees. Most templates
of a page show nothing in running text (citations, infoboxes, navigation, notices, pictures): the known ones are
skipped unread. A template that is in no table is judged by its place: alone on a line it is a box and is
dropped; inside a sentence, with exactly one parameter, it nearly always formats that parameter
(`{{largeur|12}}`), which is kept.
"""

import re
from functools import lru_cache

from rag_model.corpus.markup import dates, inline, measures, numbers
from rag_model.corpus.markup.call import Renderer, parse_call
from rag_model.corpus.markup.country_names import COUNTRY_NAMES
from rag_model.corpus.markup.literal import GAP

RENDERERS: dict[str, Renderer] = inline.RENDERERS | dates.RENDERERS | numbers.RENDERERS | measures.RENDERERS

# Beginnings of the names of templates that show no running text. `$` ends a whole name.
_DROPPED = re.compile(
    # citations and their notes, in the wikis' larger languages
    r"cite |citation$|vcite|cite$|citar|cita |cit |harv|sfn|efn|refn?$|ref |reflist|refbegin|refend|"
    r"notelist|rp$|r$|notes?$|internetquelle|literatur|lien web|ouvrage|article$|citeweb|webarchive|"
    r"wayback|dead link|google books|"
    # complaints of editors
    r"citation needed|citation required|cn$|fact$|clarify|when$|who$|whom\?|by whom|which$|where$|why$|"
    r"how$|vague|according to|page needed|pn$|better source|unreliable|verify|failed verification|dubious|"
    r"disputed|pov|original research|or$|specify|update|refimprove|unreferenced|more |multiple issues|"
    r"expand|empty section|cleanup|weasel|peacock|"
    # boxes, bars, notices above the text
    r"infobox|taxobox|automatic taxobox|speciesbox|navbox|sidebar|geobox|chembox|drugbox|main$|main |see "
    r"also|further|details|about|for$|for2|other |redirect|distinguish|hatnote|selfref|portal|commons|"
    r"wiki[a-z]|sister|use [a-z]+ (?:dates|english)|pp-|protected|good article|featured|coord|authority "
    r"control|defaultsort|short description|italic title|displaytitle|toc|clear|anchor|flagicon|flagdeco|"
    r"flag icon|multiple image|double image|wide image|triple image|image|css image|listen|audio|gallery|"
    r"location map|succession|s-[a-z]|start box|end box|col-|div col|colbegin|colend|legend|bartable|chart|"
    r"clade|ahnentafel|family tree|weather box|graph|inflation|issn|oclc|doi|imdb|dmoz|official |"
    r"[a-z]+-stub|stub|categor|lock|bots$|engvar|#"
)
_MOST_NAME = 255  # characters; MediaWiki allows as many bytes. What is longer is a page's text, and is not kept
_NAMES = 1 << 14  # names that are kept, of all wikis' pages; a large wiki uses some thousand
_NOT_SHOWABLE = re.compile(r"https?:|\n|^\W*$")


def normalised(name: str) -> str:
    """Return a template's name in the form of the table: lower case, single spaces, no namespace, not too long."""
    return _normalised(name[:_MOST_NAME])


@lru_cache(_NAMES)
def _normalised(name: str) -> str:
    name = " ".join(name.replace("_", " ").split()).lower()
    return name.removeprefix("template:").removeprefix("subst:").strip()


def is_dropped(name: str) -> bool:
    """Return whether the template of this name, spelled as in the wikitext, never shows text."""
    return _is_dropped(name[:_MOST_NAME])


@lru_cache(_NAMES)
def _is_dropped(name: str) -> bool:
    name = _normalised(name)
    return name not in RENDERERS and _DROPPED.match(name) is not None


class Templates:
    """Renders the templates of one page."""

    def __init__(self, title: str = "") -> None:
        self._title = title

    def render(self, arguments: list[str], *, inside: bool) -> str:
        """Return the words that a reader sees of a template, its name first among the arguments.

        `inside` says that it is within a line of text. A template without text becomes a gap, which keeps its
        neighbours apart.
        """
        name = normalised(arguments[0])
        renderer = RENDERERS.get(name) or inline.by_family(name)
        if renderer is not None:
            return renderer(parse_call(name, arguments[1:])) or GAP
        if (code := arguments[0].strip()) in COUNTRY_NAMES and len(arguments) == 1:
            return COUNTRY_NAMES[code]
        if name in {"pagename", "fullpagename", "subjectpagename", "basepagename"}:
            return self._title
        if ":" in name:
            return _function(arguments) or GAP
        return (_only_parameter(arguments) if inside and not is_dropped(name) else "") or GAP


_FUNCTIONS: dict[str, Renderer] = {
    "formatnum": numbers.RENDERERS["formatnum"],
    "lc": lambda call: call.get("1").lower(),
    "uc": lambda call: call.get("1").upper(),
    "lcfirst": lambda call: call.get("1")[:1].lower() + call.get("1")[1:],
    "ucfirst": lambda call: call.get("1")[:1].upper() + call.get("1")[1:],
}


def _function(arguments: list[str]) -> str:
    """Render parser functions of the form `{{name:value|…}}`."""
    name, _, value = arguments[0].strip().partition(":")
    renderer = _FUNCTIONS.get(name.lower())
    return renderer(parse_call(name.lower(), [value, *arguments[1:]])) if renderer else ""


def _only_parameter(arguments: list[str]) -> str:
    if len(arguments) != 2 or "=" in arguments[1] or len(arguments[1]) > 200 or _NOT_SHOWABLE.search(arguments[1]):
        return ""
    return arguments[1].strip()
