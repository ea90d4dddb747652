"""What a source says about a page besides its text: its language, its Wikidata item, its categories,
and the titles that lead to it.

A recipe names what it wants (`[chunk] metadata`). Language, item and categories become columns of
the passages, by which hits are filtered. Aliases become the first line of the article, so that
every retriever finds them and a changed alias changes a passage like any other text.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rag_model.corpus.records import (
    CATEGORY_SEPARATOR,
    MAX_TITLE,
    Metadata,
    MetadataName,
    Page,
    Passage,
    Section,
    Siteinfo,
)

VERSION = 1  # increase it when the same page would give other metadata
# Limits, because every passage of a page repeats its metadata.
MAX_CATEGORIES = 2_000  # characters
MAX_ALIAS_WORDS = 24
_CATEGORY = 14  # the namespace
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,34}")
_ITEM = re.compile(r"Q[1-9][0-9]{0,14}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # valid in JSON, but not in UTF-8
_WORD = re.compile(r"\w+")
_LINK = re.compile(r"\[\[\s*([^\W\d][^\[\]|:\n]{0,80}):\s*([^\[\]|\n#]{1,255})(?:\|[^\[\]\n]*)?\]\]")


def build_metadata(values: Mapping[str, Any]) -> Metadata:
    """Build metadata from the fields of a source; invalid values are left out.

    >>> build_metadata({"language": "de", "wikidata": "Q42", "categories": ["Schriftsteller"]})
    Metadata(language='de', wikidata='Q42', categories=('Schriftsteller',), aliases=())
    """
    return Metadata(
        language=_match_text(_LANGUAGE, values.get("language")),
        wikidata=_match_text(_ITEM, values.get("wikidata") or values.get("wikidata_id")),
        categories=_list_titles(values.get("categories")),
        aliases=_list_titles(values.get("aliases")),
    )


def parse_metadata(text: str) -> Metadata:
    """Parse the output of `format_metadata`; return empty metadata for any other text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Metadata()
    return build_metadata(values) if isinstance(values, dict) else Metadata()


def format_metadata(metadata: Metadata) -> str:
    """Return metadata as JSON, without unknown fields."""
    return json.dumps(metadata_to_dict(metadata), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def metadata_to_dict(metadata: Metadata) -> dict[str, Any]:
    """Return metadata as a dictionary of JSON values, without unknown fields."""
    values = {
        "language": metadata.language,
        "wikidata": metadata.wikidata,
        "categories": list(metadata.categories),
        "aliases": list(metadata.aliases),
    }
    return {name: value for name, value in values.items() if value}


def collect_metadata(page: Page, siteinfo: Siteinfo) -> Metadata:
    """Return the metadata of a page, with the wiki's language and the categories of its wikitext.

    Categories that only templates name are not in the wikitext.
    """
    metadata = page.metadata
    if not metadata.categories and page.model == "wikitext":
        metadata = replace(metadata, categories=find_categories(page.text, siteinfo))
    if not metadata.language:
        metadata = replace(metadata, language=_match_text(_LANGUAGE, siteinfo.language))
    return metadata


def find_categories(text: str, siteinfo: Siteinfo) -> tuple[str, ...]:
    """Return the categories that a page's wikitext names, in their order."""
    names = {name for name, key in siteinfo.namespaces.items() if key == _CATEGORY}
    links = (link for link in _LINK.finditer(text) if link[1].strip().lower() in names)
    return _list_titles([link[2].replace("_", " ") for link in links])


def add_aliases(sections: Sequence[Section], title: str, aliases: Iterable[str]) -> tuple[Section, ...]:
    """Return the sections with the aliases as the first sentence and line of the introduction.

    An alias is left out if the title and earlier aliases have all its words.
    """
    line = _join_aliases(title, aliases)
    if not line or not sections:
        return tuple(sections)
    first, *others = sections
    if first.heading:
        return (Section("", line), *sections)
    offset = len(line) + 1
    links = tuple((start + offset, end + offset) for start, end in first.links)
    text = f"{line}\n{first.text}" if first.text else line
    return (replace(first, text=text, links=links), *others)


def set_passage_metadata(
    passages: Iterable[Passage], metadata: Metadata, names: Collection[MetadataName]
) -> list[Passage]:
    """Return passages with the requested columns of their page's metadata."""
    language = metadata.language if "language" in names else ""
    item = metadata.wikidata if "wikidata" in names else ""
    categories = _join_categories(metadata.categories) if "categories" in names else ""
    if not (language or item or categories):
        return list(passages)
    return [replace(passage, language=language, wikidata=item, categories=categories) for passage in passages]


def _match_text(pattern: re.Pattern[str], value: object) -> str:
    return value if isinstance(value, str) and pattern.fullmatch(value) else ""


def _list_titles(value: object) -> tuple[str, ...]:
    """Return the distinct titles of a list, or of one text, in one line each."""
    values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    titles = (
        " ".join(_SURROGATE.sub("\ufffd", title).replace(CATEGORY_SEPARATOR, " ").split())
        for title in values
        if isinstance(title, str)
    )
    return tuple(dict.fromkeys(title for title in titles if 0 < len(title) <= MAX_TITLE))


def _join_categories(categories: Sequence[str]) -> str:
    """Join categories, and leave out those beyond `MAX_CATEGORIES` characters."""
    joined = CATEGORY_SEPARATOR.join(categories)
    if len(joined) <= MAX_CATEGORIES:
        return joined
    return joined[: MAX_CATEGORIES + 1].rpartition(CATEGORY_SEPARATOR)[0]


def _join_aliases(title: str, aliases: Iterable[str]) -> str:
    known_words, new_aliases, size = set(_WORD.findall(title.casefold())), list[str](), 0
    for alias in aliases:
        words = _WORD.findall(alias.casefold())
        if known_words.issuperset(words) or size + len(words) > MAX_ALIAS_WORDS:
            continue
        new_aliases.append(alias)
        known_words.update(words)
        size += len(words)
    return f"{'; '.join(new_aliases)}." if new_aliases else ""  # chunkers cut between sentences
