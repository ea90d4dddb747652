"""The templates that a dump defines: aliases, boxes without text, and small bodies.

Jobs read the pages of the template namespace once (`read_templates`), and their results are merged
into one table (`merge_templates`). A page then resolves the names that no renderer of this package
knows:

* a redirect is resolved to its target; if a known name redirects to a local name, the local name is
  an alias of it (`Template:Convert` -> `রূপান্তর`), as is a template that only calls a known module
* a body without Lua is expanded (`Templates`) if it is small and uses only parameters, `#if`,
  `#ifeq`, `#switch` and the functions of `templates`
* a table, a box, a notice, a note or a picture shows no text
* a portable infobox (`<infobox>`, as on Fandom's wikis) shows no text either, but if infoboxes are
  requested, it becomes its fields with their labels

Other templates are not in the table and are judged by their parameters. The results of a part and
the table have a maximum size, beyond which the last templates of the part and the longest bodies of
the table are omitted.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from rag_model.corpus.language_names import get_language_names
from rag_model.corpus.markup.blocks import strip_extensions
from rag_model.corpus.markup.literal import GAP, remove_noncharacters
from rag_model.corpus.markup.templates import is_dropped, is_known, normalize_name
from rag_model.corpus.records import Page
from rag_model.digest import canonical_json, digest_chunks

VERSION = 2  # increase it when the same pages would give a different table
TEMPLATE, _MESSAGE = 10, 8  # namespaces that are read
MAX_BODY = 2_000  # maximum characters of a template body that is expanded
_MAX_PART_BYTES = MAX_TABLE_BYTES = 8 << 20  # some 150,000 templates
_MAX_HOPS = 5  # maximum redirects that are followed; MediaWiki follows one

Kind = Literal["alias", "body", "box", "disambiguation", "infobox"]
NAMESPACES = (TEMPLATE, _MESSAGE)
_DISAMBIGUATION_LIST = "disambiguationspage"  # lists the disambiguation templates
_NO_INCLUDE = re.compile(r"<noinclude\b[^<>]*>.*?(?:</noinclude\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_ONLY_INCLUDE = re.compile(r"<onlyinclude\b[^<>]*>(.*?)</onlyinclude\s*>", re.IGNORECASE | re.DOTALL)
_INCLUDE_TAG = re.compile(r"</?(?:include|onlyinclude|noinclude)(?:only)?\b[^<>]*>", re.IGNORECASE)
_DISAMBIGUATION = re.compile(r"__disambig__|\{\{\s*#invoke:\s*(?:disambiguation|dmbox)\b", re.IGNORECASE)
_LUA = re.compile(r"\{\{\s*#invoke:\s*([^|{}\n/]+)", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"\{\{\s*(?:#(?!if:|ifeq:|switch:)|int:|safesubst:|subst:)", re.IGNORECASE)
_BOX = re.compile(
    r"\{\||<table\b|<ref\b|\{\{\s*#tag:\s*ref|display\s*:\s*none|float\s*:|__notoc__|id\s*=\s*[\"']?(?:stub|toc)\b"
    r"|class\s*=\s*[\"'][^\"'>]*(?:noprint|metadata|navbox|navframe|infobox|[atc]?mbox|hatnote|dablink|stub|notice"
    r"|inline-template|toccolours|boilerplate|error)"
    r"|\A\s*(?:<[^<>]*>\s*)*<sup\b",
    re.IGNORECASE,
)
_FIRST_CALL = re.compile(r"\s*(?:<[^<>]*>\s*)*\{\{\s*([^|{}\[\]<>\n#:]+)")
_LINK = re.compile(r"\[\[\s*:?([^\[\]|{}\n]{1,300})")
_INFOBOX = re.compile(r"<infobox\b", re.IGNORECASE)
_INFOBOX_TAG = re.compile(r"<(/?)(title|data|image|label|default|format)\b([^<>]*)>", re.IGNORECASE)
_SOURCE = re.compile(r"\bsource\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", re.IGNORECASE)
# Maximum fields of an infobox, and maximum characters of a label, a default or a format.
_MAX_FIELDS, _MAX_FIELD_TEXT = 200, 500


class TemplateEntry(NamedTuple):
    """How a template is rendered.

    `value` is the name of another template (for an alias), the body, or the fields of a portable
    infobox as JSON.
    """

    kind: Kind
    value: str = ""


_BOX_ENTRY = TemplateEntry("box")


def read_templates(pages: Iterable[Page], language: str, namespaces: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the templates among the pages of a part by name, as JSON values.

    A value is [kind or `redirect`, name or body]. If a page is given in several revisions, the last
    one is used.
    """
    redirect_words = "|".join(map(re.escape, ["#REDIRECT", *get_language_names(language).redirects]))
    redirect_pattern = re.compile(rf"\s*(?:{redirect_words})\s*:?\s*\[\[\s*([^\[\]|#]+)", re.IGNORECASE)
    templates: dict[str, list[str]] = {}
    bytes_left = _MAX_PART_BYTES
    for page in pages:
        text = remove_noncharacters(page.text)
        if page.namespace == _MESSAGE:
            if defines_templates(page.title, page.namespace):
                for link in _LINK.finditer(text):
                    name = _get_template_name(link[1], namespaces)
                    if any(map(str.isalpha, name)):
                        templates.setdefault(name, ["disambiguation", ""])
            continue
        name = normalize_name(page.title.partition(":")[2])
        redirect_match = redirect_pattern.match(text)
        target_name = _get_template_name(redirect_match[1], namespaces) if redirect_match else ""
        template_entry = ["redirect", target_name] if target_name else _classify_template(text)
        entry_characters = len(name) + len(template_entry[1]) if template_entry else 0
        if template_entry and name and (bytes_left := bytes_left - entry_characters) >= 0:
            templates[name] = list(template_entry)
    return templates


def defines_templates(title: str, namespace: int | None) -> bool:
    """Return whether a page defines a template, or lists the disambiguation templates.

    >>> [defines_templates(*page) for page in (("Template:Box", 10), ("MediaWiki:Edit", 8), ("Template", 0))]
    [True, False, False]
    """
    return namespace == TEMPLATE or (namespace == _MESSAGE and title.partition(":")[2].lower() == _DISAMBIGUATION_LIST)


def _get_template_name(title: str, namespaces: Mapping[str, int]) -> str:
    """Return the normalised name of a template's title, or "" for a page of another namespace."""
    prefix, colon, name = title.partition(":")
    is_template = colon and namespaces.get(" ".join(prefix.replace("_", " ").split()).lower()) == TEMPLATE
    return normalize_name(name) if is_template else ""


def _classify_template(text: str) -> TemplateEntry | list[str] | None:
    """Return the entry of a template; None if its words must be guessed from the call."""
    text = text[: 8 * MAX_BODY]
    if _DISAMBIGUATION.search(text):
        return TemplateEntry("disambiguation")
    included_parts = _ONLY_INCLUDE.findall(text)
    body = _INCLUDE_TAG.sub("", "".join(included_parts) if included_parts else _NO_INCLUDE.sub("", text))
    is_infobox = _INFOBOX.search(body) is not None
    if is_infobox or _BOX.search(body):
        return TemplateEntry("infobox", canonical_json(parse_infobox(body)).decode()) if is_infobox else _BOX_ENTRY
    body = strip_extensions(body).strip()
    if lua_match := _LUA.search(body):
        module_name = normalize_name(lua_match[1])
        return TemplateEntry("alias", module_name) if is_known(module_name) else None
    call_match = _FIRST_CALL.match(body)
    if not body.strip(GAP) or (call_match and is_dropped(call_match[1])):
        return _BOX_ENTRY
    return None if len(body) > MAX_BODY or _UNSUPPORTED.search(body) else TemplateEntry("body", body)


def parse_infobox(body: str) -> list[list[str]]:
    """Return [parameter, label, default, format] for each field of a portable infobox.

    The title is a field without a label. Pictures, headers and navigation are not fields.

    >>> parse_infobox('<infobox><data source="hp"><label>Health</label><format>{{{hp}}} HP</format></data></infobox>')
    [['hp', 'Health', '', '{{{hp}}} HP']]
    """
    fields: list[list[str]] = []
    is_open = False
    tags = list(_INFOBOX_TAG.finditer(body))
    for tag, next_tag in zip(tags, [*tags[1:], None], strict=True):
        is_closing, name, attributes = tag[1], tag[2].lower(), tag[3]
        if name in ("title", "data", "image"):
            is_open = not is_closing and name != "image" and not attributes.endswith("/") and len(fields) < _MAX_FIELDS
            source_match = _SOURCE.search(attributes)
            if not is_closing and name != "image" and len(fields) < _MAX_FIELDS:
                fields.append([(source_match[1] or source_match[2] or "").strip() if source_match else "", "", "", ""])
        elif is_open and not is_closing and next_tag is not None:
            text = body[tag.end() : next_tag.start()].strip()
            fields[-1][1 + ("label", "default", "format").index(name)] = text[:_MAX_FIELD_TEXT]
    return fields


def merge_templates(parts: Iterable[Mapping[str, list[str]]]) -> "TemplateTable":
    """Merge the templates of all parts into the table of a wiki."""
    entries: dict[str, TemplateEntry] = {}
    redirects: dict[str, str] = {}
    for part_entries in parts:
        for name, (kind, value) in part_entries.items():
            if kind == "redirect":
                redirects[name] = value
            elif kind == "disambiguation" or name not in entries:
                entries[name] = TemplateEntry(kind, value)  # type: ignore[arg-type]
    for name, target in sorted(redirects.items()):  # a known name that redirects to a local name
        if is_known(name) and not is_known(target):
            for hop in _follow_redirects(target, redirects):
                if hop not in redirects and hop not in entries and not is_known(hop):
                    entries[hop] = TemplateEntry("alias", name)
    for name, target in redirects.items():
        *_, last_hop = _follow_redirects(target, redirects)
        if not is_known(name) and (is_known(last_hop) or last_hop in entries):
            hop_entry = entries.get(last_hop, TemplateEntry("alias", last_hop))
            entries[name] = hop_entry if hop_entry.kind not in {"body", "infobox"} else TemplateEntry("alias", last_hop)
    bytes_left, table_entries = MAX_TABLE_BYTES, dict[str, TemplateEntry]()
    for name, entry in sorted(entries.items(), key=lambda item: (len(item[1].value), item)):
        bytes_left -= len(name.encode()) + len(entry.value.encode())
        if bytes_left < 0:
            break
        table_entries[name] = entry
    return TemplateTable(table_entries)


def _follow_redirects(name: str, redirects: Mapping[str, str]) -> list[str]:
    hops = [name]
    while hops[-1] in redirects and redirects[hops[-1]] not in hops and len(hops) < _MAX_HOPS:
        hops.append(redirects[hops[-1]])
    return hops


@dataclass(frozen=True)
class TemplateTable:
    """The templates of a wiki by their normalised names."""

    entries: Mapping[str, TemplateEntry]

    def __bool__(self) -> bool:
        """Return whether there are templates."""
        return bool(self.entries)

    @cached_property
    def disambiguation(self) -> re.Pattern[str] | None:
        """Pattern of the calls of disambiguation templates; None if there are no such templates."""
        names = sorted(name for name, template_entry in self.entries.items() if template_entry.kind == "disambiguation")
        if not names:
            return None
        names_pattern = "|".join(re.escape(name).replace(r"\ ", "[ _]") for name in names)
        return re.compile(rf"\{{\{{[\s_]*(?i:{names_pattern})[\s_]*(?:\||\}}\}}|<!--)")

    def compute_digest(self, names: Iterable[str]) -> bytes:
        """Return a digest of the entries of these names; empty if none has an entry."""
        used_entries = [(name, *self.entries[name]) for name in sorted(names) if name in self.entries]
        return digest_chunks([canonical_json(used_entries)])[-32:].encode() if used_entries else b""

    def to_bytes(self) -> bytes:
        """Return the table as JSON; equal tables give equal bytes."""
        return canonical_json({name: list(entry) for name, entry in sorted(self.entries.items())})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a table from the JSON of `to_bytes`."""
        entries: dict[str, list[Any]] = json.loads(data)
        return cls({name: TemplateEntry(kind, value) for name, (kind, value) in entries.items()})


NO_TEMPLATES = TemplateTable({})
