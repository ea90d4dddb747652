"""The chunk job: turn each part of the dump into one file of passages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.corpus.article_log import ARTICLE_LOG_VERSION, ReusableArticles
from rag_model.corpus.chunk import VERSION, ChunkRecipe, chunk_part
from rag_model.corpus.dump_formats.dump_format import get_format_identity
from rag_model.corpus.plan import compute_source_digest, has_digest_names
from rag_model.corpus.records import Part, Plan, Siteinfo
from rag_model.corpus.redact import select_pages
from rag_model.extras import get_versions
from rag_model.snapshots.chunking import SettingFiles, StoredChunker, local_paths
from rag_model.snapshots.parent import Parent, ParentPart, fetch_chunked_files
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store

# largest dump, in bytes, that the launcher reads itself to look up its parts
_LAUNCHER_READS_BYTES = 64 << 20
# compressed bytes per second of one core: all articles parsed, or nearly all reused
_PARSED_BYTES_PER_SECOND, _REUSED_BYTES_PER_SECOND = 1e6, 7e6
_ENCODED_BYTES_PER_SECOND = (
    # the same times bytes of a chunker's model: a passage has some 312, a core encodes 8e9
    # (`embed`)
    2.5e12
)


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
        }


def plan_chunk_tasks(store: Store, plan: Plan, chunker: StoredChunker, parent: Parent) -> list[ChunkTask]:
    """Return a task for each part of a plan, with the parent's parts to reuse and the removed
    pages.
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
        with ReusableArticles(fetch_chunked_files(store, task.parent_parts)) as reuse:
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
