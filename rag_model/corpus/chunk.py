"""Chunk a part: turn its pages into articles, and its articles into passages in one Parquet file.

Every page without passages is counted under its reason. A page that the cleaner cannot parse is quarantined with its
reason, and the part continues; only if more pages are quarantined than the recipe allows, the dump is assumed to be
broken and the part fails. One page and one row group are in memory at a time.

An article that an earlier build chunked the same way is not parsed again (`lineage`): its passages are inherited, and
the bytes of the file are the same as if it had been parsed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_model.corpus.articles import article_or_drop
from rag_model.corpus.chunkers.chunker import Chunker, Cut
from rag_model.corpus.chunkers.files import settings_of
from rag_model.corpus.chunkers.registry import build_chunker
from rag_model.corpus.documents import read_documents, read_ready_passages
from rag_model.corpus.dump import read_pages
from rag_model.corpus.lineage import ArticleLog, ArticleOutcome, Inheritance, article_key, cutting_basis
from rag_model.corpus.moments import iso_of
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Article, Page, Part, Passage, Siteinfo
from rag_model.corpus.salient import VERSION as SPANS_VERSION
from rag_model.corpus.salient import Salient, salient, salient_of
from rag_model.corpus.span_file import SpanWriter
from rag_model.corpus.wikitext import Unparsable, clean
from rag_model.errors import InputError, UsageError

VERSION = 5  # raise it when the same page would give other passages: then no article is inherited
MAX_LISTED = 100  # quarantined pages that are named; the others are only counted
_Cut = tuple[Passage, Sequence[Salient] | None]  # a passage, and its spans if they are known
BUCKET = 10  # words; width of the bins of the length histogram


@dataclass(frozen=True, slots=True)
class ChunkRecipe:
    """The settings that decide the passages of an article, and when too many quarantined pages fail a part."""

    chunker: str = "recursive"
    words: int | None = None  # short for the setting of that name; None: the chunker's own default
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the chunker; omitted ones keep defaults
    spans: bool = False  # keep the spans of links and dates beside the passages, for masks of `finetune realm`
    quarantine_share: float = 0.01  # share of a part's articles that may be unparsable
    quarantine_floor: int = 20  # this number may be unparsable in any part, even if it is more than the share

    def __post_init__(self) -> None:
        self.built()  # refuses an unknown chunker or setting before any work
        if not 0 <= self.quarantine_share <= 1:
            raise UsageError(f"quarantine_share is a share from 0 to 1, not {self.quarantine_share}")

    def built(self, files: Mapping[str, Path] | None = None) -> Chunker:
        """Return the chunker; `files` are the paths of settings that name a file by its digest.

        Raises:
            UsageError: there is no such chunker, or it refuses a setting.
        """
        if self.words is not None and "words" in self.settings:
            raise UsageError("the recipe's chunk table gives words twice: leave one of them out")
        words = {} if self.words is None else {"words": self.words}
        paths = {name: str(path) for name, path in (files or {}).items()}
        return build_chunker(self.chunker, {**words, **self.settings, **paths})

    def content(self) -> dict[str, Any]:
        """Return the recipe as JSON values: every setting, with its default if omitted, and digests in place of files.

        Raises:
            InputError: a file that a setting names is missing.
        """
        settings = settings_of(self.built())
        words = {"words": settings.pop("words")} if "words" in settings else {}
        others: dict[str, Any] = {"settings": settings} if settings else {}
        if self.spans:
            others["spans"] = True  # left out where there are none, as in recipes of earlier versions
        quarantine = {"quarantine_share": self.quarantine_share, "quarantine_floor": self.quarantine_floor}
        return {"chunker": self.chunker, **words, **others, **quarantine}

    def identity(self) -> dict[str, Any]:
        """Return all that decides a part's passages: the content, and the version of a chunker's own code."""
        version = self.built().version
        found = {**self.content(), **({"version": version} if version else {})}
        return found | ({"spans": SPANS_VERSION} if self.spans else {})


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A page that the cleaner could not parse."""

    page_id: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """The result of chunking a part, as JSON values."""

    rows: int  # passages
    digest: str = ""  # of the rows' values, whatever their encoding; empty where no recipe cut them
    articles: int = 0  # with at least one passage
    dropped: Mapping[str, int] = field(default_factory=dict)  # pages by reason; `unparsable` are the quarantined ones
    quarantined: tuple[Quarantined, ...] = ()  # the first `MAX_LISTED`
    newest_revision: str = ""  # latest timestamp among the articles, ISO 8601; empty without revisions
    words: int = 0
    lengths: Mapping[str, int] = field(default_factory=dict)  # passages by their words, in steps of `BUCKET`
    inherited: int = 0  # number of `articles` that were inherited; it does not depend on the part's content


def chunk_part(
    part: Part,
    siteinfo: Siteinfo,
    recipe: ChunkRecipe,
    out: Path,
    log: Path | None = None,
    earlier: Inheritance | None = None,
    suppressed: Collection[str] = (),
    files: Mapping[str, Path] | None = None,
    spans: Path | None = None,
) -> ChunkFacts:
    """Write the passages of one part to the Parquet file `out`, and return the counts.

    `log` is the path for the article log of a wiki, which a later build inherits from; `earlier` is what this build
    inherits from. Pages whose ids are `suppressed` are only counted. `files` are the paths of settings that the recipe
    names by their digest. `spans` is the path for the passages' salient spans, if the recipe keeps them.

    Raises:
        InputError: the source cannot be read, or more of its pages are unparsable than the recipe allows.
    """
    tally, articles, spanned = _Tally(suppressed=suppressed), ArticleLog(), SpanWriter()
    with PassageWriter(out) as writer:
        cutting = _Cutting(recipe, siteinfo, files)
        for passage, its in _passages(part, cutting, tally, articles, earlier or Inheritance()):
            if recipe.spans:
                spanned.write(salient(passage.text) if its is None else its)
            tally.words += passage.n_words
            tally.lengths[passage.n_words // BUCKET * BUCKET] += 1
            writer.write(passage)
        tally.check(part, recipe)
    if log is not None:
        articles.save(log)
    if spans is not None and recipe.spans:
        spanned.save(spans)
    return ChunkFacts(
        rows=writer.rows,
        digest=writer.digest,
        articles=tally.articles,
        dropped=dict(sorted(tally.dropped.items())),
        quarantined=tuple(tally.quarantined),
        newest_revision=tally.newest_revision,
        words=tally.words,
        lengths={str(length): count for length, count in sorted(tally.lengths.items())},
        inherited=tally.inherited,
    )


@dataclass(slots=True)
class _Tally:
    """Counts of pages, articles and passages, and the pages that are left out."""

    suppressed: Collection[str] = ()
    articles: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quarantined: list[Quarantined] = field(default_factory=list)
    newest_revision: str = ""
    words: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    inherited: int = 0

    def counted(self, passages: Sequence[Passage]) -> Sequence[Passage]:
        """Count one article with these passages, and return them."""
        if passages:
            self.articles += 1
        else:
            self.dropped["no_text"] += 1
        return passages

    def keeps(self, page_id: str) -> bool:
        """Whether a page may have passages; count it if not."""
        if page_id in self.suppressed:
            self.dropped["taken_down"] += 1
            return False
        return True

    def saw(self, page: Page) -> None:
        """Note an article's time, kept or taken down: the newest dates the dump."""
        self.newest_revision = max(self.newest_revision, iso_of(page.revised) or "")

    def quarantine(self, page: Page, reason: str) -> None:
        self.dropped["unparsable"] += 1
        if len(self.quarantined) < MAX_LISTED:
            self.quarantined.append(Quarantined(str(page.page_id), page.title, reason))

    def check(self, part: Part, recipe: ChunkRecipe) -> None:
        unparsable = self.dropped["unparsable"]
        allowed = max(recipe.quarantine_floor, recipe.quarantine_share * (self.articles + unparsable))
        if unparsable > allowed:
            first = self.quarantined[0]
            raise InputError(
                f"{unparsable} pages of {part.name} cannot be parsed and the recipe allows {allowed:.0f}, "
                f"the first is {first.title!r} ({first.reason}): "
                "check the dump, or raise quarantine_share in the recipe"
            )


@dataclass(frozen=True, slots=True)
class _Cutting:
    """The function and the settings that chunk articles."""

    recipe: ChunkRecipe
    siteinfo: Siteinfo
    files: Mapping[str, Path] | None

    def open(self) -> Cut:
        return self.recipe.built(self.files).open()

    def basis(self) -> bytes:
        return cutting_basis(self.siteinfo, self.recipe.identity(), VERSION)


def _passages(part: Part, cutting: _Cutting, tally: _Tally, log: ArticleLog, earlier: Inheritance) -> Iterator[_Cut]:
    """Yield the passages of a part of any kind, with their spans; ready-made ones are not changed."""
    if part.kind == "passages":
        yield from ((one, None) for one in read_ready_passages(part) if tally.keeps(one.page_id))
        return
    cut = cutting.open()
    if part.kind == "documents":
        for document in read_documents(part):
            if tally.keeps(document.page_id):
                yield from ((one, None) for one in tally.counted(list(cut(document))))
        return
    basis = cutting.basis()
    for page in _articles(part, cutting.siteinfo, tally):
        key = article_key(basis, page)
        kept = earlier.get(page, key)
        if kept and cutting.recipe.spans and not kept.spans:
            kept = None  # the file of spans is gone
        outcome = kept or _outcome(page, cutting.siteinfo, cut, spans=cutting.recipe.spans)
        tally.inherited += kept is not None and len(kept.passages) > 0
        log.note(page, key, outcome)
        if outcome.reason:
            tally.quarantine(page, outcome.reason)
            continue
        tally.saw(page)
        none = [None] * len(outcome.passages)
        yield from zip(tally.counted(outcome.passages), outcome.spans or none, strict=True)


def _articles(part: Part, siteinfo: Siteinfo, tally: _Tally) -> Iterator[Page]:
    for page in read_pages(part):
        kept = article_or_drop(page, siteinfo)
        if not isinstance(kept, Page):
            tally.dropped[kept] += 1
        elif tally.keeps(str(page.page_id)):
            yield page
        else:
            tally.saw(page)


def _outcome(page: Page, siteinfo: Siteinfo, cut: Cut, *, spans: bool) -> ArticleOutcome:
    """Return a page's passages, or the reason to quarantine it."""
    try:
        sections = clean(page.text, siteinfo, page.title, anchors=spans)
    except Unparsable as bound:
        return ArticleOutcome((), bound.reason)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as bug:
        # A bug in the cleaner that affects one page in millions must not fail the other pages of its part.
        return ArticleOutcome((), f"the cleaner failed: {type(bug).__name__}: {bug}")
    article = Article(str(page.page_id), page.rev_id, page.title, sections, page.revised)
    passages = list(cut(article))
    return ArticleOutcome(passages, spans=salient_of(article, passages) if spans else ())
