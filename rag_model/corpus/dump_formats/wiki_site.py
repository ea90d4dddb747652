"""A MediaWiki site as a dump, read through its API and updated from build to build.

**The mirror.** The store keeps the pages as elements of an export, in blocks of about a megabyte,
in the order of page ids. A changed page changes only its block (`corpus.wiki_mirror`). A record
lists the blocks, and the last changes that were read from the site.

**The first build** lists the pages with their newest revisions, 500 per request, and fetches the
pages in the order of their ids, 50 per request. The progress is recorded every thousand pages, so
that an interrupted build continues there. If the parent was built from a dump of the wiki, its
pages are taken from the dump, and only those that have changed since are fetched.

**Later builds** read the recent changes and the log (deletions, moves, restores, imports) since the
record, and fetch only the pages named there. If nothing has happened, one request suffices. The
pages are listed again once a day, and also if the site no longer has the changes that the record
lists, because it dropped them or was restored from a backup. The list is compared with the mirror
by revision, time and title, which also finds changes that are not in the log. The Wikidata item of
a page, which can change without an edit, is taken from the listing. Redirects are pages of the
mirror, so the titles of an article's redirects need no requests.

**Text** is wikitext, or the HTML that the site itself renders (`action=parse`), one page per
request. Pages that use a changed template are rendered again. The HTML of Parsoid (`rest.php`) is
not used: on MediaWiki 1.39 it gave the same text for 16 pages, but an edited page took .36 s of the
site's time instead of .07 s and twice the bytes, and requests have no `maxlag`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple

from rag_model.corpus.articles import DropReason, get_namespace_aliases
from rag_model.corpus.dump_formats.dump_format import PlanRequest
from rag_model.corpus.dump_formats.mediawiki import CANONICAL_NAMESPACES, RenderedPages
from rag_model.corpus.markup.template_table import NAMESPACES as TEMPLATE_NAMESPACES
from rag_model.corpus.metadata import build_metadata
from rag_model.corpus.parts import COMPRESSION_RATIO, PageRun, assemble_parts, choose_starts
from rag_model.corpus.records import (
    HTML_MODEL,
    MAX_TITLE,
    Metadata,
    Page,
    Part,
    Plan,
    Siteinfo,
    SiteSettings,
    Slice,
    format_iso,
    parse_seconds,
)
from rag_model.corpus.wiki_api import IDS_PER_REQUEST, Reply, WikiClient, check_object
from rag_model.corpus.wiki_mirror import (
    Cursor,
    Mirror,
    MirrorState,
    SeenChange,
    StagedMirror,
    apply_changes,
    apply_stream,
    read_block,
    remove_pages,
    to_slice,
)
from rag_model.errors import InputError

_OVERLAP_SECONDS = 600  # changes of this period are read again; some appear late
# minimum number of last changes that are remembered, however old they are
_MIN_REMEMBERED_CHANGES = 20
_LISTING_SECONDS = 24 * 3600  # maximum age of a listing of all pages
_MAX_ID = (1 << 63) - 1
_TEMPLATES, _MODULES = 10, 828  # namespaces whose pages change the HTML of other pages
# Types of log entries that change, add or remove pages.
_LOG_TYPES = {"delete", "move", "import", "merge", "suppress", "contentmodel", "pagelang"}
# Parameters of requests. The Wikidata item comes first, because a long reply is cut at a revision.
_PROPERTIES = {"prop": "pageprops|info|revisions", "ppprop": "wikibase_item"}
_CONTENT = {**_PROPERTIES, "rvprop": "ids|timestamp|content|contentmodel", "rvslots": "main"}
_SITEINFO = {"meta": "siteinfo", "siprop": "general|namespaces|namespacealiases|rightsinfo"}
_EVENTS = {
    "list": "recentchanges|logevents",
    "rcprop": "ids|title|timestamp|loginfo",
    "rctype": "edit|new|log",
    "leprop": "ids|title|type|details|timestamp",
}
_RENDER = {
    "prop": "text|revid|categories",
    "disablelimitreport": 1,
    "disableeditsection": 1,
    "disabletoc": 1,
}
_CREATIVE_COMMONS = re.compile(
    r"(?:https?:)?//creativecommons\.org/(licenses|publicdomain)/([a-z-]+)/([0-9.]+)(?:/.*)?"
)


class _ListedPage(NamedTuple):
    """A page as the site lists it; the mirror's page is outdated if it differs."""

    rev_id: int
    revised: int | None
    title: str
    touched: int  # when the site last had to render the page again, in seconds since 1970
    size: int  # bytes of wikitext
    item: str  # id of the Wikidata item, or ""


@dataclass(frozen=True, slots=True)
class _SiteEvents:
    """The new entries of the recent changes and of the log."""

    siteinfo: Siteinfo
    licence: str
    site_time: int
    changes: tuple[SeenChange, ...]  # all changes in the replies, including those seen before
    logs: tuple[tuple[int, str], ...]  # (id, timestamp) of all log entries in the replies
    page_ids: frozenset[int] = frozenset()  # ids of pages in new entries
    titles: frozenset[str] = frozenset()  # titles of pages in new entries
    templates: frozenset[str] = frozenset()  # titles of changed templates and modules


class SiteFollower:
    """Brings the mirror of a site up to date."""

    def __init__(
        self, client: WikiClient, mirror: Mirror, settings: SiteSettings, now: Callable[[], datetime] | None = None
    ) -> None:
        """Store the client of the site, the mirror, the settings, and a clock."""
        self._client, self._mirror, self._settings = client, mirror, settings
        self._now = now or (lambda: datetime.now(UTC))
        self._namespaces = frozenset(settings.namespaces)
        self.fetched_pages = 0

    def follow(self, state: MirrorState) -> tuple[MirrorState, Siteinfo, str]:
        """Fetch the changes since a state of the mirror; return (new state, siteinfo, licence).

        Raises:
            InputError: The site's replies are invalid, or the account may not read the site.
            UnreachableError: The site cannot be reached; the progress is recorded.
        """
        now_seconds = int(self._now().timestamp())
        events = self._read_events(state.cursor)
        removed_ids = self._mirror.list_removed_pages(events.siteinfo.dbname)
        cursor = state.cursor
        if cursor and now_seconds < cursor.listed_at + _LISTING_SECONDS and not _has_lost_changes(cursor, events):
            listed_at, site_time = cursor.listed_at, cursor.site_time
            updated_state = self._fetch_changed_pages(state, events, removed_ids)
        else:
            listed_at, site_time = now_seconds, events.site_time
            updated_state = self._fetch_stale_pages(state, events, removed_ids)
        recent_changes = _select_recent(events.changes, lambda change: change.timestamp)
        recent_logs = _select_recent(events.logs, lambda entry: entry[1])
        new_cursor = Cursor(now_seconds, listed_at, site_time, recent_changes, recent_logs)
        new_state = MirrorState(updated_state.blocks, new_cursor, events.siteinfo.dbname, self._client.api_path)
        if cursor is None or listed_at == now_seconds or self.fetched_pages or new_state.blocks != state.blocks:
            self._mirror.save(new_state)
            return new_state, events.siteinfo, events.licence
        return state, events.siteinfo, events.licence  # an unchanged site needs no new record

    def fetch_first_articles(self, limit: int) -> tuple[MirrorState, Siteinfo, str]:
        """Fetch pages in the order of the listing until there are `limit` articles."""
        events, page_by_id, n_articles = self._read_events(None), dict[int, Page | None](), 0
        page_batches = (self._fetch_pages(sorted(pages), events.siteinfo) for pages in self._list_pages())
        for page_id, page in chain.from_iterable(page_batches):
            page_by_id[page_id] = page
            n_articles += page is not None and FORMAT.classify(page, events.siteinfo) is page
            if n_articles == limit:
                break
        return apply_changes(self._mirror, MirrorState(), page_by_id), events.siteinfo, events.licence

    def list_runs(self) -> tuple[list[PageRun], Siteinfo]:
        """Return a run per page of the site, without fetching the pages, for a dry run."""
        events = self._read_events(None)
        runs = [self._build_run(page_id, page.size) for pages in self._list_pages() for page_id, page in pages.items()]
        return sorted(runs, key=lambda run: run.slice.first_page), events.siteinfo

    def _build_run(self, page_id: int, page_bytes: int) -> PageRun:
        byte_slice = Slice(self._client.url, 0, page_bytes, "none", page_id, page_id)
        return PageRun(byte_slice, max(1, page_bytes // COMPRESSION_RATIO), True)

    def _read_events(self, cursor: Cursor | None) -> _SiteEvents:
        """Read the siteinfo and the changes since the cursor, or the last changes without one."""
        query: dict[str, Any] = {"rcdir": "older", "ledir": "older", "rclimit": 50, "lelimit": 50}
        if cursor:
            query = {"rcdir": "newer", "ledir": "newer", "rclimit": "max", "lelimit": "max"}
            query |= {"rcstart": cursor.changes[0].timestamp} if cursor.changes else {}
            query |= {"lestart": cursor.logs[0][1]} if cursor.logs else {}
        replies: list[Reply] = []
        first_reply: Reply = {}
        for reply in self._client.query_all(**_SITEINFO, **_EVENTS, **query, curtimestamp=1):
            first_reply = first_reply or reply
            replies.append(reply)
            if cursor is None:
                break
        rows = [row for reply in replies for row in _get_rows(reply, "recentchanges")]
        # A log entry with a hidden action names no page; the next listing shows what it changed.
        changes = [self._parse_change(row) for row in rows if "revid" in row or "actionhidden" not in row]
        log_entries = [row for reply in replies for row in _get_rows(reply, "logevents")]
        logs = [(self._read_number(row, "logid"), _read_time(row, self._client.url)) for row in log_entries]
        siteinfo, licence = self._parse_siteinfo(first_reply)
        site_time = parse_seconds(_read_time(first_reply, self._client.url, "curtimestamp"))
        all_changes = tuple(sorted((change for change, _ in changes), key=lambda change: (change.timestamp, change.id)))
        all_logs = tuple(sorted(logs, key=lambda entry: (entry[1], entry[0])))
        if cursor is None:
            return _SiteEvents(siteinfo, licence, site_time, all_changes, all_logs)
        seen_change_ids = {change.id for change in cursor.changes}
        seen_log_ids = {log_entry[0] for log_entry in cursor.logs}
        new_changes = [(change, row) for change, row in changes if change.id not in seen_change_ids]
        new_entries = [row for row, (log_id, _) in zip(log_entries, logs, strict=True) if log_id not in seen_log_ids]
        page_ids, titles, templates = self._collect_names(new_changes, new_entries)
        return _SiteEvents(siteinfo, licence, site_time, all_changes, all_logs, page_ids, titles, templates)

    def _collect_names(
        self, changes: Iterable[tuple[SeenChange, Reply]], log_entries: Iterable[Reply]
    ) -> tuple[frozenset[int], frozenset[str], frozenset[str]]:
        """Return ids and titles of pages that may have changed, and titles of changed templates."""
        page_ids, titles, templates = set[int](), set[str](), set[str]()
        uses_html = self._settings.text == HTML_MODEL
        for change, row in changes:
            namespace = row.get("ns")
            if row.get("type") in {"edit", "new"} and namespace in self._namespaces:
                page_ids.add(change.page)
            if uses_html and row.get("type") in {"edit", "new"} and namespace in {_TEMPLATES, _MODULES}:
                templates.add(change.title)
        for row in log_entries:
            if row.get("type") not in _LOG_TYPES:
                continue
            params = row.get("params") if isinstance(row.get("params"), dict) else {}
            assert isinstance(params, dict)
            targets = {value for name, value in params.items() if name.endswith("title") and isinstance(value, str)}
            namespaces = {row.get("ns"), *(parameter for name, parameter in params.items() if name.endswith("_ns"))}
            named_titles = {title for title in (row.get("title"), *targets) if isinstance(title, str) and title}
            if self._namespaces.isdisjoint(namespaces):
                is_template = uses_html and not {_TEMPLATES, _MODULES}.isdisjoint(namespaces)
                templates |= named_titles if is_template else set()
                continue
            page_ids |= {self._read_number(row, name) for name in ("pageid", "logpage") if name in row}
            titles |= named_titles
        return frozenset(page_ids - {0}), frozenset(titles), frozenset(templates)

    def _fetch_changed_pages(self, state: MirrorState, events: _SiteEvents, removed_ids: frozenset[int]) -> MirrorState:
        page_ids = {*events.page_ids}
        if events.templates:
            page_ids |= self._purge_using_pages(events.templates)
        changes = chain(
            self._fetch_pages(sorted(page_ids), events.siteinfo),
            self._fetch_pages(sorted(events.titles), events.siteinfo, by="titles"),
        )
        visible_changes = ((page_id, None if page_id in removed_ids else page) for page_id, page in changes)
        state = apply_stream(self._mirror, state, visible_changes, save=True)
        return remove_pages(self._mirror, state, removed_ids)

    def _fetch_stale_pages(self, state: MirrorState, events: _SiteEvents, removed_ids: frozenset[int]) -> MirrorState:
        """List all pages, and fetch those that differ from the mirror."""
        listed_page_by_id: dict[int, _ListedPage] = {}
        for page_by_id in self._list_pages():
            listed_page_by_id |= page_by_id
        if not listed_page_by_id:
            raise InputError(
                f"{self._client.url} lists no pages in the namespaces {sorted(self._namespaces)}: check the "
                "namespaces, and that you may read them"
            )
        state = self._fill_empty_mirror(state, events, removed_ids)
        rendered_until = state.cursor.site_time if state.cursor and self._settings.text == HTML_MODEL else _MAX_ID
        version_by_page = {
            page.page_id: (page.rev_id, page.revised, page.title, page.metadata.wikidata)
            for page in self._read_pages(state)
        }
        outdated_ids = [
            page_id
            for page_id, page in listed_page_by_id.items()
            if version_by_page.get(page_id, ())[:3] != (page.rev_id, page.revised, page.title)
            or page.touched > rendered_until
        ]
        deleted_pages = dict.fromkeys(version_by_page.keys() - listed_page_by_id.keys())
        # A page can get an item without an edit, and the pages of a dump have no items.
        item_by_changed_page = {
            page_id: page.item
            for page_id, page in listed_page_by_id.items()
            if page_id in version_by_page and version_by_page[page_id][3] != page.item
        }
        del version_by_page
        if item_by_changed_page:
            state = apply_stream(self._mirror, state, self._update_items(state, item_by_changed_page), save=False)
        state = remove_pages(self._mirror, apply_changes(self._mirror, state, deleted_pages), removed_ids)
        ids_to_fetch = sorted(page_id for page_id in outdated_ids if page_id not in removed_ids)
        return apply_stream(self._mirror, state, self._fetch_pages(ids_to_fetch, events.siteinfo), save=True)

    def _fill_empty_mirror(self, state: MirrorState, events: _SiteEvents, removed_ids: frozenset[int]) -> MirrorState:
        """Fill an empty mirror with pages that are already known, such as the pages of a dump."""
        if state.blocks or self._settings.text == HTML_MODEL:
            return state
        pages = (
            (page.page_id, page)
            for page in self._mirror.read_first_pages(events.siteinfo)
            if page.namespace in self._namespaces and page.page_id not in removed_ids
        )
        return apply_stream(self._mirror, state, pages, save=False)

    def _read_pages(self, state: MirrorState) -> Iterator[Page]:
        return (page for block in state.blocks for page, _ in read_block(self._mirror, block))

    def _update_items(self, state: MirrorState, item_by_page: Mapping[int, str]) -> Iterator[tuple[int, Page]]:
        """Yield the pages of the mirror whose Wikidata item changed, with the new item."""
        for page in self._read_pages(state):
            if page.page_id in item_by_page:
                yield page.page_id, replace(page, metadata=replace(page.metadata, wikidata=item_by_page[page.page_id]))

    def _list_pages(self) -> Iterator[dict[int, _ListedPage]]:
        for namespace in sorted(self._namespaces):
            query = {"generator": "allpages", "gapnamespace": namespace, "gaplimit": "max"}
            for row_by_id in self._query_pages(**query, **_PROPERTIES, rvprop="ids|timestamp|size"):
                yield {page_id: self._parse_listed_page(row) for page_id, row in row_by_id.items()}

    def _parse_listed_page(self, page: Reply) -> _ListedPage:
        revision = _get_revision(page)
        rev_id = self._read_number(revision or page, "revid" if revision else "lastrevid")
        revised = parse_seconds(_read_time(revision, self._client.url)) if revision else None
        touched = parse_seconds(_read_time(page, self._client.url, "touched")) if "touched" in page else 0
        title, page_bytes = self._read_title(page), self._read_number(page, "length")
        return _ListedPage(rev_id, revised, title, touched, page_bytes, _get_wikidata_item(page))

    def _query_pages(self, **parameters: Any) -> Iterator[dict[int, Reply]]:
        """Yield complete pages by id; the properties of a page may be split among replies."""
        page_by_id: dict[int, Reply] = {}
        for reply in self._client.query_all(**parameters):
            for page in _get_rows(reply, "pages"):
                if "pageid" not in page or page.get("missing"):
                    continue
                page_id = self._read_number(page, "pageid")
                page_by_id[page_id] = {**page_by_id.get(page_id, {}), **page}
            complete_page_by_id = {page_id: page for page_id, page in page_by_id.items() if "revisions" in page}
            page_by_id = {page_id: page for page_id, page in page_by_id.items() if page_id not in complete_page_by_id}
            if complete_page_by_id:
                yield complete_page_by_id
        if page_by_id:
            yield page_by_id  # pages whose revisions the client may not read

    def _fetch_pages(
        self, ids_or_titles: Sequence[int] | Sequence[str], siteinfo: Siteinfo, by: str = "pageids"
    ) -> Iterator[tuple[int, Page | None]]:
        """Yield (id, page) for ids or titles, with None for a missing page or another namespace."""
        for start in range(0, len(ids_or_titles), IDS_PER_REQUEST):
            name_batch = ids_or_titles[start : start + IDS_PER_REQUEST]
            missing_ids = {name for name in name_batch if isinstance(name, int)}
            for row_by_id in self._query_pages(**_CONTENT, **{by: name_batch}):
                for page_id, row in sorted(row_by_id.items()):
                    if by == "pageids" and page_id not in missing_ids:
                        raise InputError(f"{self._client.url} answers with page {page_id}, which was not requested")
                    missing_ids.discard(page_id)
                    self.fetched_pages += 1
                    page = self._parse_page(page_id, row)
                    yield page_id, self._fetch_html(page, siteinfo) if page.namespace in self._namespaces else None
            for page_id in sorted(missing_ids):
                self.fetched_pages += 1
                yield page_id, None

    def _fetch_html(self, page: Page, siteinfo: Siteinfo) -> Page | None:
        """Return the page with the site's HTML if HTML is requested and the page is an article."""
        if self._settings.text != HTML_MODEL or FORMAT.classify(page, siteinfo) is not page:
            return page
        reply = self._client.request({"action": "parse", "oldid": page.rev_id, **_RENDER})
        parsed_page = check_object(reply.get("parse"), self._client.url)
        text = parsed_page.get("text")
        if not isinstance(text, str):
            raise InputError(f"{self._client.url} sends no HTML of page {page.page_id}: check the wiki")
        return replace(
            page, model=HTML_MODEL, text=text, metadata=replace(page.metadata, categories=_read_categories(parsed_page))
        )

    def _purge_using_pages(self, templates: Collection[str]) -> set[int]:
        """Return the ids of pages that use the templates, and make the site render them again."""
        page_ids: set[int] = set()
        for title in sorted(templates):
            namespaces = sorted(self._namespaces)
            query = {"list": "embeddedin", "eititle": title, "einamespace": namespaces, "eilimit": "max"}
            for reply in self._client.query_all(**query):
                page_ids |= {self._read_number(row, "pageid") for row in _get_rows(reply, "embeddedin")}
        sorted_ids = sorted(page_ids)
        for start in range(0, len(sorted_ids), IDS_PER_REQUEST):
            self._client.request({"action": "purge", "pageids": sorted_ids[start : start + IDS_PER_REQUEST]})
        return page_ids

    def _parse_page(self, page_id: int, row: Reply) -> Page:
        revision = _get_revision(row) or {}
        slots = revision.get("slots")
        slot = check_object(slots.get("main", {}) if isinstance(slots, dict) else {}, self._client.url)
        text, content_model = slot.get("content", ""), slot.get("contentmodel", "wikitext")
        if not isinstance(text, str) or not isinstance(content_model, str):
            raise InputError(f"{self._client.url} sends page {page_id} without text: check the wiki")
        return Page(
            page_id,
            self._read_number(revision or row, "revid" if revision else "lastrevid"),
            parse_seconds(_read_time(revision, self._client.url)) if revision else None,
            self._read_number(row, "ns"),
            self._read_title(row),
            bool(row.get("redirect")),
            content_model[:100],
            text,
            metadata=Metadata(wikidata=_get_wikidata_item(row)),
        )

    def _parse_change(self, row: Reply) -> tuple[SeenChange, Reply]:
        rev_id = self._read_number(row, "revid")
        timestamp, title = _read_time(row, self._client.url), str(row.get("title", ""))[:MAX_TITLE]
        page_id = self._read_number(row, "pageid")
        return SeenChange(self._read_number(row, "rcid"), rev_id, page_id, title, timestamp), row

    def _parse_siteinfo(self, reply: Reply) -> tuple[Siteinfo, str]:
        """Return (siteinfo as in an export of the site, name of the licence)."""
        url = self._client.url
        general_info = check_object(reply.get("general"), url)
        namespace_ids: dict[str, int] = {}
        for namespace in check_object(reply.get("namespaces"), url).values():
            namespace_id = self._read_number(check_object(namespace, url), "id", -(1 << 31))
            for name in (namespace.get("canonical"), namespace.get("name")):
                namespace_ids |= {name.lower(): namespace_id} if isinstance(name, str) else {}
        for alias in _get_rows(reply, "namespacealiases"):
            namespace_ids |= {str(alias.get("alias")).lower(): self._read_number(alias, "id", -(1 << 31))}
        fields = {name: general_info.get(name) for name in ("wikiid", "lang", "base", "case")}
        if unknown_namespaces := self._namespaces - set(namespace_ids.values()):
            raise InputError(f"{url} has no namespace {min(unknown_namespaces)}: give the numbers of its namespaces")
        if not all(isinstance(value, str) and len(value) <= MAX_TITLE for value in fields.values()):
            raise InputError(f"{url} sends no description of the wiki: check that it is a MediaWiki site")
        language = str(fields["lang"])
        namespaces = {**CANONICAL_NAMESPACES, **get_namespace_aliases(language), **namespace_ids}
        rights = reply.get("rightsinfo")
        licence = _name_licence(rights) if isinstance(rights, dict) else ""
        dbname, base_url, title_case = (str(fields[name]) for name in ("wikiid", "base", "case"))
        return Siteinfo(dbname, language, base_url, namespaces, title_case), licence

    def _read_title(self, row: Reply) -> str:
        title = row.get("title")
        if not isinstance(title, str) or not 0 < len(title) <= MAX_TITLE:
            raise InputError(f"{self._client.url} sends the title {title!r:.40}: check the wiki")
        return title

    def _read_number(self, row: Reply, name: str, minimum: int = 0) -> int:
        value = row.get(name)
        if type(value) is not int or not minimum <= value <= _MAX_ID:
            raise InputError(f"{self._client.url} sends {name} {value!r:.40} instead of a number: check the wiki")
        return value


def _has_lost_changes(cursor: Cursor, events: _SiteEvents) -> bool:
    """Return whether the site no longer lists the changes and log entries of the cursor.

    Missing changes of a deleted page do not count: the site removes them, and the log names the
    page.
    """
    site_changes = {*events.changes}
    missing_changes = [change for change in cursor.changes if change not in site_changes]
    if any(change.page not in events.page_ids and change.title not in events.titles for change in missing_changes):
        return True
    return not {*cursor.logs} <= {*events.logs}


def _select_recent(entries: Sequence[Any], get_timestamp: Callable[[Any], str]) -> tuple[Any, ...]:
    """Return the last `_MIN_REMEMBERED_CHANGES` entries, and all of the last `_OVERLAP_SECONDS`."""
    if not entries:
        return ()
    start_seconds = parse_seconds(get_timestamp(entries[-1])) - _OVERLAP_SECONDS
    return tuple(
        entry
        for i, entry in enumerate(entries)
        if i >= len(entries) - _MIN_REMEMBERED_CHANGES or parse_seconds(get_timestamp(entry)) >= start_seconds
    )


def _get_rows(reply: Reply, name: str) -> list[Reply]:
    rows = reply.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"the wiki answers {rows!r:.40} as its {name}: check that it is a MediaWiki site")
    return rows


def _read_categories(parse_result: Reply) -> tuple[str, ...]:
    """Return the categories of a rendered page, without hidden ones."""
    categories = parse_result.get("categories")
    rows = categories if isinstance(categories, list) else []
    names = [row.get("category") for row in rows if isinstance(row, dict) and not row.get("hidden")]
    category_names = [name.replace("_", " ") for name in names if isinstance(name, str)]
    return build_metadata({"categories": category_names}).categories


def _get_wikidata_item(page: Reply) -> str:
    """Return the Wikidata item of a page; empty if it has none."""
    props = page.get("pageprops")
    return build_metadata({"wikidata": props.get("wikibase_item")} if isinstance(props, dict) else {}).wikidata


def _get_revision(page: Reply) -> Reply | None:
    revisions = page.get("revisions")
    if not isinstance(revisions, list) or not revisions or not isinstance(revisions[0], dict):
        return None
    return revisions[0]


def _read_time(row: Reply | None, url: str, name: str = "timestamp") -> str:
    time_text = (row or {}).get(name)
    try:
        parse_seconds(str(time_text))
    except ValueError as error:
        raise InputError(f"{url} sends the time {time_text!r:.40}: check the wiki") from error
    return str(time_text)


def _name_licence(rights: Reply) -> str:
    """Return the short name of a Creative Commons licence, otherwise the wiki's own text.

    >>> _name_licence({"url": "https://creativecommons.org/licenses/by-sa/4.0/", "text": "CC"})
    'CC BY-SA 4.0'
    """
    licence_url, text = str(rights.get("url", "")), " ".join(str(rights.get("text", "")).split())
    if deed_match := _CREATIVE_COMMONS.fullmatch(licence_url):
        name = {"zero": "CC0"}.get(deed_match[2], f"CC {deed_match[2].upper()}")
        return f"{name} {deed_match[3]}"
    return "".join(filter(str.isprintable, text or licence_url))[:100]


def plan_site_dry_run(url: str, settings: SiteSettings, part_bytes: int | None = None) -> tuple[Plan, int]:
    """Return (plan of a site, bytes of its wikitext) from a listing of its pages.

    Raises:
        InputError: The site's replies are invalid, or the account may not read the site.
        UnreachableError: The site cannot be reached.
    """
    with WikiClient(url) as client:
        follower = SiteFollower(client, StagedMirror(), settings)
        runs, siteinfo = follower.list_runs()
    parts = assemble_parts("wiki", runs, choose_starts(runs, part_bytes), _MAX_ID) if runs else ()
    return Plan("wiki", siteinfo, parts), sum(run.slice.length for run in runs)


class WikiSite(RenderedPages):
    """The pages of a MediaWiki site, by its address: `mediawiki+https://wiki.example.org/`."""

    has_templates = True

    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return False: only a URL names a site (`dump_format.detect_format`)."""
        return False

    def is_companion(self, name: str) -> bool:
        """Return False: a site has no companion files."""
        return False

    def can_plan_fast(self, url: str) -> bool:
        """Return True: the mirror has the pages, so planning reads only changes from the site."""
        return True

    def plan(self, urls: Sequence[str], request: PlanRequest) -> Plan:
        """Bring the mirror of the site up to date, and return the parts of its pages.

        Raises:
            InputError: The site's replies are invalid, or the account may not read the site.
            UnreachableError: The site cannot be reached; the next run continues.
        """
        mirror = request.mirror or StagedMirror(request.workdir, request.stage)
        known_state = mirror.load()
        with WikiClient(urls[0], api_path=known_state.api_path) as client:
            follower = SiteFollower(client, mirror, request.site)
            site_result = (
                follower.fetch_first_articles(request.limit) if request.limit else follower.follow(known_state)
            )
        state, siteinfo, licence = site_result
        runs = [
            PageRun(to_slice(block, mirror.get_url(block)), max(1, block.xml_bytes // COMPRESSION_RATIO), True)
            for block in state.blocks
        ]
        if not runs:
            raise InputError(f"{urls[0]} has no pages: check the namespaces, and that you may read them")
        starts = choose_starts(runs, request.part_bytes, request.find_boundaries("wiki", siteinfo.dbname))
        parts = assemble_parts("wiki", runs, starts, runs[-1].slice.last_page, request.part_format)
        read_at = format_iso(state.cursor.read_at) if state.cursor else None
        return Plan("wiki", siteinfo, parts, licence, read_at or "", template_parts=())

    def read_templates(self, part: Part, *, redirects: bool = False) -> Iterator[Page]:
        """Yield the redirects of a part if requested; changes of templates are not tracked."""
        pages = super().read_templates(part, redirects=True) if redirects else iter(())
        return (page for page in pages if page.namespace not in TEMPLATE_NAMESPACES)

    def classify(self, page: Page, siteinfo: Siteinfo) -> Page | DropReason:
        """Return the page if it is an article of any namespace; otherwise the reason to drop it."""
        page_or_reason = super().classify(replace(page, namespace=0), siteinfo)
        return page_or_reason if isinstance(page_or_reason, str) else page


FORMAT = WikiSite()
