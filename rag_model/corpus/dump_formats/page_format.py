"""The base class of dump formats whose files contain the pages of a wiki."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar

from rag_model.corpus.articles import DropReason, classify_page
from rag_model.corpus.dump_formats.dump_format import PlanRequest
from rag_model.corpus.parts import PageRun, assemble_parts, choose_starts, is_ordered, select_template_runs
from rag_model.corpus.records import Page, Part, Plan, Section, Siteinfo, Slice, SourceKind
from rag_model.corpus.source import basename, describe_slice
from rag_model.errors import InputError

_MISMATCH_ADVICE = "download the dump and its index again, both with the same date"

_UNKNOWN_TIME = -(1 << 63)


# Returns the key of a `<page>` element, and the page if an article log contains it.
IdentifyPage = Callable[[bytes], tuple[bytes, Page | None]]


class PageFormat:
    """A dump format of wiki pages. Subclasses read siteinfo, split files, parse and clean pages.

    Planning divides the runs of pages into parts by page id. A worker reads the slices of its part,
    checks them, and yields each page id once.
    """

    kind: ClassVar[SourceKind] = "wiki"
    version: ClassVar[str] = ""
    has_templates: ClassVar[bool] = False  # whether parts can have pages that define templates
    # Whether `clean` takes `structures`, the names of the structures to extract.
    extracts_structures: ClassVar[bool] = False

    @abstractmethod
    def recognize(self, name: str, read_head: Callable[[], bytes]) -> bool:
        """Return whether a file has this format; see `DumpFormat.recognize`."""

    @abstractmethod
    def read_siteinfo(self, url: str) -> Siteinfo:
        """Return the metadata of a dump; its `dbname` identifies the wiki.

        Raises:
            InputError: The file is unreadable or has no metadata.
        """

    @abstractmethod
    def split(self, url: str, request: PlanRequest) -> Iterator[PageRun]:
        """Yield the runs of pages of a file, in file order.

        The slices of a run must be readable at any time and on any machine: byte ranges of the
        file, or files that `request.stage` published.

        Raises:
            InputError: The file is damaged.
        """

    @abstractmethod
    def parse_slice(self, byte_slice: Slice) -> Iterator[Page]:
        """Yield the pages of a slice, in bounded memory.

        Raises:
            InputError: The slice is unreadable or damaged.
        """

    def parse_unlogged(self, byte_slice: Slice, identify: IdentifyPage) -> Iterator[Page]:
        """Yield the pages of a slice with their keys; pages in an article log are not parsed.

        By default every page is parsed, and has no key.

        Raises:
            InputError: As for `parse_slice`.
        """
        return self.parse_slice(byte_slice)

    @abstractmethod
    def clean(self, page: Page, siteinfo: Siteinfo, *, anchors: bool) -> tuple[Section, ...]:
        """Return the text of a page by section; with `anchors`, also the positions of links."""

    def read_templates(self, part: Part, *, redirects: bool = False) -> Iterator[Page]:
        """Yield the pages of a part that define templates, in file order; by default none.

        The given part has only the slices of runs with `has_templates`. If `redirects` is set, the
        part has all slices, and redirects are yielded too.
        """
        return iter(())

    def is_companion(self, name: str) -> bool:
        """Return False: the format has no companion files."""
        return False

    def can_plan_fast(self, url: str) -> bool:
        """Return False: planning reads the whole file."""
        return False

    def classify(self, page: Page, siteinfo: Siteinfo) -> Page | DropReason:
        """Return the page if it is an article by DPR's rules, otherwise the reason to drop it."""
        return classify_page(page, siteinfo)

    def plan(self, urls: Sequence[str], request: PlanRequest) -> Plan:
        """Return the parts of a dump: ranges of page ids with the slices to read.

        Raises:
            InputError: A file is damaged or empty, or the files belong to several wikis.
        """
        siteinfo = self._read_common_siteinfo(urls)
        all_runs = chain.from_iterable(self.split(url, request) for url in urls)
        if request.limit is None:
            runs, last_page = list(all_runs), None
        else:
            runs, last_page = self._take_first_articles(all_runs, request.limit, siteinfo)
        if not runs:
            raise InputError(f"{basename(urls[0])} contains no pages: check that it is the right dump")
        runs.sort(key=lambda run: run.slice.first_page)
        if last_page is None:
            last_page = max(run.slice.last_page for run in runs)
        first_pages = choose_starts(runs, request.part_bytes, request.find_boundaries("wiki", siteinfo.dbname))
        parts, template_parts = (
            assemble_parts("wiki", page_runs, first_pages, last_page, request.part_format)
            for page_runs in (runs, select_template_runs(runs))
        )
        return Plan("wiki", siteinfo, parts, template_parts=tuple(part for part in template_parts if part.slices))

    def read(self, part: Part, identify: IdentifyPage | None = None) -> Iterator[Page]:
        """Yield the pages of the part's range of ids, in the order of the dump, each id once.

        If the plan found the ids in order, the pages are streamed. Otherwise the part is read
        twice, first for the ids only. If several pages have the same id, the one with the newest
        revision is used (by `get_recency`); if several have this revision, the first of them.

        If `identify` is given and the part is ordered, pages in the article log are not parsed.

        Raises:
            InputError: A slice is unreadable, damaged or hostile, or does not contain all pages
                that the plan lists.
        """
        return self._read_ordered(part, identify) if part.ordered else self._read_newest_revisions(part)

    def read_slice(self, byte_slice: Slice, identify: IdentifyPage | None = None) -> Iterator[Page]:
        """Yield all pages of a slice, and check that they have the ids that the plan lists.

        Raises:
            InputError: As for `read`.
        """
        min_id, max_id = byte_slice.last_page, byte_slice.first_page
        pages = self.parse_slice(byte_slice) if identify is None else self.parse_unlogged(byte_slice, identify)
        for page in pages:
            min_id, max_id = min(min_id, page.page_id), max(max_id, page.page_id)
            if min_id < byte_slice.first_page or max_id > byte_slice.last_page:
                raise _create_mismatch_error(byte_slice, f"it has page {page.page_id}")
            yield page
        if (min_id, max_id) != (byte_slice.first_page, byte_slice.last_page):
            raise _create_mismatch_error(byte_slice, f"it has only pages {min_id} to {max_id}")

    def _read_ordered(self, part: Part, identify: IdentifyPage | None) -> Iterator[Page]:
        last_id = -1
        for page in self._iter_part_pages(part, identify):
            if page.page_id <= last_id:
                raise InputError(
                    f"page {page.page_id} follows page {last_id} in {part.name}, but its index lists "
                    f"the pages in order: {_MISMATCH_ADVICE}"
                )
            last_id = page.page_id
            yield page

    def _read_newest_revisions(self, part: Part) -> Iterator[Page]:
        newest_recency_by_page: dict[int, tuple[int, int]] = {}
        for page in self._iter_part_pages(part):
            recency = get_recency(page.revised, page.rev_id)
            newest_recency_by_page[page.page_id] = max(recency, newest_recency_by_page.get(page.page_id, recency))
        for page in self._iter_part_pages(part):
            if newest_recency_by_page.get(page.page_id) == get_recency(page.revised, page.rev_id):
                del newest_recency_by_page[page.page_id]
                yield page

    def _iter_part_pages(self, part: Part, identify: IdentifyPage | None = None) -> Iterator[Page]:
        for byte_slice in part.slices:
            for page in self.read_slice(byte_slice, identify):
                if part.first_page <= page.page_id <= part.last_page:
                    yield page

    def _read_common_siteinfo(self, urls: Sequence[str]) -> Siteinfo:
        siteinfo = self.read_siteinfo(urls[0])
        for url in urls[1:]:
            dbname = self.read_siteinfo(url).dbname
            if dbname != siteinfo.dbname:
                raise InputError(
                    f"{basename(url)} is a dump of {dbname or 'an unnamed wiki'}, but "
                    f"{basename(urls[0])} of {siteinfo.dbname or 'an unnamed one'}: give the files "
                    "of one wiki"
                )
        return siteinfo

    def _take_first_articles(
        self, runs: Iterable[PageRun], limit: int, siteinfo: Siteinfo
    ) -> tuple[list[PageRun], int | None]:
        """Return the runs to read and the last page id to use, which give `limit` articles.

        If ids are out of order, whole runs are read, and the articles with the lowest ids are
        used. The last id is None if there are fewer articles.
        """
        selected_runs: list[PageRun] = []
        # The newest revision of each page id: its recency, and whether it is an article.
        newest_by_page: dict[int, tuple[tuple[int, int], bool]] = {}
        n_articles = 0
        for run in runs:
            selected_runs.append(run)
            if not newest_by_page and is_ordered(selected_runs[-2:]):
                for page in self.read_slice(run.slice):
                    n_articles += self.classify(page, siteinfo) is page
                    if n_articles == limit:
                        return selected_runs, page.page_id
                continue
            unread_runs = [run] if newest_by_page else selected_runs
            for page in chain.from_iterable(self.read_slice(run.slice) for run in unread_runs):
                revision = (get_recency(page.revised, page.rev_id), self.classify(page, siteinfo) is page)
                if page.page_id not in newest_by_page or revision[0] > newest_by_page[page.page_id][0]:
                    newest_by_page[page.page_id] = revision
            if len(newest_by_page) >= limit:
                article_ids = sorted(page_id for page_id, (_, is_article) in newest_by_page.items() if is_article)
                if len(article_ids) >= limit:
                    return selected_runs, article_ids[limit - 1]
        return selected_runs, None


def get_recency(revised: int | None, rev_id: int) -> tuple[int, int]:
    """Return the sort key of a page's revisions: the time (unknown is oldest), then the id.

    >>> max(get_recency(2_000, 7), get_recency(1_000, 9), get_recency(None, 11))
    (2000, 7)
    """
    return (_UNKNOWN_TIME if revised is None else revised, rev_id)


def _create_mismatch_error(byte_slice: Slice, problem: str) -> InputError:
    return InputError(
        f"{describe_slice(byte_slice)} should have pages {byte_slice.first_page} to "
        f"{byte_slice.last_page} according to its index, but {problem}: {_MISMATCH_ADVICE}"
    )
