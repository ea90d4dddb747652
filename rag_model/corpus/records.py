"""The records of a corpus: page, article, passage, and the descriptors of the work on them.

A descriptor says *where* the data of one unit of work is (a few hundred bytes of JSON); the records are the data
itself and never leave the worker that reads them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from rag_model.digest import digest_json

SourceKind = Literal["wiki", "documents", "passages"]
Codec = Literal["bz2", "gzip", "none"]

# What every passage of a document repeats, and a reply repeats for every hit, has a bound.
MAX_TITLE = 1_000  # characters; MediaWiki's own limit is 255 bytes
MAX_ID = 1_000  # characters
MAX_PASSAGE = 100_000  # characters of a passage that comes ready-made; chunkers have bounds of their own


@dataclass(frozen=True, slots=True)
class Page:
    """One `<page>` of a MediaWiki export with its current revision, before anything is dropped."""

    page_id: int
    rev_id: int
    revised: int | None  # when the revision was saved, in seconds since 1970, UTC; None: the dump does not say
    namespace: int
    title: str
    redirect: bool
    model: str  # content model: `wikitext`, `json`, `css`, …
    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """The text a reader sees under one heading; the lead's heading is the empty string."""

    heading: str
    text: str
    links: tuple[tuple[int, int], ...] = ()  # characters of the words of its links, ascending, if they were asked for


@dataclass(frozen=True, slots=True)
class Article:
    """One page's clean text by section, or one document of another source."""

    page_id: str  # decimal page id of the dump, or the document's own id
    rev_id: int  # 0 where the source has no revisions
    title: str
    sections: tuple[Section, ...]
    revised: int | None = None  # when its revision was saved, in seconds since 1970, UTC; None: unknown


@dataclass(frozen=True, slots=True)
class Passage:
    """The unit that is retrieved: some sentences, with their title."""

    id: str  # page and position in the article: stable across snapshots, unlike the row
    page_id: str
    rev_id: int
    title: str
    section: str
    text: str
    start_word: int  # of its article, or of its section where no passage crosses a heading; counted from 0
    n_words: int
    hash: str  # of title and text alone: equal passages share a vector
    revised: int | None = None  # when its article's revision was saved, in seconds since 1970, UTC; None: unknown

    @staticmethod
    def hash_of(title: str, text: str) -> str:
        """Return the 32-hex-digit digest of a passage's title and text."""
        return digest_json([title, text]).partition(":")[2][:32]


@dataclass(frozen=True, slots=True)
class Siteinfo:
    """The metadata of a dump, with all that the cleaner needs to know about its language."""

    dbname: str  # enwiki
    language: str  # en
    base: str  # URL of the main page: https://en.wikipedia.org/wiki/Main_Page
    namespaces: Mapping[str, int] = field(default_factory=dict)  # local or English name, lower case -> key
    case: str = "first-letter"


@dataclass(frozen=True, slots=True)
class Slice:
    """A byte range that a worker can read and decode on its own: some streams of a dump, or a split file.

    `first_page` and `last_page` are inclusive; slices of one source may overlap when ids are out of order.
    """

    url: str
    offset: int  # bytes from the start of the file
    length: int  # bytes; always known
    codec: Codec
    first_page: int
    last_page: int


@dataclass(frozen=True, slots=True)
class Part:
    """A fixed range of page ids: the unit of work and of reuse.

    A worker reads every slice of `slices` and keeps the pages with `first_page <= page_id <= last_page`. For
    documents, the 32-bit hash of a document's id stands for the page id.
    """

    name: str  # part-00042
    kind: SourceKind
    first_page: int
    last_page: int
    slices: tuple[Slice, ...]
    ordered: bool = True  # ids strictly increase through the slices; otherwise there may be duplicates

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        return cls(**{**value, "slices": tuple(Slice(**piece) for piece in value["slices"])})


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a dump in row order, and the metadata of the source."""

    kind: SourceKind
    siteinfo: Siteinfo
    parts: tuple[Part, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        parts = tuple(Part.from_json(part) for part in value["parts"])
        return cls(value["kind"], Siteinfo(**value["siteinfo"]), parts)
