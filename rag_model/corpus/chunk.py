"""Chunk a part: turn its pages into articles, and its articles into passages in one Parquet file.

Pages without passages are counted by the reason why they have none. A page that the cleaner cannot
parse is quarantined and the part continues; if more pages are quarantined than the recipe allows,
the dump is assumed to be broken and the part fails. One page and one row group are in memory at a
time.

If an earlier build chunked the same article in the same way, its passages are reused
(`article_log`), and the article is not parsed again. Reuse does not change the bytes of the file.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from rag_model.corpus.article_log import (
    ArticleLog,
    ArticleResult,
    ReusableArticles,
    compute_article_key,
    compute_element_key,
    compute_key_basis,
)
from rag_model.corpus.chunkers.chunker import Chunker, ChunkFunction, build_chunker, settings_to_json
from rag_model.corpus.chunkers.structures import DEFAULT_WORDS, build_structure_passages
from rag_model.corpus.chunkers.structures import VERSION as STRUCTURES_VERSION
from rag_model.corpus.dump_formats.dump_format import (
    explain_format_errors,
    get_format_identity,
    get_part_format,
    iterate_results,
    plugin_error,
)
from rag_model.corpus.dump_formats.page_format import PageFormat
from rag_model.corpus.markup.template_table import NO_TEMPLATES, TemplateTable
from rag_model.corpus.markup.templates import use_templates
from rag_model.corpus.metadata import (
    NO_PAGES,
    PageTable,
    add_aliases,
    collect_metadata,
    merge_metadata,
    set_passage_metadata,
)
from rag_model.corpus.metadata import VERSION as METADATA_VERSION
from rag_model.corpus.passages import FULL_SCHEMA, KIND_SCHEMA, PASSAGE_SCHEMA, PassageWriter
from rag_model.corpus.records import (
    NO_METADATA,
    Article,
    Metadata,
    MetadataName,
    Page,
    Part,
    Passage,
    Siteinfo,
    StructureName,
    UnparsablePageError,
    format_iso,
)
from rag_model.corpus.salient_spans import VERSION as SPANS_VERSION
from rag_model.corpus.salient_spans import SpanWriter, find_article_spans, find_spans
from rag_model.errors import InputError, UsageError, format_count

# Increase it if a change gives other passages: a build then reuses no articles of its parent.
VERSION = 13
# The version in the keys of articles. It stays the same, because the ids of snapshots depend on
# these keys; the provenance of a snapshot records `VERSION`.
KEY_VERSION = 12
MAX_LISTED = 100  # maximum quarantined pages to list; further pages are only counted
MAX_UNKNOWN_TEMPLATES = 100  # maximum unknown templates to list; these are the most frequent
# Title, namespace and id as MediaWiki writes them; `html.unescape` decodes these entities.
_ELEMENT_HEAD = re.compile(
    rb"<page>\s*<title>((?:[^<&]|&(?:amp|lt|gt|quot|#0?39);)*)</title>\s*<ns>(\d+)</ns>\s*<id>(\d{1,18})</id>"
)
# A page with such markup may continue after its first `</page>`.
_UNUSUAL_MARKUP = re.compile(rb"<(?:[!?]|page\b)")
LENGTH_BIN = 10  # bin width of the histogram of lengths, in words


@dataclass(frozen=True, slots=True)
class ChunkRecipe:
    """The chunker, its settings, and the limits for quarantined pages."""

    chunker: str = "recursive"
    words: int | None = None  # shorthand for the setting `words`; None uses its default
    # Settings of the chunker; omitted ones keep their defaults.
    settings: Mapping[str, Any] = field(default_factory=dict)
    spans: bool = False  # also store spans of links and dates, for the masks of `finetune realm`
    # Structures of a wiki's pages that become passages of their own; see `markup.structures`.
    structures: tuple[StructureName, ...] = ()
    # Metadata of a page that are stored with its passages; see `corpus.metadata`.
    metadata: tuple[MetadataName, ...] = ()
    quarantine_share: float = 0.01  # maximum share of unparsable articles in a part
    quarantine_floor: int = 20  # number of unparsable articles that is always allowed

    def __post_init__(self) -> None:
        self.create_chunker()  # an unknown chunker or setting must be rejected early
        for name, choices in (("structures", StructureName), ("metadata", MetadataName)):
            setting_values, allowed_values = {*getattr(self, name)}, get_args(choices)
            if unknown_values := sorted(setting_values - {*allowed_values}):
                raise UsageError(
                    f"{name} has the unknown value {unknown_values[0]!r}: choose from {', '.join(allowed_values)}"
                )
            object.__setattr__(self, name, tuple(sorted(setting_values)))
        if not 0 <= self.quarantine_share <= 1:
            raise UsageError(f"quarantine_share must be from 0 to 1, not {self.quarantine_share}")

    def create_chunker(self, files: Mapping[str, Path] | None = None) -> Chunker:
        """Create the chunker; `files` maps each setting that is a digest to the path of its file.

        Raises:
            UsageError: The chunker does not exist, or rejects a setting.
        """
        if self.words is not None and "words" in self.settings:
            raise UsageError("the recipe gives words twice, in [chunk] and in its settings: remove one of them")
        words_setting = {} if self.words is None else {"words": self.words}
        path_by_setting = {name: str(path) for name, path in (files or {}).items()}
        return build_chunker(self.chunker, {**words_setting, **self.settings, **path_by_setting})

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as JSON values, with defaults, and with digests instead of file paths.

        Raises:
            InputError: The file of a setting is missing.
        """
        settings = settings_to_json(self.create_chunker())
        words_setting = {"words": settings.pop("words")} if "words" in settings else {}
        optional_fields: dict[str, Any] = {"settings": settings} if settings else {}
        if self.spans:
            optional_fields["spans"] = True  # if false, it is omitted, as in early recipes
        if self.structures:
            optional_fields["structures"] = list(self.structures)
        if self.metadata:
            optional_fields["metadata"] = list(self.metadata)
        quarantine_limits = {"quarantine_share": self.quarantine_share, "quarantine_floor": self.quarantine_floor}
        return {"chunker": self.chunker, **words_setting, **optional_fields, **quarantine_limits}

    def get_identity(self) -> dict[str, Any]:
        """Return all values that affect passages, including the version of the chunker."""
        chunker_version = self.create_chunker().version
        identity = {**self.to_json(), **({"version": chunker_version} if chunker_version else {})}
        structures_version = {"structures_version": STRUCTURES_VERSION} if self.structures else {}
        metadata_version = {"metadata_version": METADATA_VERSION} if self.metadata else {}
        spans_version = {"spans": SPANS_VERSION} if self.spans else {}
        return identity | spans_version | structures_version | metadata_version

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the passages that this recipe produces."""
        if {*self.metadata} - {"aliases"}:
            return FULL_SCHEMA
        return KIND_SCHEMA if self.structures else PASSAGE_SCHEMA


@dataclass(frozen=True, slots=True)
class QuarantinedPage:
    """A page that the cleaner could not parse."""

    page_id: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """Statistics of a chunked part, as JSON values."""

    rows: int  # passages
    # Digest of the values in the rows, whatever the file's encoding; empty for imported passages.
    digest: str = ""
    articles: int = 0  # articles with at least one passage
    # Number of dropped pages by reason; quarantined pages have the reason `unparsable`.
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: tuple[QuarantinedPage, ...] = ()  # the first `MAX_LISTED`
    # Latest revision time of the articles, ISO 8601; empty if no article has a revision time.
    newest_revision: str = ""
    words: int = 0  # words in all passages
    # Number of passages by length, in bins of `LENGTH_BIN` words.
    lengths: Mapping[str, int] = field(default_factory=dict)
    # Number of articles that use each unknown template, for the most frequent templates.
    unknown_templates: Mapping[str, int] = field(default_factory=dict)
    # Number of reused articles, which depends on the parent snapshot and not on the content.
    inherited: int = 0


def chunk_part(
    part: Part,
    siteinfo: Siteinfo,
    recipe: ChunkRecipe,
    out: Path,
    log: Path | None = None,
    reusable: ReusableArticles | None = None,
    suppressed: Collection[str] = (),
    files: Mapping[str, Path] | None = None,
    spans: Path | None = None,
    template_table: TemplateTable = NO_TEMPLATES,
    page_table: PageTable = NO_PAGES,
) -> ChunkStats:
    """Write the passages of one part to a Parquet file, and return the statistics.

    Args:
        part: part of the dump.
        siteinfo: metadata of the dump.
        recipe: chunker and limits.
        out: path of the passage file.
        log: path for the article log, from which a later build reuses articles.
        reusable: articles of earlier parts, which are reused.
        suppressed: ids of pages that were taken down; they are counted but not chunked.
        files: for each setting that names a file, the path; the recipe stores only its digest.
        spans: path for the salient spans, if the recipe stores them.
        template_table: templates of the wiki; must be the table that was given to `reusable`.
        page_table: redirects and Wikidata items of the part's pages.

    Raises:
        InputError: The source cannot be read, or too many of its pages are unparsable.
    """
    tally, article_log, span_writer = _PartTally(suppressed=suppressed), ArticleLog(), SpanWriter()
    with PassageWriter(out, recipe.schema) as writer:
        context = _ChunkContext(recipe, siteinfo, files, template_table, page_table)
        for article in _iter_articles(part, context, tally, reusable or ReusableArticles()):
            result, stored_article = article.result, article.result.stored
            if stored_article is None:
                digest = writer.write_article(result.passages)
            else:
                digest = stored_article.digest
                writer.copy_article(stored_article.file, stored_article.first_row, stored_article.n_rows, digest)
            if recipe.spans:
                for passage_spans in result.spans or [find_spans(passage.text) for passage in result.passages]:
                    span_writer.write(passage_spans)
            if article.key:
                template_digest = template_table.compute_digest(result.templates) if result.templates else b""
                article_log.record(article.page_id, article.key, result, digest, article.revised, template_digest)
        tally.check_quarantine(part, recipe)
    length_bins = Counter[int]()
    for n_words, n_passages in writer.lengths.items():
        length_bins[n_words // LENGTH_BIN * LENGTH_BIN] += n_passages
    if log is not None:
        article_log.save(log)
    if spans is not None and recipe.spans:
        span_writer.save(spans)
    return ChunkStats(
        rows=writer.rows,
        digest=writer.digest,
        articles=tally.articles,
        dropped=dict(sorted(tally.dropped.items())),
        quarantined=tuple(tally.quarantined),
        newest_revision=format_iso(tally.newest_revision) or "",
        words=sum(words * n_passages for words, n_passages in writer.lengths.items()),
        lengths={str(length): n_passages for length, n_passages in sorted(length_bins.items())},
        unknown_templates=dict(
            sorted(tally.unknown_templates.items(), key=lambda item: (-item[1], item[0]))[:MAX_UNKNOWN_TEMPLATES]
        ),
        inherited=tally.reused,
    )


@dataclass(slots=True)
class _PartTally:
    """Counters of pages and articles, and the quarantined pages."""

    suppressed: Collection[str] = ()
    articles: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quarantined: list[QuarantinedPage] = field(default_factory=list)
    newest_revision: int | None = None  # seconds since 1970, UTC
    reused: int = 0  # reused articles
    unknown_templates: Counter[str] = field(default_factory=Counter)

    def count_article(self, result: ArticleResult, *, is_reused: bool) -> None:
        """Count an article with passages, or a page without text."""
        if result.n_passages:
            self.articles += 1
            self.reused += is_reused
        else:
            self.dropped["no_text"] += 1

    def accept_page(self, page_id: str) -> bool:
        """Return whether a page may have passages; if not, count it as taken down."""
        if page_id in self.suppressed:
            self.dropped["taken_down"] += 1
            return False
        return True

    def record_time(self, page: Page) -> None:
        """Record an article's time, even after a takedown: the newest time dates the whole dump."""
        if page.revised is not None and (self.newest_revision is None or page.revised > self.newest_revision):
            self.newest_revision = page.revised

    def quarantine(self, page: Page, reason: str) -> None:
        self.dropped["unparsable"] += 1
        if len(self.quarantined) < MAX_LISTED:
            self.quarantined.append(QuarantinedPage(str(page.page_id), page.title, reason))

    def check_quarantine(self, part: Part, recipe: ChunkRecipe) -> None:
        n_unparsable = self.dropped["unparsable"]
        max_unparsable = max(recipe.quarantine_floor, recipe.quarantine_share * (self.articles + n_unparsable))
        if n_unparsable > max_unparsable:
            first_page = self.quarantined[0]
            raise InputError(
                f"{format_count(n_unparsable, 'page')} of {part.name} cannot be parsed, but the recipe "
                f"allows {max_unparsable:.0f}; the first is {first_page.title!r} ({first_page.reason}): "
                "check the dump, or raise quarantine_share in the recipe"
            )


@dataclass(frozen=True, slots=True)
class _ChunkContext:
    """The recipe with its files and the data of the wiki, which all pages of a part share."""

    recipe: ChunkRecipe
    siteinfo: Siteinfo
    files: Mapping[str, Path] | None
    table: TemplateTable = NO_TEMPLATES
    page_table: PageTable = NO_PAGES

    def open_chunker(self) -> ChunkFunction:
        return self.recipe.create_chunker(self.files).open()

    def compute_key_basis(self, part: Part) -> bytes:
        identity = self.recipe.get_identity() | get_format_identity(part)
        if self.table.disambiguation:
            identity["disambiguation"] = self.table.disambiguation.pattern
        return compute_key_basis(self.siteinfo, identity, KEY_VERSION)

    def find_element_metadata(self, element: bytes) -> Metadata | None:
        """Return the metadata that the page table has for a page, given as its XML element.

        Return None if the title cannot be read without parsing the element.
        """
        if not self.page_table:
            return NO_METADATA
        head_match = _ELEMENT_HEAD.match(element)
        if head_match is None:
            return None
        if head_match[2] != b"0":
            return NO_METADATA
        return self.page_table.find(int(head_match[3]), unescape(head_match[1].decode(errors="replace")))

    def add_metadata(self, page: Page) -> Page:
        """Return the page, with the metadata that the page table has for an article."""
        # Pages that are taken from the article log have no title to look up.
        if not self.page_table or page.namespace != 0 or not page.title:
            return page
        metadata = merge_metadata(page.metadata, self.page_table.find(page.page_id, page.title))
        return replace(page, metadata=metadata)


@dataclass(slots=True)
class _ArticleEntry:
    """The result of an article; an article without a key is not logged."""

    result: ArticleResult
    page_id: str = ""
    key: bytes = b""
    revised: int | None = None


def _iter_articles(
    part: Part, context: _ChunkContext, tally: _PartTally, reusable: ReusableArticles
) -> Iterator[_ArticleEntry]:
    """Yield the articles of a part in order; each imported passage is an article of its own."""
    dump_format = get_part_format(part)
    if isinstance(dump_format, PageFormat):
        yield from _chunk_pages(part, dump_format, context, tally, reusable)
        return
    open_chunker, compute_key_basis = cache(context.open_chunker), cache(context.compute_key_basis)
    for item in iterate_results(dump_format, "read", lambda: dump_format.read(part)):
        if not isinstance(item, Passage | Article):
            raise plugin_error(dump_format, f"yields {item!r:.60} from `read` instead of an Article or a Passage")
        if not tally.accept_page(str(item.page_id)):
            continue
        if isinstance(item, Passage):
            yield _ArticleEntry(ArticleResult([item]))
        else:
            metadata = context.recipe.metadata
            key = compute_article_key(compute_key_basis(part), item, with_metadata=bool(metadata))
            reused_article = reusable.find(key, with_spans=context.recipe.spans)
            result = reused_article or _chunk_document(item, metadata, open_chunker())
            tally.count_article(result, is_reused=reused_article is not None)
            yield _ArticleEntry(result, str(item.page_id), key, item.revised)


def _chunk_document(
    article: Article,
    metadata_names: Collection[MetadataName],
    chunk_article: ChunkFunction,
) -> ArticleResult:
    if "aliases" in metadata_names:
        sections = add_aliases(article.sections, article.title, article.metadata.aliases)
        article = replace(article, sections=sections)
    return ArticleResult(set_passage_metadata(chunk_article(article), article.metadata, metadata_names))


def _chunk_pages(
    part: Part, page_format: PageFormat, context: _ChunkContext, tally: _PartTally, reusable: ReusableArticles
) -> Iterator[_ArticleEntry]:
    """Yield the articles and dropped pages of a part of a wiki dump; reuse unchanged articles."""
    open_chunker, with_spans = cache(context.open_chunker), context.recipe.spans
    key_basis = context.compute_key_basis(part)

    def identify(element: bytes) -> tuple[bytes, Page | None]:
        metadata = context.find_element_metadata(element)
        if metadata is None:
            return b"", None
        key = compute_element_key(key_basis, element, metadata)
        return key, reusable.find_page(key, with_spans=with_spans) or _skim_outside_page(element, part)

    for parsed_page in iterate_results(page_format, "read", lambda: page_format.read(part, identify)):
        page = context.add_metadata(parsed_page)
        key = page.key or compute_article_key(key_basis, page)
        reused_article = reusable.find(key, with_spans=with_spans)
        if reused_article is None and page.key:  # earlier logs have no keys of XML elements
            reused_article = reusable.find(compute_article_key(key_basis, page), with_spans=with_spans)
        result = reused_article or _classify_page(page, page_format, context)
        if not (result and result.dropped) and not tally.accept_page(str(page.page_id)):
            tally.record_time(page)
            continue
        result = result or _chunk_page(page, page_format, context, open_chunker())
        if result.dropped:
            tally.dropped[result.dropped] += 1
            if str(page.page_id) in tally.suppressed:
                continue  # pages that were taken down are not logged
        elif result.reason:
            tally.quarantine(page, result.reason)
        else:
            tally.record_time(page)
            tally.count_article(result, is_reused=reused_article is not None)
            if result.templates:  # faster than an empty update
                tally.unknown_templates.update(name for name in result.templates if name not in context.table.entries)
        yield _ArticleEntry(result, str(page.page_id), key, page.revised)


def _skim_outside_page(element: bytes, part: Part) -> Page | None:
    """Return a page with only its id if it is in another part; None if it must be parsed.

    The first and the last stream of a part may also contain pages of the neighbouring parts.
    """
    head_match = _ELEMENT_HEAD.match(element)
    if head_match is None or part.first_page <= int(head_match[3]) <= part.last_page:
        return None
    if not element.endswith(b"</page>") or _UNUSUAL_MARKUP.search(element, 1):
        return None
    return Page(int(head_match[3]), 0, None, 0, "", False, "", "")


def _classify_page(page: Page, page_format: PageFormat, context: _ChunkContext) -> ArticleResult | None:
    """Return a result with the reason to drop a page, or None if the page is an article."""
    with explain_format_errors(page_format, "classify"):
        page_or_reason = page_format.classify(page, context.siteinfo)
    if isinstance(page_or_reason, str):
        return ArticleResult(dropped=page_or_reason)
    if not isinstance(page_or_reason, Page):
        raise plugin_error(page_format, f"returns {page_or_reason!r:.60} from `classify` instead of a page or a reason")
    if context.table.disambiguation and context.table.disambiguation.search(page.text):
        return ArticleResult(dropped="disambiguation")
    return None


def _chunk_page(
    page: Page, page_format: PageFormat, context: _ChunkContext, chunk_article: ChunkFunction
) -> ArticleResult:
    """Return the passages of a page, or the reason to quarantine it."""
    with_spans, structures = context.recipe.spans, context.recipe.structures
    # A format of another package may have a `clean` without the parameter `structures`.
    clean_options = {"structures": structures} if structures and page_format.extracts_structures else {}
    try:
        with use_templates(context.table) as template_use:
            sections = page_format.clean(page, context.siteinfo, anchors=with_spans, **clean_options)
    except UnparsablePageError as error:
        return ArticleResult((), error.reason)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A bug in the cleaner that affects one page in millions must not fail the whole part.
        return ArticleResult((), f"the cleaner failed: {type(error).__name__}: {error}")
    metadata_names = context.recipe.metadata
    metadata = collect_metadata(page, context.siteinfo) if metadata_names else page.metadata
    if "aliases" in metadata_names:
        sections = add_aliases(sections, page.title, metadata.aliases)
    prose = tuple(section for section in sections if section.text) if clean_options else sections
    article = Article(str(page.page_id), page.rev_id, page.title, prose, page.revised)
    passages = list(chunk_article(article))
    passage_spans = find_article_spans(article, passages) if with_spans else []
    if clean_options:
        used_ids = {passage.id for passage in passages}
        max_words = getattr(context.recipe.create_chunker(), "words", DEFAULT_WORDS)
        structure_passages = list(build_structure_passages(article, sections, max_words, used_ids))
        passages += structure_passages
        passage_spans += [find_spans(passage.text) for passage in structure_passages if with_spans]
    passages = set_passage_metadata(passages, metadata, metadata_names)
    return ArticleResult(passages, spans=passage_spans, templates=tuple(sorted(template_use.names)))
