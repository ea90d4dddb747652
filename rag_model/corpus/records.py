"""The records of a corpus (page, article, passage), and descriptors of units of work.

A descriptor is a few hundred bytes of JSON, which locate the data of a unit of work. The
records are the data itself and never leave the worker that reads them.

Times of revisions are stored as whole seconds since 1970 in UTC and shown as ISO 8601. Days would
not suffice, because a page may be edited several times a day, and dumps contain seconds. Parquet
files store the times as timestamps, so that other tools show them as times.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from json.encoder import encode_basestring
from typing import Any, Literal, Self, get_args

from rag_model.digest import digest_json
from rag_model.errors import UsageError

SourceKind = Literal["wiki", "documents", "passages"]
Compression = Literal["bz2", "gzip", "xz", "zstd", "none"]
PassageKind = Literal["prose", "table", "infobox", "list"]
PROSE: PassageKind = "prose"
PASSAGE_KINDS: tuple[str, ...] = get_args(PassageKind)
StructureName = Literal["tables", "infobox", "lists"]  # structures that a recipe can request
# The name of the structure from which passages of a kind are made.
STRUCTURES: dict[str, StructureName] = {"table": "tables", "infobox": "infobox", "list": "lists"}
CATEGORY_SEPARATOR = "|"  # joins categories in a column; titles cannot contain it
MetadataName = Literal["aliases", "categories", "language", "wikidata"]  # metadata names in recipes

# Content models of pages that are rendered HTML or plain text; no wiki uses these names.
HTML_MODEL, PLAIN_MODEL = "html", "plain"

# Maximum sizes of values that every passage of a document and every hit in a reply repeats.
MAX_TITLE = 1_000  # characters; MediaWiki's own limit is 255 bytes
MAX_ID = 1_000  # characters
# Maximum characters of an imported passage; chunkers have their own limits.
MAX_PASSAGE = 100_000
ID_HASHES = 1 << 32  # number of hashes: 0 <= hash_id(…) < ID_HASHES
# Stricter than fromisoformat, which accepts 20261101120000000.
_ISO_SHAPE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ].+)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
EARLIEST = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _SECOND  # 0001-01-01T00:00:00Z
LATEST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _SECOND  # 9999-12-31T23:59:59Z


@dataclass(frozen=True, slots=True)
class Metadata:
    """Data about a page, if its source has any; see `corpus.metadata`."""

    language: str = ""  # code, such as `de`
    wikidata: str = ""  # item, such as `Q42`
    categories: tuple[str, ...] = ()  # without the namespace
    aliases: tuple[str, ...] = ()  # titles that redirect to the page


NO_METADATA = Metadata()


@dataclass(frozen=True, slots=True)
class Page:
    """One `<page>` of a MediaWiki export with its current revision, before anything is dropped."""

    page_id: int
    rev_id: int
    # Time of the revision in seconds since 1970, UTC; None if unknown.
    revised: int | None
    namespace: int
    title: str
    redirect: bool
    model: str  # content model: `wikitext`, `json`, `css`, …
    text: str
    # Key of the page's element in article logs; empty if the bytes of the element are unknown. If a
    # page is taken from an article log, it is not parsed: only its id, time and key are set.
    key: bytes = field(default=b"", compare=False)
    metadata: Metadata = NO_METADATA  # empty if the source has none
    target: str = ""  # title of the page that a redirect leads to, if the source names it


@dataclass(frozen=True, slots=True)
class Structure:
    """A table, an infobox or a long list: rows of text with their header lines."""

    kind: PassageKind
    rows: tuple[str, ...]  # rows of a table, `field: value` lines, or items
    # Lines that each passage of the structure repeats: the caption and the column headers, or the
    # introduction of a list.
    head: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """The text a reader sees under one heading; the lead's heading is the empty string."""

    heading: str
    text: str  # empty in a section that has only structures
    # Character spans of the words of links in `text`, ascending, if requested.
    links: tuple[tuple[int, int], ...] = ()
    structures: tuple[Structure, ...] = ()  # structures in the order of the page, if requested


@dataclass(frozen=True, slots=True)
class Article:
    """The clean text of a page by section, or a document of another source."""

    page_id: str  # decimal page id of the dump, or the document's own id
    rev_id: int  # 0 where the source has no revisions
    title: str
    sections: tuple[Section, ...]
    # Time of the article's revision in seconds since 1970, UTC; None if unknown.
    revised: int | None = None
    metadata: Metadata = NO_METADATA
    # whether passages keep the lines and their indentation, which source code needs
    keeps_lines: bool = False


@dataclass(frozen=True, slots=True)
class Passage:
    """The unit of retrieval: some sentences, with the title of their article."""

    id: str  # page id and position in the article; stable across snapshots, unlike the row
    page_id: str
    rev_id: int
    title: str
    section: str
    text: str
    # Position of the passage's first word, from 0, in the article, or in the section if no passage
    # crosses a heading.
    start_word: int
    n_words: int
    hash: str  # digest of title and text only; equal passages share a vector
    # Time of the article's revision in seconds since 1970, UTC; None if unknown.
    revised: int | None = None
    kind: str = PROSE  # a `PassageKind`
    # Metadata of the passage's page, if the recipe requests them; categories are joined by `|`.
    language: str = ""
    wikidata: str = ""
    categories: str = ""

    @staticmethod
    def hash_of(title: str, text: str) -> str:
        """Return the 32-hex-digit digest of a passage's title and text."""
        # These are the bytes of canonical JSON; the encoder itself takes three times as long.
        title_and_text = f"[{encode_basestring(title)},{encode_basestring(text)}]"
        return hashlib.sha256(title_and_text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Siteinfo:
    """The metadata of a dump, including the language settings of the cleaner."""

    dbname: str  # enwiki
    language: str  # en
    base: str  # URL of the main page: https://en.wikipedia.org/wiki/Main_Page
    # Number of each namespace by its local or English name, in lower case.
    namespaces: Mapping[str, int] = field(default_factory=dict)
    case: str = "first-letter"  # MediaWiki's rule for the first letter of titles


def is_wiki_site(url: str) -> bool:
    """Return whether a dump's URL is the address of a MediaWiki site.

    >>> is_wiki_site("mediawiki+https://wiki.example.org/"), is_wiki_site("https://wiki.example.org/")
    (True, False)
    """
    return url.lower().startswith(("mediawiki+https://", "mediawiki+http://"))


def is_sitemap(url: str) -> bool:
    """Return whether the URL of a dump names a sitemap.

    >>> is_sitemap("sitemap+https://example.org/sitemap.xml")
    True
    """
    return url.lower().startswith(("sitemap+https://", "sitemap+http://"))


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """What a build reads from a MediaWiki site."""

    text: str = "wikitext"  # or `html`, rendered by the site itself
    namespaces: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Check that the kind of text and the namespaces are valid."""
        if self.text not in {"wikitext", "html"}:
            raise UsageError(f"text is {self.text!r}: give wikitext, or html for the site's own rendering")
        object.__setattr__(self, "namespaces", tuple(sorted({*self.namespaces})))
        if not self.namespaces or any(type(key) is not int or key < 0 for key in self.namespaces):
            raise UsageError(f"namespaces is {list(self.namespaces)}: give one or more numbers from 0")


@dataclass(frozen=True, slots=True)
class Slice:
    """A byte range that can be read and decoded independently.

    `first_page` and `last_page` are inclusive; slices of one source may overlap when ids are out of
    order.
    """

    url: str
    offset: int  # bytes from the start of the file
    length: int  # bytes; always known
    codec: Compression
    first_page: int
    last_page: int


@dataclass(frozen=True, slots=True)
class Part:
    """A fixed range of page ids: the unit of work and of reuse.

    A worker reads every slice of `slices` and keeps the pages with `first_page <= page_id <=
    last_page`. For documents, the 32-bit hash of a document's id replaces the page id.
    """

    name: str  # part-00042
    kind: SourceKind
    first_page: int
    last_page: int
    slices: tuple[Slice, ...]
    # Whether ids strictly increase through the slices; otherwise an id may occur twice.
    ordered: bool = True
    format: str = ""  # dump format of the slices; if empty, the standard format of `kind`

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON values."""
        part_dict = asdict(self)
        if not self.format:
            del part_dict["format"]  # plans of earlier versions have no field `format`
        return part_dict

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build a part from the output of `to_json`."""
        return cls(**{**value, "slices": tuple(Slice(**byte_slice) for byte_slice in value["slices"])})


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a dump in row order, and the metadata of the source."""

    kind: SourceKind
    siteinfo: Siteinfo
    parts: tuple[Part, ...]
    licence: str = ""  # licence of the text, if the source names it
    read_at: str = ""  # when a site was read, ISO 8601
    # Parts with only the slices that have templates; None if these slices are unknown.
    template_parts: tuple[Part, ...] | None = None
    # Number of dropped files of a folder by reason.
    dropped: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        parts = tuple(part.to_json() for part in self.parts)
        plan_dict = {"kind": self.kind, "siteinfo": asdict(self.siteinfo), "parts": parts}
        if self.template_parts is not None:  # plans of earlier versions have no template parts
            plan_dict["template_parts"] = tuple(part.to_json() for part in self.template_parts)
        return plan_dict | ({"dropped": dict(self.dropped)} if self.dropped else {})

    def compute_digest(self) -> str:
        """Return a digest of a site's pages, computed from the URLs of their immutable files."""
        file_urls = sorted({byte_slice.url for part in self.parts for byte_slice in part.slices})
        return digest_json([self.kind, asdict(self.siteinfo), file_urls])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build a plan from the output of `to_json`."""
        parts = tuple(Part.from_json(part) for part in value["parts"])
        template_parts = value.get("template_parts")
        if template_parts is not None:
            template_parts = tuple(Part.from_json(part) for part in template_parts)
        siteinfo, dropped = Siteinfo(**value["siteinfo"]), value.get("dropped", {})
        return cls(value["kind"], siteinfo, parts, template_parts=template_parts, dropped=dropped)


class UnparsablePageError(Exception):
    """A page exceeds a limit of the cleaner; `reason` names the limit, without a full stop."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def hash_id(document_id: str) -> int:
    """Return the first 32 bits of the SHA-256 of a document's id."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:4], "big")


def parse_seconds(text: str) -> int:
    """Parse an ISO 8601 date (as its first second) or time to seconds; the default zone is UTC.

    >>> parse_seconds("2026-11-01T12:00:00Z") - parse_seconds("2026-11-01")
    43200

    Raises:
        ValueError: The text is not a date, or outside of the years 1 to 9999 in UTC.
    """
    if not _ISO_SHAPE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a date in the form 2026-11-01")
    time = datetime.fromisoformat(text)
    return check_seconds(((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _SECOND)


def check_seconds(seconds: int) -> int:
    """Return `seconds` if ISO 8601 can represent them.

    Raises:
        ValueError: The time is outside of the years 1 to 9999.
    """
    if not EARLIEST <= seconds <= LATEST:
        raise ValueError("a time outside of the years 1 to 9999")
    return seconds


def format_iso(seconds: int | None) -> str | None:
    """Format seconds as an ISO 8601 string in UTC, which sorts by time; return None for None.

    >>> format_iso(1793534400)
    '2026-11-01T12:00:00Z'
    """
    return None if seconds is None else f"{(_EPOCH + seconds * _SECOND).replace(tzinfo=None).isoformat()}Z"


def format_day(seconds: int | None) -> str:
    """Format the day of a time in seconds, in UTC; return "" for None.

    >>> format_day(1793534400)
    '2026-11-01'
    """
    return (format_iso(seconds) or "").partition("T")[0]
