"""Render templates as the words that a reader sees.

A table maps the name of a template to a small function that renders it. Most templates show nothing
in running text (citations, infoboxes, navigation, notices, pictures): known ones are skipped
without parsing. An unknown template is judged by its position: alone on a line it is a box and is
dropped; inside a sentence, with exactly one parameter, it nearly always formats that parameter
(`{{largeur|12}}`), which is kept.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from rag_model.corpus.articles import get_base_language
from rag_model.corpus.markup import convert, dates, inline, measures
from rag_model.corpus.markup.inline import COUNTRY_NAMES
from rag_model.corpus.markup.literal import GAP
from rag_model.corpus.markup.scanner import Renderer, parse_call

ALL_RENDERERS: dict[str, Renderer] = (
    inline.INLINE_RENDERERS | dates.RENDERERS | measures.NUMBER_RENDERERS | convert.CONVERT_RENDERERS
)

# Prefixes of the names of templates that show no running text; `$` marks a complete name.
_DROPPED_NAMES = re.compile(
    # citations and their notes, in the wikis' larger languages
    r"cite |citation$|vcite|cite$|citar|cita |cit |harv|sfn|efn|refn?$|ref |reflist|refbegin|refend|"
    r"notelist|notetag|rp$|r$|notes?$|internetquelle|literatur|lien web|ouvrage|article$|citeweb|webarchive|"
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
    r"[a-z]+-stub|stub|categor|lock|bots$|engvar|#(?!if:|ifeq:|switch:)"
)
# Characters; MediaWiki allows as many bytes. Longer names are text of a page and not cached.
_MAX_NAME_LENGTH = 255
_CACHED_NAMES = 1 << 14  # cached names; a large wiki uses some thousands
# Values that are not text: a URL, several lines, no letter, or the name of a parameter or option.
_NOT_SHOWABLE = re.compile(
    r"https?:|\n|^\W*$|^\s*(?:date|year|name|title|link|nolink|text|short|long|full|left|right|center|"
    r"top|bottom|up|down|yes|no|none|on|off|true|false|nocat|small|inline|ref|url|id|lang|format)\s*$"
)


def normalize_name(name: str) -> str:
    """Normalise a template's name: lower case, single spaces, no namespace, truncated."""
    return _normalize_name(name[:_MAX_NAME_LENGTH])


@lru_cache(_CACHED_NAMES)
def _normalize_name(name: str) -> str:
    name = " ".join(name.replace("_", " ").split()).lower()
    return name.removeprefix("template:").removeprefix("subst:").strip()


def is_dropped(name: str) -> bool:
    """Return whether the template of this name, as written in wikitext, never shows text."""
    return _is_dropped(name[:_MAX_NAME_LENGTH])


@lru_cache(_CACHED_NAMES)
def _is_dropped(name: str) -> bool:
    name = _normalize_name(name)
    return name not in ALL_RENDERERS and _DROPPED_NAMES.match(name) is not None


class Templates:
    """Renders the templates of one page; the names of languages are shown on English wikis only."""

    def __init__(self, title: str = "", language: str = "en") -> None:
        self._title = title
        self._options = {} if get_base_language(language) in ("en", "") else {"label": "none"}

    def render(self, arguments: list[str], *, inside: bool) -> str:
        """Return the visible words of a template; its name is the first argument.

        `inside`: the template is within a line of text. A template without text becomes a gap,
        which separates its neighbours.
        """
        name = normalize_name(arguments[0])
        renderer = ALL_RENDERERS.get(name) or inline.find_family_renderer(name)
        if renderer is not None:
            call = parse_call(name, arguments[1:])
            call.params.update(self._options)
            return renderer(call) or GAP
        if (code := arguments[0].strip()) in COUNTRY_NAMES and len(arguments) == 1:
            return COUNTRY_NAMES[code]
        if name in {"pagename", "fullpagename", "subjectpagename", "basepagename"}:
            return self._title
        if ":" in name:
            return _render_function(arguments) or GAP
        return (_get_only_parameter(arguments) if inside and not is_dropped(name) else "") or GAP


def _choose_switch_case(value: str, cases: list[str]) -> str:
    """Return the result of the case that equals `value`, else the default; cases without a result
    share the next one.
    """
    matches, default = False, ""
    for case in cases:
        key, equals, result = (part.strip() for part in case.partition("="))
        matches = matches or key == value
        if equals and matches:
            return result
        if equals and key == "#default":
            default = result
    last = cases[-1] if cases else ""
    return default if "=" in last else last.strip()


def _pad_left(value: str, rest: list[str]) -> str:
    width, fill = (rest[0].strip() if rest else ""), (rest[1] if len(rest) > 1 else "0")
    missing = min(int(width), _MAX_PADDING) - len(value) if width.isascii() and width.isdecimal() else 0
    return (fill * max(0, missing))[: max(0, missing)] + value


def _get(texts: list[str], number: int) -> str:
    return texts[number].strip() if number < len(texts) else ""


_MAX_PADDING = 500  # characters, as in MediaWiki
# By name, from the text after the colon and the texts between the further bars.
_FUNCTIONS: dict[str, Callable[[str, list[str]], str]] = {
    "formatnum": lambda value, rest: measures.NUMBER_RENDERERS["formatnum"](parse_call("formatnum", [value, *rest])),
    "lc": lambda value, _: value.lower(),
    "uc": lambda value, _: value.upper(),
    "lcfirst": lambda value, _: value[:1].lower() + value[1:],
    "ucfirst": lambda value, _: value[:1].upper() + value[1:],
    "padleft": _pad_left,
    "plural": lambda value, rest: _get(rest, 0 if value in ("1", "-1") or len(rest) < 2 else 1),
    "#if": lambda value, rest: _get(rest, 0 if value else 1),
    "#ifeq": lambda value, rest: _get(rest, 1 if value == _get(rest, 0) else 2),
    "#switch": _choose_switch_case,
}


def _render_function(arguments: list[str]) -> str:
    """Render parser functions of the form `{{name:value|…}}`."""
    name, _, value = arguments[0].strip().partition(":")
    function = _FUNCTIONS.get(name.strip().lower())
    return function(value.strip(), arguments[1:]) if function else ""


def _get_only_parameter(arguments: list[str]) -> str:
    if len(arguments) != 2 or "=" in arguments[1] or len(arguments[1]) > 200 or _NOT_SHOWABLE.search(arguments[1]):
        return ""
    return arguments[1].strip()
