"""The chunk job: split the articles in each part of the dump into one file of passages.

Before the chunk job, the template job reads the template pages of each part, and the launcher
merges the results, whose size is limited, into one table (`template_table`). The table is
an input of every part: an article is chunked again if a template that it uses has changed.

If the recipe requests aliases or Wikidata items, the template job reads the redirects of every part
too. Further jobs sort the redirects by target and read the wiki's table of page properties. An
article is chunked again if its aliases or its item changed.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, log2
from pathlib import Path
from typing import Any

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings, OnProgress, Report
from beam_jobs.tasks import TaskFunction
from rag_model.corpus.article_log import ARTICLE_LOG_VERSION, ReusableArticles
from rag_model.corpus.chunk import VERSION, ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats.dump_format import get_format_identity, get_part_format
from rag_model.corpus.dump_formats.page_format import PageFormat
from rag_model.corpus.markup import template_table
from rag_model.corpus.markup.template_table import NAMESPACES, NO_TEMPLATES, TemplateTable
from rag_model.corpus.metadata import (
    NO_PAGES,
    TABLE_VERSION,
    PageTable,
    merge_redirects,
    write_items,
    write_redirects,
)
from rag_model.corpus.plan import compute_source_digest, find_dump_properties, has_digest_names
from rag_model.corpus.records import MetadataName, Page, Part, Plan, Siteinfo
from rag_model.corpus.redact import select_pages
from rag_model.corpus.source import basename, get_size, read_bytes, read_decoded
from rag_model.digest import canonical_json, digest_chunks
from rag_model.extras import get_versions
from rag_model.snapshots.encoding import SettingFiles, StoredChunker, fetch_setting_files
from rag_model.snapshots.parent import Parent, ParentPart, fetch_parent_files
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.toml import from_table

# maximum bytes of a dump that the launcher itself reads to look up the parts in the memo
_MAX_LAUNCHER_BYTES = 64 << 20
# compressed bytes of a dump that one core chunks per second if it parses all articles, and if it
# reuses nearly all
_PARSED_BYTES_PER_SECOND, _REUSED_BYTES_PER_SECOND = 1e6, 7e6
_READ_BYTES_PER_SECOND = 5e6  # compressed bytes of a dump whose templates one core reads per second
# speed of one core with a chunker's model, in compressed bytes * bytes of the model per second: 312
# compressed bytes per passage, times `_ENCODED_PER_SECOND` of the embed job
_ENCODED_BYTES_PER_SECOND = 2.5e12
_MAX_FILE_REDIRECTS = 1 << 18  # maximum redirects in a sorted file; sorting it takes 150 MB
_REDIRECTS_PER_SECOND = 2e5  # redirects merged and sorted per second
_PROPERTY_BYTES_PER_SECOND = 1e7  # compressed bytes of page properties read per second
# Function that runs a stage and returns the reports. Arguments: the stage's name, the function to
# run, the tasks, and a function that estimates the seconds of a task.
RunTasks = Callable[[str, TaskFunction[Any], Sequence[Any], Callable[[Any], float]], list[Report]]


@dataclass(frozen=True, slots=True)
class TemplateTask:
    """Task to read the templates of one part."""

    part: Part
    siteinfo: Siteinfo
    with_redirects: bool = False  # whether to read the redirects too

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the templates; this reads the part's bytes."""
        return {
            "source": compute_source_digest(self.part),
            "siteinfo": asdict(self.siteinfo),
            "code": template_table.VERSION,
            **({"redirects": TABLE_VERSION} if self.with_redirects else {}),
            **get_format_identity(self.part),
        }


def plan_template_tasks(plan: Plan, *, with_redirects: bool = False) -> list[TemplateTask]:
    """Return a task for each part that may have templates, or, with redirects, for every part.

    The list is empty if the dump format has no templates.
    """
    if not _has_templates(plan):
        return []
    parts = plan.parts if with_redirects or plan.template_parts is None else plan.template_parts
    return [TemplateTask(part, plan.siteinfo, with_redirects) for part in parts]


def _count_bytes(parts: Iterable[Part]) -> int:
    """Return the number of compressed bytes of the dump that tasks for these parts read."""
    return sum(part_slice.length for part in parts for part_slice in part.slices)


def _has_templates(plan: Plan) -> bool:
    """Return whether the dump's format has templates; only such dumps have a table of page
    properties.
    """
    part_formats = [get_part_format(part) for part in plan.parts[:1]]
    return any(isinstance(part_format, PageFormat) and part_format.has_templates for part_format in part_formats)


def read_templates(task: TemplateTask, store: Store) -> Report:
    """Read the templates of one part, and redirects if requested, unless the memo has them."""

    def produce(workdir: Path) -> StageResult:
        part_format, siteinfo = get_part_format(task.part), task.siteinfo
        # Formats of other packages may have no parameter `redirects`.
        options = {"redirects": True} if task.with_redirects else {}
        pages = part_format.read_templates(task.part, **options) if isinstance(part_format, PageFormat) else iter(())
        redirects = list[Page]()
        template_pages = _separate_redirects(pages, redirects)
        templates = template_table.read_templates(template_pages, siteinfo.language, siteinfo.namespaces)
        paths = {"templates": workdir / "templates.json"}
        paths["templates"].write_text(json.dumps(templates), encoding="utf-8")
        template_counts = {"templates": len(templates)}
        if task.with_redirects:
            paths["redirects"] = workdir / "redirects.arrow"
            template_counts["redirects"] = write_redirects(redirects, siteinfo, paths["redirects"])
        return StageResult(paths, template_counts)

    memo_record, _ = store.memo.get_or_create("templates", task.inputs(), produce)
    blob_dicts = {name: blob_ref.to_json() for name, blob_ref in memo_record.outputs.items()}
    return {"blobs": blob_dicts, **memo_record.stats}


def _separate_redirects(pages: Iterator[Page], redirects: list[Page]) -> Iterator[Page]:
    """Yield the pages that define templates; append all other pages to `redirects`."""
    for page in pages:
        if page.namespace in NAMESPACES:
            yield page
        else:
            redirects.append(page)


def merge_templates(store: Store, reports: Sequence[Report]) -> BlobRef | None:
    """Merge the templates of all parts into one stored table; return None if there are none."""
    blobs = [BlobRef.from_json(report["blobs"]["templates"]) for report in reports if report["templates"]]
    table = template_table.merge_templates(json.loads(store.blobs.read(blob)) for blob in blobs)
    return store.blobs.put_bytes(table.to_bytes()) if table else None


@dataclass(frozen=True, slots=True)
class RedirectTask:
    """Task to merge and sort the redirects whose sort keys begin with the bits of `number`.

    There is one task for each of the 2**bits numbers.
    """

    parts: BlobRef  # JSON list with one blob of redirects for each part
    number: int
    bits: int
    removed: tuple[int, ...] = ()  # ids of redirects that were taken down

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the sorted file."""
        return {
            "parts": self.parts.id,
            "number": self.number,
            "bits": self.bits,
            "code": TABLE_VERSION,
            **({"removed": self.removed} if self.removed else {}),
        }


def sort_redirects(task: RedirectTask, store: Store) -> Report:
    """Merge and sort the task's redirects of all parts, unless the memo has the result."""

    def produce(workdir: Path) -> StageResult:
        path = workdir / "redirects.arrow"
        redirect_refs = map(BlobRef.from_json, json.loads(store.blobs.read(task.parts)))
        merge_redirects(map(store.blobs.get_local_path, redirect_refs), task.number, task.bits, path, task.removed)
        return StageResult({"redirects": path}, {})

    record, _ = store.memo.get_or_create("redirects", task.inputs(), produce)
    return record.outputs["redirects"].to_json()


@dataclass(frozen=True, slots=True)
class WikidataItemsTask:
    """Task to read the table of page properties that is published with a dump."""

    url: str

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the items; this reads the whole file."""
        return {"source": digest_chunks(read_bytes(self.url)), "code": TABLE_VERSION}


def read_wikidata_items(task: WikidataItemsTask, store: Store) -> Report:
    """Read the Wikidata items in the table, unless the memo has them."""

    def produce(workdir: Path) -> StageResult:
        path = workdir / "items.arrow"
        n_items = write_items(read_decoded(task.url), basename(task.url), path)
        return StageResult({"items": path}, {"items": n_items})

    record, _ = store.memo.get_or_create("items", task.inputs(), produce)
    return record.outputs["items"].to_json()


@dataclass(frozen=True, slots=True)
class DumpTables:
    """Tables that are needed to chunk the articles of a dump; a missing table is None."""

    templates: BlobRef | None = None  # the table of the wiki's templates
    pages: BlobRef | None = None  # JSON with the blobs of a `PageTable`'s files


NO_TABLES = DumpTables()


def collect_tables(
    store: Store, plan: Plan, dump: str, metadata: Collection[MetadataName], run_tasks: RunTasks
) -> DumpTables:
    """Read the templates of a dump, and the redirects and Wikidata items that `metadata` requests.

    If aliases are requested, the whole dump is read. Otherwise, if the plan contains the pages'
    titles, only compressed streams with templates are read.
    """
    template_tasks = plan_template_tasks(plan, with_redirects="aliases" in metadata)
    reports = run_tasks(
        "templates", read_templates, template_tasks, lambda task: _count_bytes([task.part]) / _READ_BYTES_PER_SECOND
    )
    table_files: dict[str, Any] = {}
    if n_redirects := sum(report.get("redirects", 0) for report in reports):
        parts = store.blobs.put_bytes(
            canonical_json([report["blobs"]["redirects"] for report in reports if report["redirects"]])
        )
        n_bits = ceil(log2(max(1, n_redirects / _MAX_FILE_REDIRECTS)))
        removed_pages = store.takedowns.list_pages(plan.siteinfo.dbname)
        removed_ids = tuple(sorted(int(page) for page in removed_pages if page.isdecimal()))
        redirect_tasks = [RedirectTask(parts, number, n_bits, removed_ids) for number in range(1 << n_bits)]
        task_seconds = n_redirects / len(redirect_tasks) / _REDIRECTS_PER_SECOND
        table_files["redirects"] = run_tasks("redirects", sort_redirects, redirect_tasks, lambda _: task_seconds)
    if "wikidata" in metadata and _has_templates(plan) and (url := find_dump_properties(dump)):
        seconds = get_size(url) / _PROPERTY_BYTES_PER_SECOND
        table_files["items"] = run_tasks("items", read_wikidata_items, [WikidataItemsTask(url)], lambda _: seconds)
    page_table_blob = store.blobs.put_bytes(canonical_json(table_files)) if table_files else None
    return DumpTables(merge_templates(store, reports), page_table_blob)


def run_table_jobs(
    store: Store,
    plan: Plan,
    dump: str,
    metadata: Collection[MetadataName],
    job_settings: JobSettings,
    on_progress: OnProgress | None = None,
) -> DumpTables:
    """Read the tables of a dump by jobs; see `collect_tables`."""

    def run_tasks(
        stage: str, function: TaskFunction[Any], tasks: Sequence[Any], estimate_seconds: Callable[[Any], float]
    ) -> list[Report]:
        # A part is looked up by a digest of its bytes, so a look-up of a large dump would read it
        # once more.
        is_small = stage != "templates" or _count_bytes(task.part for task in tasks) <= _MAX_LAUNCHER_BYTES
        return run_job(stage, function, tasks, job_settings, on_progress, estimate_seconds, memoised=is_small)

    return collect_tables(store, plan, dump, metadata, run_tasks)


def load_template_table(store: Store, blob: BlobRef | None) -> TemplateTable:
    """Return the stored table of templates, or an empty table if `blob` is None."""
    return NO_TEMPLATES if blob is None else _read_template_table(store.blobs.get_local_path(blob))


@lru_cache(1)
def _read_template_table(path: Path) -> TemplateTable:
    return TemplateTable.from_bytes(path.read_bytes())


def load_page_table(store: Store, task: "ChunkTask") -> PageTable:
    """Return the redirects and Wikidata items of a part's articles."""
    if task.tables.pages is None:
        return NO_PAGES
    files = json.loads(store.blobs.read(task.tables.pages))
    paths = {
        name: [store.blobs.get_local_path(BlobRef.from_json(blob)) for blob in blobs] for name, blobs in files.items()
    }
    items = next(iter(paths.get("items", [])), None)
    return PageTable(paths.get("redirects", []), items, task.part.first_page, task.part.last_page)


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """Task to read, clean and chunk one part."""

    part: Part
    siteinfo: Siteinfo
    recipe: ChunkRecipe
    # parts of the parent snapshot, whose unchanged articles are reused
    parent_parts: tuple[ParentPart, ...] = ()
    removed_pages: tuple[str, ...] = ()  # ids of the part's pages that were taken down
    setting_files: SettingFiles = ()  # the files that the chunker's settings name
    tables: DumpTables = NO_TABLES

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the passages; this reads the part's bytes.

        The parent's parts are not inputs, because reuse gives the same passages.

        Raises:
            InputError: the source cannot be read.
        """
        return {
            "source": compute_source_digest(self.part),
            "kind": self.part.kind,
            "siteinfo": asdict(self.siteinfo),
            "recipe": self.recipe.get_identity(),
            "code": VERSION,
            "log": ARTICLE_LOG_VERSION,
            "libraries": get_versions("pyarrow"),
            **get_format_identity(self.part),
            # omitted if empty, so that parts without removed pages keep their memo keys
            **({"suppressed": self.removed_pages} if self.removed_pages else {}),
            **({"templates": self.tables.templates.id} if self.tables.templates else {}),
            **({"pages": self.tables.pages.id} if self.tables.pages else {}),
        }


def plan_chunk_tasks(
    store: Store, plan: Plan, chunker: StoredChunker, parent: Parent, tables: DumpTables = NO_TABLES
) -> list[ChunkTask]:
    """Return a task for each part of a plan, with the parts of the parent to reuse, the ids of
    removed pages, and the tables of `collect_tables`.
    """
    removed_pages = store.takedowns.list_pages(plan.siteinfo.dbname)
    return [
        ChunkTask(
            part,
            plan.siteinfo,
            chunker.recipe,
            parent.find_chunked_parts(part),
            select_pages(part.kind, part.first_page, part.last_page, removed_pages),
            chunker.files,
            tables,
        )
        for part in plan.parts
    ]


def chunk(task: ChunkTask, store: Store) -> Report:
    """Chunk one part into `passages`, unless the same bytes were chunked with the same recipe
    before.
    """

    def produce(workdir: Path) -> StageResult:
        passages_path, article_log_path = workdir / "passages.parquet", workdir / "articles.parquet"
        spans_path = workdir / "spans.npy" if task.recipe.spans else None
        table = load_template_table(store, task.tables.templates)
        page_table = load_page_table(store, task)
        with ReusableArticles(fetch_parent_files(store, task.parent_parts), table) as reusable_articles:
            files = fetch_setting_files(store, task.setting_files)
            stats = chunk_part(
                task.part,
                task.siteinfo,
                task.recipe,
                passages_path,
                article_log_path,
                reusable_articles,
                task.removed_pages,
                files,
                spans_path,
                table,
                page_table,
            )
        outputs = {"passages": passages_path, "article_log": article_log_path} | (
            {"spans": spans_path} if spans_path else {}
        )
        return StageResult(outputs, asdict(stats))

    record, is_new = store.memo.get_or_create("chunk", task.inputs(), produce)
    return asdict(ChunkResult.from_record(record, is_new=is_new))


def run(
    tasks: Sequence[ChunkTask], job_settings: JobSettings, on_progress: OnProgress | None = None
) -> list[ChunkResult]:
    """Chunk all parts; return their results in order."""
    # A part is looked up by a digest of its bytes, so a look-up of a large dump would read it once
    # more.
    read_parts = (task.part for task in tasks if not has_digest_names(task.part))
    is_small = _count_bytes(read_parts) <= _MAX_LAUNCHER_BYTES
    reports = run_job("chunk", chunk, tasks, job_settings, on_progress, _estimate_seconds, memoised=is_small)
    return [from_table(ChunkResult, report, "a report of the chunk job") for report in reports]


def _estimate_seconds(task: ChunkTask) -> float:
    n_bytes = _count_bytes([task.part])
    if task.parent_parts:
        return n_bytes / _REUSED_BYTES_PER_SECOND
    model_bytes = sum(file_ref.size for _, blobs in task.setting_files for _, file_ref in blobs)
    return n_bytes * (1 / _PARSED_BYTES_PER_SECOND + model_bytes / _ENCODED_BYTES_PER_SECOND)
