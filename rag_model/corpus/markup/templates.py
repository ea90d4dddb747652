"""Render templates as the words that a reader sees.

A table maps the name of a template to a small function that renders it. Most templates show nothing
in running text (citations, infoboxes, navigation, notices, pictures): known templates of this kind
are skipped without parsing. What an unknown template shows is guessed from its position and its
parameters. Inside a sentence, an unknown template nearly always formats one of its parameters
(`{{largeur|12}}`, `{{仮リンク|県|en|Prefecture}}`), which is kept (`choose_words`). Alone on a line, it
is a box and is dropped, unless it quotes a sentence or contains a list (`choose_prose`). If the
templates of the wiki are known (`template_table`), the name of an unknown template is resolved or
its body is expanded instead, up to a limit for each page.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from rag_model.corpus.articles import get_base_language
from rag_model.corpus.language_names import get_language_names
from rag_model.corpus.markup import convert, inline
from rag_model.corpus.markup.dates_and_numbers import (
    COORDINATES,
    DATE_RENDERERS,
    NUMBER_RENDERERS,
    render_coordinates,
    render_number_date,
)
from rag_model.corpus.markup.inline import COUNTRY_NAMES
from rag_model.corpus.markup.literal import GAP
from rag_model.corpus.markup.prose import SENTENCE_ENDS
from rag_model.corpus.markup.scanner import LinkRenderer, Renderer, Scanner, TemplateCall, parse_call

if TYPE_CHECKING:
    from rag_model.corpus.markup.template_table import TemplateEntry, TemplateTable

ALL_RENDERERS: dict[str, Renderer] = (
    inline.INLINE_RENDERERS | DATE_RENDERERS | NUMBER_RENDERERS | convert.CONVERT_RENDERERS
)

# Prefixes of the names of templates that show no running text; `$` marks a complete name.
_DROPPED_NAMES = re.compile(
    # citations and their notes, in the wikis' larger languages
    r"cite |citation$|vcite|cite(?:[a-z]+)?$|citar|cita |cit |harv|sfn|efn|refn?$|ref[ +-]|reflist|refbegin|refend|"
    r"refnest|reftag|namedref|cnote|cref|note label|notefoot|bar (?:percent|pixel|box|chart)|"
    r"notelist|notetag|rp$|r$|notes?$|internetquelle|literatur|lien web|ouvrage|article$|citeweb|webarchive|"
    r"wayback|dead link|google books|"
    # complaints of editors
    r"citation needed|citation required|cn$|fact$|clarify|when$|who$|whom\?|by whom|which$|where$|why$|"
    r"how$|vague|according to|page needed|pn$|better source|unreliable|verify|failed verification|dubious|"
    r"disputed|pov|original research|or$|specify|update|refimprove|unreferenced|more |multiple issues|"
    r"expand|empty section|cleanup|weasel|peacock|"
    # boxes, bars, notices above the text
    r"infobox|taxobox|automatic taxobox|speciesbox|navbox|sidebar|geobox|chembox|drugbox|main$|main |see "
    r"also|seealso|further|details|about|for$|for2|other |otheruses|redirect|distinguish|hatnote|selfref|"
    r"dablink|rellink|portal|commons|"
    r"wiki[a-z]|sister|use [a-z]+ (?:dates|english)|pp-|protected|good article|featured|coord|authority "
    r"control|defaultsort|short description|italic title|displaytitle|toc|clear|anchor|flagicon|flagdeco|"
    r"flag icon|multiple image|double image|wide image|triple image|image|css image|listen|audio|gallery|"
    r"location map|succession|s-[a-z]|start box|end box|col-|div col|colbegin|colend|legend|bartable|chart|"
    r"clade|ahnentafel|family tree|weather box|graph|inflation|issn|oclc|doi|imdb|dmoz|official |"
    r"[a-z]+-stub|stub|categor|lock|bots$|engvar|#(?!if:|ifeq:|switch:)"
)
# Maximum characters of a template name (MediaWiki limits its bytes). Longer names are text of a
# page, and are cut so that the cache stays small.
_MAX_NAME_LENGTH = 255
_CACHED_NAMES = 1 << 14  # maximum number of cached names; a large wiki uses a few thousand
# Values that are not text: a URL, several lines, no letter, a file, a colour, a length, a link that
# is not shown, or the name of a parameter or option.
_NOT_SHOWABLE = re.compile(
    r"(?<!\[)https?:|\n|^\W*$|^[#:]|^[\d.]+ ?(?:px|r?em|ex)$|"
    r"\.(?:jpe?g|png|svg|gif|tiff?|webp|og[gav]|wav|mp[34]|webm|pdf)\s*$|^\s*(?:date|year|name|title|link|nolink|text|short|long|full|left|right|center|"
    r"top|bottom|up|down|yes|no|none|on|off|true|false|nocat|small|inline|ref|url|id|lang|format)\s*$"
)

_MAX_EXPANDED = 1 << 20  # maximum characters of expanded bodies and results in a page
_MAX_NESTED = 20  # maximum depth of nested bodies; MediaWiki allows 40
# names of parameters that contain the words to show
_LABELS = ("label", "lt", "text", "txt", "xt", "display")
_PAIR_OF_DATES = 6  # number of parameters of a date of birth and a date of death
_LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,12})*")
_OPTION = re.compile(
    r"(?:dark|light|medium|pale)?(?:red|green|blue|yellow|orange|black|white|gr[ae]y|purple|pink|brown|cyan|slategray)"
    r"|smaller|larger|normal|bold|italics?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+−]?\d[\d.,  ]*")
_MAX_UNIT = 12  # maximum characters of a unit after a number
_MAX_WORDS = 400  # maximum characters of a parameter that is shown in a sentence
_NOTE_LENGTH = 40  # characters; a longer sentence within another sentence is a note
_REMARK_LENGTH = 60  # characters; a longer English text on a wiki without Latin script is a remark
_QUOTATION = re.compile(rf"(?s)\W*\w.*[{SENTENCE_ENDS}][\"'”»›」』)\]]{{0,4}}\s*")
_MIN_QUOTATION = 40  # minimum characters; a character that is not ASCII counts twice
_LIST_START = re.compile(r"\s*\n\s*[*#;:]|[*#;:]+ *[^\s*#;:].*\n\s*[*#;:]")
_MAX_QUOTATION_PARAMETERS = 6  # a template with more parameters is a box
_MAX_PADDING = 500  # maximum characters, as in MediaWiki


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
    return name not in ALL_RENDERERS and name not in COORDINATES and _DROPPED_NAMES.match(name) is not None


def is_known(name: str) -> bool:
    """Return whether a normalised name has a renderer, or never shows text."""
    return name in ALL_RENDERERS or _is_dropped(name) or inline.find_family_renderer(name) is not None


@dataclass(slots=True)
class TemplateUse:
    """The templates of a wiki, and the template names that one page looked up."""

    table: "TemplateTable"
    names: set[str] = field(default_factory=set)


# A context variable, because `clean` of a plugin's format has no parameter for the templates.
_CURRENT_USE: ContextVar[TemplateUse | None] = ContextVar("template_use", default=None)


@contextmanager
def use_templates(table: "TemplateTable") -> Iterator[TemplateUse]:
    """Within the block, resolve unknown templates of all cleaned pages with a table."""
    template_use = TemplateUse(table)
    context_token = _CURRENT_USE.set(template_use)
    try:
        yield template_use
    finally:
        _CURRENT_USE.reset(context_token)


class Templates:
    """Renders the templates of one page. English words that a template adds, such as *born*, are
    shown on English wikis only.
    """

    def __init__(
        self,
        title: str = "",
        language: str = "en",
        render_link: LinkRenderer | None = None,
        namespace_names: Collection[str] = (),
    ) -> None:
        """Store the title, the renderer of links, and the local names of the template namespace."""
        self._title = title
        self._prefixes = namespace_names
        self._language = get_base_language(language)
        self._render_link = render_link or (lambda arguments: arguments[-1])
        self._use = _CURRENT_USE.get()
        self._open_names: list[str] = []  # templates whose bodies are being expanded
        self._characters_left = _MAX_EXPANDED

    def render(self, arguments: list[str], *, inside: bool) -> str:
        """Return the visible words of a template; its name is the first argument.

        `inside` says whether the template is within a line of text. A template without text becomes
        a gap, which separates its neighbours.
        """
        name = normalize_name(arguments[0])
        renderer = ALL_RENDERERS.get(name) or inline.find_family_renderer(name)
        if renderer is not None:
            return renderer(parse_call(name, arguments[1:], self._language)) or GAP
        if (country_code := arguments[0].strip()) in COUNTRY_NAMES and len(arguments) == 1:
            return COUNTRY_NAMES[country_code] if self._language in ("en", "") else country_code
        if name in {"pagename", "fullpagename", "subjectpagename", "basepagename"}:
            return self._title
        if ":" in name:
            prefix, _, local_name = arguments[0].strip().partition(":")
            if normalize_name(prefix) in self._prefixes:
                return self.render([local_name, *arguments[1:]], inside=inside)
            return _render_function(arguments) or GAP
        return ("" if is_dropped(name) else self._render_unknown(name, arguments[1:], inside=inside)) or GAP

    def has_infobox(self, name: str) -> bool:
        """Return whether the wiki defines a portable infobox of this normalised name."""
        return self._find_infobox(name) is not None

    def list_infobox_fields(self, name: str, arguments: list[str]) -> list[tuple[str, str]] | None:
        """Return the labels and values of a portable infobox; None for other templates."""
        infobox = self._find_infobox(name)
        if infobox is None:
            return None
        call = parse_call(name, arguments, self._language)
        fields: list[tuple[str, str]] = []
        for parameter_name, label, default, value_format in json.loads(infobox):
            argument = call.params.get(parameter_name, "")
            text = default if not argument else value_format
            words = self._expand_body(text, call) if text else argument
            if words and (label or words != self._title):
                fields.append((self._expand_body(label, call) or "", words))
        return fields

    def _find_infobox(self, name: str) -> str | None:
        if self._use is None:
            return None
        template_entry = self._use.table.entries.get(name)
        names = [name]
        if template_entry is not None and template_entry.kind == "alias":
            names.append(template_entry.value)
            template_entry = self._use.table.entries.get(template_entry.value)
        if template_entry is None or template_entry.kind != "infobox":
            return None
        self._use.names.update(names)
        return template_entry.value

    def _render_unknown(self, name: str, arguments: list[str], *, inside: bool) -> str:
        call = parse_call(name, arguments, self._language)
        if name in COORDINATES:
            is_shown = inside and call.get("display") != "title"
            return render_coordinates(call) if is_shown else ""
        if self._use is not None:
            self._use.names.add(name)
            template_entry = self._use.table.entries.get(name)
            if template_entry is not None and name not in self._open_names and len(self._open_names) < _MAX_NESTED:
                entry_words = self._render_entry(template_entry, call, arguments, inside=inside)
                if entry_words is not None:
                    return entry_words
        return choose_words(call) if inside else choose_prose(call)

    def _render_entry(
        self, entry: "TemplateEntry", call: TemplateCall, arguments: list[str], *, inside: bool
    ) -> str | None:
        """Render a template of the wiki's table; None if its words must be guessed instead."""
        if entry.kind == "alias":
            self._open_names.append(call.name)
            alias_words = self.render([entry.value, *arguments], inside=inside)
            self._open_names.pop()
            return alias_words
        if entry.kind != "body":
            return ""
        words = self._expand_body(entry.value, call)
        if words is None or inside:
            return words
        is_prose = "{{{" in entry.value and entry.value[:1] not in ":*#'" and "<div" not in entry.value
        return f"\n{words}\n" if is_prose and _QUOTATION.fullmatch(words) else None

    def _expand_body(self, body: str, call: TemplateCall) -> str | None:
        """Expand a body with the parameters of a call; None if the page exceeds `_MAX_EXPANDED`."""

        def get_parameter(arguments: list[str]) -> str:
            argument = call.params.get(arguments[0].strip())
            argument = "|".join(arguments[1:]) if argument is None else argument
            self._characters_left -= len(argument)
            return argument if self._characters_left > 0 else ""

        self._characters_left -= len(body)
        if self._characters_left <= 0:
            return None
        self._open_names.append(call.name)
        scanner = Scanner(self.render, self._render_link, is_dropped, get_parameter=get_parameter)
        words = scanner.expand(f" {body}").strip()  # the space marks that no line starts here
        self._open_names.pop()
        self._characters_left -= len(words)
        return words


def choose_words(call: TemplateCall) -> str:
    """Return the words that an unknown template within a sentence probably shows, or "".

    This is the first parameter that is text, without a language code before a name. A number keeps
    its unit, and a day, a month and a year are a date.

    >>> choose_words(parse_call("仮リンク", ["県", "en", "Prefecture"], "ja"))
    '県'
    >>> choose_words(parse_call("unité", ["300", "km"], "fr"))
    '300 km'
    >>> choose_words(parse_call("дн", ["27", "1", "1839"], "uk"))
    '27 січня 1839'
    """
    arguments = [argument for argument in call.get_positional() if argument]
    date = render_number_date(call, arguments)
    if date and len(arguments) < _PAIR_OF_DATES:
        return date
    if coordinates := render_coordinates(call):
        return coordinates
    if len(arguments) > 1 and _NUMBER.fullmatch(arguments[0]):
        if measure := convert.render_measure(call):
            return measure
        quantity, unit = arguments[:2]
        is_unit = len(unit) <= _MAX_UNIT and not _NUMBER.fullmatch(unit) and not _NOT_SHOWABLE.search(unit)
        return f"{quantity} {unit}" if is_unit and not date else ""
    label = call.get(*_LABELS)
    candidates = [label] if label else arguments
    code_positions = [i for i, candidate in enumerate(candidates) if _LANGUAGE_CODE.fullmatch(candidate)]
    leading_code = candidates[0] if code_positions[:1] == [0] and len(candidates) > 1 else ""
    words = [candidate for candidate in candidates if _is_showable(candidate, call, is_translated=bool(code_positions))]
    if len(candidates) > 1:
        words = [word for word in words if not (_OPTION.fullmatch(word) or _LANGUAGE_CODE.fullmatch(word))]
    if leading_code and not _is_latin(call.language):  # `{{tsl|en|English|目標}}`
        words = [word for word in words if not word.isascii()] or ([] if leading_code == "en" else words)
    return words[0] if words and words[0] not in COUNTRY_NAMES else ""


def choose_prose(call: TemplateCall) -> str:
    """Return the prose of an unknown template alone on a line: a quotation, lists, a link, or "".

    >>> choose_prose(parse_call("цитата", ["Мова росте елементарно, разом з душею народу."], "uk")).strip()
    'Мова росте елементарно, разом з душею народу.'
    >>> choose_prose(parse_call("infobox", ["name=A", "text"]))
    ''
    """
    arguments = [argument for argument in call.get_positional() if argument]
    list_arguments = [argument for argument in arguments if _LIST_START.match(argument)]
    if list_arguments:
        return "\n" + "\n".join(list_arguments) + "\n"
    if len(arguments) > 1 and any(_LANGUAGE_CODE.fullmatch(argument) for argument in arguments[:2]):
        return choose_words(call)
    words = call.get("1", "text", "quote")
    width = len(words) + sum(not character.isascii() for character in words)
    if width < _MIN_QUOTATION or len(call.params) > _MAX_QUOTATION_PARAMETERS or not _QUOTATION.fullmatch(words):
        return ""
    return "" if words.isascii() and not _is_latin(call.language) else f"\n{words}\n"


def _is_showable(argument: str, call: TemplateCall, *, is_translated: bool) -> bool:
    if len(argument) > _MAX_WORDS or _NOT_SHOWABLE.search(argument):
        return False
    if len(argument) > _NOTE_LENGTH and argument.rstrip(" '\"”»)")[-1:] in SENTENCE_ENDS:
        return False
    return is_translated or len(argument) <= _REMARK_LENGTH or not argument.isascii() or _is_latin(call.language)


@cache
def _is_latin(language: str) -> bool:
    """Return whether a language is written in Latin letters, judged by its month names."""
    months = "".join(get_language_names(language).months)
    return not months or any(character.isalpha() and character.isascii() for character in months)


def _choose_switch_case(searched_case: str, cases: list[str]) -> str:
    """Return the result of the case that equals `searched_case`, else the default.

    A case without a result has the result of the next one.
    """
    has_matched, default_result = False, ""
    for case in cases:
        case_key, equals, result = (case_part.strip() for case_part in case.partition("="))
        has_matched = has_matched or case_key == searched_case
        if equals and has_matched:
            return result
        if equals and case_key == "#default":
            default_result = result
    last_case = cases[-1] if cases else ""
    return default_result if "=" in last_case else last_case.strip()


def _pad_left(text: str, arguments: list[str]) -> str:
    pad_width, fill_text = (arguments[0].strip() if arguments else ""), (arguments[1] if len(arguments) > 1 else "0")
    n_missing = min(int(pad_width), _MAX_PADDING) - len(text) if pad_width.isascii() and pad_width.isdecimal() else 0
    return (fill_text * max(0, n_missing))[: max(0, n_missing)] + text


def _get_stripped(texts: list[str], argument_number: int) -> str:
    return texts[argument_number].strip() if argument_number < len(texts) else ""


# Parser functions by name; the arguments are the text after the colon and the strings between `|`.
_FUNCTIONS: dict[str, Callable[[str, list[str]], str]] = {
    "formatnum": lambda value, rest: NUMBER_RENDERERS["formatnum"](parse_call("formatnum", [value, *rest])),
    "lc": lambda value, _: value.lower(),
    "uc": lambda value, _: value.upper(),
    "lcfirst": lambda value, _: value[:1].lower() + value[1:],
    "ucfirst": lambda value, _: value[:1].upper() + value[1:],
    "padleft": _pad_left,
    "plural": lambda value, rest: _get_stripped(rest, 0 if value in ("1", "-1") or len(rest) < 2 else 1),
    "#if": lambda value, rest: _get_stripped(rest, 0 if value else 1),
    "#ifeq": lambda value, rest: _get_stripped(rest, 1 if value == _get_stripped(rest, 0) else 2),
    "#switch": _choose_switch_case,
}


def _render_function(arguments: list[str]) -> str:
    """Render parser functions of the form `{{name:value|…}}`."""
    name, _, argument = arguments[0].strip().partition(":")
    parser_function = _FUNCTIONS.get(name.strip().lower())
    return parser_function(argument.strip(f" \n\t{GAP}"), arguments[1:]) if parser_function else ""
