"""The chunk job: turn each part of the dump into one file of passages.

Before it, the template job reads the pages of the template namespace of each part, and the launcher
merges the results, which are bounded, into one table (`template_table`). The table is an input of
every part: an article is chunked again if a template that it uses has changed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.corpus.article_log import ARTICLE_LOG_VERSION, ReusableArticles
from rag_model.corpus.chunk import VERSION, ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats.dump_format import get_format_identity, get_part_format
from rag_model.corpus.dump_formats.page_format import PageFormat
from rag_model.corpus.markup import template_table
from rag_model.corpus.markup.template_table import NO_TEMPLATES, TemplateTable
from rag_model.corpus.plan import compute_source_digest, has_digest_names
from rag_model.corpus.records import Part, Plan, Siteinfo
from rag_model.corpus.redact import select_pages
from rag_model.extras import get_versions
from rag_model.snapshots.chunking import SettingFiles, StoredChunker, local_paths
from rag_model.snapshots.parent import Parent, ParentPart, fetch_chunked_files
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store

# largest dump, in bytes, that the launcher reads itself to look up its parts
_LAUNCHER_READS_BYTES = 64 << 20
# compressed bytes per second of one core: all articles parsed, or nearly all reused
_PARSED_BYTES_PER_SECOND, _REUSED_BYTES_PER_SECOND = 1e6, 7e6
_READ_BYTES_PER_SECOND = 5e6  # compressed bytes, if only templates are parsed
_ENCODED_BYTES_PER_SECOND = (
    # the same times bytes of a chunker's model: a passage has some 312, a core encodes 8e9
    # (`embed`)
    2.5e12
)


@dataclass(frozen=True, slots=True)
class TemplateTask:
    """A part whose templates are read."""

    part: Part
    siteinfo: Siteinfo

    @property
    def bytes(self) -> int:
        """Return the number of compressed bytes of the dump that are read."""
        return sum(slice_.length for slice_ in self.part.slices)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that decide the templates. Reads the part's bytes."""
        return {
            "source": compute_source_digest(self.part),
            "siteinfo": asdict(self.siteinfo),
            "code": template_table.VERSION,
            **get_format_identity(self.part),
        }


def plan_template_tasks(plan: Plan) -> list[TemplateTask]:
    """Return a task for each part that may have templates; none if the format has no templates."""
    formats = [get_part_format(part) for part in plan.parts[:1]]
    if not any(isinstance(each, PageFormat) and each.has_templates for each in formats):
        return []
    parts = plan.parts if plan.template_parts is None else plan.template_parts
    return [TemplateTask(part, plan.siteinfo) for part in parts]


def read_templates(task: TemplateTask, store: Store) -> Report:
    """Read the templates of one part, unless they are recorded."""

    def produce(workdir: Path) -> StageResult:
        part_format, siteinfo = get_part_format(task.part), task.siteinfo
        pages = part_format.read_templates(task.part) if isinstance(part_format, PageFormat) else iter(())
        templates = template_table.read_templates(pages, siteinfo.language, siteinfo.namespaces)
        path = workdir / "templates.json"
        path.write_text(json.dumps(templates), encoding="utf-8")
        return StageResult({"templates": path}, {"templates": len(templates)})

    record, _ = store.memo.get_or_create("templates", task.inputs(), produce)
    return {"blob": record.outputs["templates"].to_json(), "templates": record.stats["templates"]}


def merge_templates(store: Store, reports: Sequence[Report]) -> BlobRef | None:
    """Store the table of the templates of all parts; return None if there are no templates."""
    blobs = [BlobRef.from_json(report["blob"]) for report in reports if report["templates"]]
    table = template_table.merge_templates(json.loads(store.blobs.read(blob)) for blob in blobs)
    return store.blobs.put_bytes(table.to_bytes()) if table else None


def collect_templates(
    store: Store, plan: Plan, launch: Launch, on_progress: OnProgress | None = None
) -> BlobRef | None:
    """Read the templates of all parts; return the table, or None if the dump has no templates.

    Of a dump whose plan knows the titles of pages, only the streams with templates are read.
    """
    tasks = plan_template_tasks(plan)
    is_small = sum(task.bytes for task in tasks) <= _LAUNCHER_READS_BYTES
    reports = run_job("templates", read_templates, tasks, launch, on_progress, _estimate_reading, memoised=is_small)
    return merge_templates(store, reports)


def _estimate_reading(task: TemplateTask) -> float:
    return task.bytes / _READ_BYTES_PER_SECOND


def load_table(store: Store, blob: BlobRef | None) -> TemplateTable:
    """Return a stored table; without one, a table without templates."""
    return NO_TEMPLATES if blob is None else _read_table(store.blobs.get_local_path(blob))


@lru_cache(1)
def _read_table(path: Path) -> TemplateTable:
    return TemplateTable.from_bytes(path.read_bytes())


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """A part to read, clean and chunk."""

    part: Part
    siteinfo: Siteinfo
    recipe: ChunkRecipe
    # parts of the parent snapshot, whose unchanged articles are reused
    parent_parts: tuple[ParentPart, ...] = ()
    suppressed: tuple[str, ...] = ()  # ids of the part's pages that were taken down
    setting_files: SettingFiles = ()  # the files that the chunker's settings name
    templates: BlobRef | None = None  # the table of the wiki's templates

    @property
    def bytes(self) -> int:
        """Return the number of compressed bytes of the dump that are read."""
        return sum(slice_.length for slice_ in self.part.slices)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that decide the passages. Reads the part's bytes.

        Reused parts are no input: they give the same passages.

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
            **(
                {"suppressed": self.suppressed} if self.suppressed else {}
            ),  # left out if empty, so that other parts keep their keys
            **({"templates": self.templates.id} if self.templates else {}),
        }


def plan_chunk_tasks(
    store: Store, plan: Plan, chunker: StoredChunker, parent: Parent, templates: BlobRef | None = None
) -> list[ChunkTask]:
    """Return a task for each part of a plan, with the parent's parts to reuse, the removed pages,
    and the table of `collect_templates`.
    """
    removed_pages = store.takedowns.list_pages(plan.siteinfo.dbname)
    return [
        ChunkTask(
            part,
            plan.siteinfo,
            chunker.recipe,
            parent.find_chunked(part),
            select_pages(part.kind, part.first_page, part.last_page, removed_pages),
            chunker.files,
            templates,
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
        table = load_table(store, task.templates)
        with ReusableArticles(fetch_chunked_files(store, task.parent_parts), table) as reuse:
            files = local_paths(store, task.setting_files)
            stats = chunk_part(
                task.part,
                task.siteinfo,
                task.recipe,
                passages_path,
                article_log_path,
                reuse,
                task.suppressed,
                files,
                spans_path,
                table,
            )
        outputs = {"passages": passages_path, "article_log": article_log_path} | (
            {"spans": spans_path} if spans_path else {}
        )
        return StageResult(outputs, asdict(stats))

    record, is_new = store.memo.get_or_create("chunk", task.inputs(), produce)
    return ChunkResult.of(record, is_new=is_new).to_json()


def run(tasks: Sequence[ChunkTask], launch: Launch, on_progress: OnProgress | None = None) -> list[ChunkResult]:
    """Chunk all parts; return their results in order."""
    # looking up a part means reading it
    is_small = sum(task.bytes for task in tasks if not has_digest_names(task.part)) <= _LAUNCHER_READS_BYTES

    reports = run_job("chunk", chunk, tasks, launch, on_progress, _seconds, memoised=is_small)
    return [ChunkResult.from_json(report) for report in reports]


def _seconds(task: ChunkTask) -> float:
    if task.parent_parts:
        return task.bytes / _REUSED_BYTES_PER_SECOND
    model_bytes = sum(blob.size for _, blobs in task.setting_files for _, blob in blobs)
    return task.bytes * (1 / _PARSED_BYTES_PER_SECOND + model_bytes / _ENCODED_BYTES_PER_SECOND)
