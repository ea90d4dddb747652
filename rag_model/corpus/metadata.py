"""Metadata of pages: the language, the Wikidata item, the categories, and the aliases.

Aliases are titles that redirect to a page. A recipe lists the metadata to store (`[chunk]
metadata`). Language, item and categories become columns of the passages, by which hits are
filtered. Aliases become the first line of the article, so that every retriever finds them and a
changed alias changes a passage like any other text.

In a wiki's export, the aliases and the Wikidata item are not part of the page: redirects are
separate pages anywhere in the dump, and Wikidata items are in another file. Jobs read redirects and
items once and write them to Arrow files. The chunk job maps these files into memory to look up each
page (`PageTable`). Redirects are sorted by a hash of their target's title. The first bits of the
hash select the file, so that no process needs memory for all redirects of a wiki.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
from rag_model.errors import InputError

VERSION = 1  # increase it when the same page would give other metadata
# These limits are needed because every passage of a page repeats the page's metadata.
MAX_CATEGORIES = 2_000  # characters
MAX_ALIAS_WORDS = 24
_FIELDS = tuple(field.name for field in fields(Metadata))
_CATEGORY = 14  # number of the category namespace
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,34}")
_ITEM = re.compile(r"Q[1-9][0-9]{0,14}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # valid in JSON, but not in UTF-8
_WORD = re.compile(r"\w+")
_NAMESPACE_LINK = re.compile(r"\[\[\s*([^\W\d][^\[\]|:\n]{0,80}):\s*([^\[\]|\n#]{1,255})(?:\|[^\[\]\n]*)?\]\]")
TABLE_VERSION = 2  # increase it when the same pages or properties would give other files
_REDIRECT_SCHEMA = pa.schema(
    # `title` is the target of a redirect, and `key` its hash. `page_id` and `alias` are the id and
    # the title of the redirect itself.
    [("key", pa.uint64()), ("title", pa.string()), ("page_id", pa.int64()), ("alias", pa.string())]
)
_ITEM_SCHEMA = pa.schema([("page_id", pa.int64()), ("item", pa.int64())])
_KEY_BITS = 64
_ITEM_BATCH_ROWS = 1 << 16
_REDIRECT_TARGET = re.compile(r"[^\[]*\[\[[\s_:]*([^\[\]|#\n]*)(#?)")
_PROPERTY = re.compile(rb"\((\d{1,18}),'wikibase_item','Q(\d{1,15})',")
_MAX_PROPERTY_BYTES = 64  # maximum length of a match of `_PROPERTY`


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
        json_fields = json.loads(text)
    except (ValueError, RecursionError):
        return Metadata()
    return build_metadata(json_fields) if isinstance(json_fields, dict) else Metadata()


def format_metadata(metadata: Metadata) -> str:
    """Return metadata as JSON, without empty fields."""
    return json.dumps(metadata_to_dict(metadata), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def metadata_to_dict(metadata: Metadata) -> dict[str, Any]:
    """Return metadata as a dictionary of JSON values, without empty fields."""
    json_fields = {
        "language": metadata.language,
        "wikidata": metadata.wikidata,
        "categories": list(metadata.categories),
        "aliases": list(metadata.aliases),
    }
    return {name: field_value for name, field_value in json_fields.items() if field_value}


def merge_metadata(metadata: Metadata, other: Metadata) -> Metadata:
    """Return `metadata` with its empty fields filled from `other`."""
    return Metadata(**{name: getattr(metadata, name) or getattr(other, name) for name in _FIELDS})


def collect_metadata(page: Page, siteinfo: Siteinfo) -> Metadata:
    """Return the metadata of a page, with the wiki's language and the categories of its wikitext.

    Categories that come from templates are not found, because the wikitext does not name them.
    """
    metadata = page.metadata
    if not metadata.categories and page.model == "wikitext":
        metadata = replace(metadata, categories=find_categories(page.text, siteinfo))
    if not metadata.language:
        metadata = replace(metadata, language=_match_text(_LANGUAGE, siteinfo.language))
    return metadata


def find_categories(text: str, siteinfo: Siteinfo) -> tuple[str, ...]:
    """Return the categories that a page's wikitext names, in their order."""
    prefixes = {name for name, number in siteinfo.namespaces.items() if number == _CATEGORY}
    links = (link for link in _NAMESPACE_LINK.finditer(text) if link[1].strip().lower() in prefixes)
    return _list_titles([link[2].replace("_", " ") for link in links])


def add_aliases(sections: Sequence[Section], title: str, aliases: Iterable[str]) -> tuple[Section, ...]:
    """Return the sections with the aliases as the first sentence and line of the introduction.

    An alias is left out if the title and the earlier aliases contain all its words.
    """
    new_aliases = select_aliases(title, aliases)
    if not new_aliases or not sections:
        return tuple(sections)
    alias_line = f"{'; '.join(new_aliases)}."  # chunkers cut between sentences
    first_section, *other_sections = sections
    if first_section.heading:
        return (Section("", alias_line), *sections)
    alias_length = len(alias_line) + 1
    links = tuple((start + alias_length, end + alias_length) for start, end in first_section.links)
    text = f"{alias_line}\n{first_section.text}" if first_section.text else alias_line
    return (replace(first_section, text=text, links=links), *other_sections)


def set_passage_metadata(
    passages: Iterable[Passage], metadata: Metadata, metadata_names: Collection[MetadataName]
) -> list[Passage]:
    """Return passages with the requested columns of their page's metadata."""
    language = metadata.language if "language" in metadata_names else ""
    wikidata_item = metadata.wikidata if "wikidata" in metadata_names else ""
    categories = _join_categories(metadata.categories) if "categories" in metadata_names else ""
    if not (language or wikidata_item or categories):
        return list(passages)
    return [replace(passage, language=language, wikidata=wikidata_item, categories=categories) for passage in passages]


def _match_text(pattern: re.Pattern[str], value: object) -> str:
    return value if isinstance(value, str) and pattern.fullmatch(value) else ""


def _list_titles(value: object) -> tuple[str, ...]:
    """Return the distinct titles in a list or a string, without line breaks; drop long titles."""
    values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    titles = (
        " ".join(_SURROGATE.sub("\ufffd", title).replace(CATEGORY_SEPARATOR, " ").split())
        for title in values
        if isinstance(title, str)
    )
    return tuple(dict.fromkeys(title for title in titles if 0 < len(title) <= MAX_TITLE))


def _join_categories(categories: Sequence[str]) -> str:
    """Join the first categories, in at most `MAX_CATEGORIES` characters."""
    joined_categories = CATEGORY_SEPARATOR.join(categories)
    if len(joined_categories) <= MAX_CATEGORIES:
        return joined_categories
    return joined_categories[: MAX_CATEGORIES + 1].rpartition(CATEGORY_SEPARATOR)[0]


def select_aliases(title: str, aliases: Iterable[str]) -> tuple[str, ...]:
    """Return the aliases with words that neither the title nor an earlier alias has.

    These aliases have at most `MAX_ALIAS_WORDS` words together.

    >>> select_aliases("Ada Lovelace", ["Lovelace, Ada", "Ada King"])
    ('Ada King',)
    """
    known_words, new_aliases, n_words = set(_WORD.findall(title.casefold())), list[str](), 0
    for alias in aliases:
        words = _WORD.findall(alias.casefold())
        if known_words.issuperset(words) or n_words + len(words) > MAX_ALIAS_WORDS:
            continue
        new_aliases.append(alias)
        known_words.update(words)
        n_words += len(words)
    return tuple(new_aliases)


def write_redirects(pages: Iterable[Page], siteinfo: Siteinfo, path: Path) -> int:
    """Write a part's redirects in the article namespace; return their number.

    The rows are sorted by the hash of the target's title. A redirect to a section is left out,
    because it names only a part of the article's subject.
    """
    rows: set[tuple[int, str, int, str]] = set()
    for page in pages:
        target_title = _find_target(page, siteinfo)
        if target_title and target_title != page.title and page.namespace == 0:
            rows.add((_hash_title(target_title), target_title, page.page_id, page.title))
    columns = zip(*sorted(rows), strict=True) if rows else [()] * len(_REDIRECT_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _REDIRECT_SCHEMA, strict=True)]
    _write_table(pa.table(arrays, schema=_REDIRECT_SCHEMA), path)
    return len(rows)


def _find_target(page: Page, siteinfo: Siteinfo) -> str:
    """Return the title of a redirect's target; empty if the target is a section or unknown."""
    link_match = _REDIRECT_TARGET.match(page.text)
    if link_match is not None and link_match[2]:
        return ""
    if page.target or link_match is None:
        return page.target
    # Exports before 2012 do not name the target.
    title = " ".join(link_match[1].replace("_", " ").split())
    return title[:1].upper() + title[1:] if siteinfo.case == "first-letter" else title


def _hash_title(title: str) -> int:
    return int.from_bytes(hashlib.blake2b(title.encode(), digest_size=_KEY_BITS // 8).digest(), "big")


def merge_redirects(paths: Iterable[Path], prefix: int, n_bits: int, out: Path, removed: Collection[int] = ()) -> None:
    """Merge the parts' redirects with keys that start with the `n_bits` bits of `prefix`.

    `paths` are the files of `write_redirects`. Redirects whose ids are in `removed` are left out,
    because their titles were taken down.
    """
    first_key, end_key = (bound << _KEY_BITS - n_bits for bound in (prefix, prefix + 1))
    matching_tables = []
    for path in paths:
        table = _map_table(path)
        keys = _get_keys(table)
        start_row = np.searchsorted(keys, np.uint64(first_key))
        end_row = len(keys) if end_key >> _KEY_BITS else np.searchsorted(keys, np.uint64(end_key))
        matching_tables.append(table.slice(start_row, end_row - start_row))
    # Grouping removes the duplicates of a page that is in the dump twice.
    table = pa.concat_tables(matching_tables)
    if removed:
        removed_array = pa.array(sorted(removed), pa.int64())
        table = table.filter(pc.invert(pc.is_in(table["page_id"], removed_array)))
    table = table.group_by(_REDIRECT_SCHEMA.names).aggregate([])
    sort_keys = [(name, "ascending") for name in _REDIRECT_SCHEMA.names]
    _write_table(table.select(_REDIRECT_SCHEMA.names).sort_by(sort_keys), out)


def write_items(chunks: Iterable[bytes], location: str, out: Path) -> int:
    """Write the Wikidata items of a table of page properties (an SQL dump); return their number.

    Raises:
        InputError: The file has no table of page properties; the message starts with `location`.
    """
    n_rows = 0
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_file(sink, _ITEM_SCHEMA) as writer:
        for batch in _iter_item_batches(chunks, location):
            writer.write_batch(batch)
            n_rows += len(batch)
    return n_rows


def _iter_item_batches(chunks: Iterable[bytes], location: str) -> Iterator[pa.RecordBatch]:
    unparsed_bytes, has_table, page_items = b"", False, list[tuple[int, int]]()
    for chunk in chunks:
        unread_bytes, row_end = unparsed_bytes + chunk, 0
        has_table = has_table or b"page_props" in unread_bytes
        for row_match in _PROPERTY.finditer(unread_bytes):  # quotes inside a value are escaped
            page_items.append((int(row_match[1]), int(row_match[2])))
            row_end = row_match.end()
        unparsed_bytes = unread_bytes[max(row_end, len(unread_bytes) - _MAX_PROPERTY_BYTES) :]
        if len(page_items) >= _ITEM_BATCH_ROWS:
            yield _to_batch(page_items)
            page_items = []
    if not has_table:
        raise InputError(f"{location} has no table page_props: download it again, or remove it")
    if page_items:
        yield _to_batch(page_items)


def _to_batch(page_items: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    columns = zip(*page_items, strict=True)
    return pa.record_batch([pa.array(column, pa.int64()) for column in columns], schema=_ITEM_SCHEMA)


class PageTable:
    """The aliases and Wikidata items of a part's pages, which are not in the XML of the pages."""

    def __init__(
        self, redirects: Sequence[Path] = (), items: Path | None = None, first_page: int = 0, last_page: int = 0
    ) -> None:
        """Memory-map the files of `merge_redirects`, and read the Wikidata items of the part.

        The number of files is a power of two. The part has the page ids `first_page` to
        `last_page`.
        """
        tables = [_map_table(path) for path in redirects]
        self._redirects = [(table, _get_keys(table)) for table in tables]
        # A title's hash, shifted by this number of bits, is the position of its file.
        self._shift = _KEY_BITS - (len(tables).bit_length() - 1)
        self._items = _read_items(items, first_page, last_page) if items else {}

    def __bool__(self) -> bool:
        """Return whether the table has any redirects or items."""
        return bool(self._redirects or self._items)

    def find(self, page_id: int, title: str) -> Metadata:
        """Return the Wikidata item and the aliases of an article."""
        item = self._items.get(page_id)
        return Metadata(wikidata=f"Q{item}" if item else "", aliases=self._find_aliases(title))

    def _find_aliases(self, title: str) -> tuple[str, ...]:
        if not self._redirects:
            return ()
        title_key = _hash_title(title)
        table, keys = self._redirects[title_key >> self._shift]
        start_row = int(np.searchsorted(keys, np.uint64(title_key)))
        end_row = int(np.searchsorted(keys, np.uint64(title_key), "right"))
        if start_row == end_row:
            return ()
        rows = table.slice(start_row, end_row - start_row)
        # The oldest redirects are first, because these are the names that are used most.
        targets_and_aliases = zip(rows["title"].to_pylist(), rows["alias"].to_pylist(), strict=True)
        return select_aliases(title, _list_titles([alias for target, alias in targets_and_aliases if target == title]))


NO_PAGES = PageTable()


def _read_items(path: Path, first_page: int, last_page: int) -> dict[int, int]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        item_by_page: dict[int, int] = {}
        for batch_number in range(reader.num_record_batches):
            page_ids, item_numbers = (column.to_numpy() for column in reader.get_batch(batch_number).columns)
            is_in_part = (first_page <= page_ids) & (page_ids <= last_page)
            item_by_page.update(zip(page_ids[is_in_part].tolist(), item_numbers[is_in_part].tolist(), strict=True))
        return item_by_page


def _write_table(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        # One batch, so that the keys are one array in the mapped file.
        writer.write_table(table.combine_chunks())


def _get_keys(table: pa.Table) -> npt.NDArray[np.uint64]:
    keys: npt.NDArray[np.uint64] = np.asarray(table["key"].chunk(0) if len(table) else [], np.uint64)
    return keys


def _map_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
