"""The chunk job: turn each part of the dump into one file of passages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.corpus.chunk import VERSION, ChunkRecipe, chunk_part
from rag_model.corpus.lineage import Inheritance
from rag_model.corpus.plan import source_digest
from rag_model.corpus.records import Part, Plan, Siteinfo
from rag_model.corpus.redact import pages_within
from rag_model.extras import versions
from rag_model.snapshots.chunking import SettingFiles, StoredChunker, local_paths
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.parent import Earlier, Parent, local_cuts
from rag_model.store.objects.memo import Produced
from rag_model.store.store import Store

_NEAR = 64 << 20  # bytes of a dump; up to this the launcher reads it itself
_PARSED, _TAKEN_OVER = 1e6, 2e6  # compressed bytes per second of one core: all articles parsed, or nearly all inherited
_MODELLED = 2.5e12  # the same times bytes of a chunker's model: a passage has some 312, a core encodes 8e9 (`embed`)


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """One part to read, clean and chunk."""

    part: Part
    siteinfo: Siteinfo
    recipe: ChunkRecipe
    earlier: tuple[Earlier, ...] = ()  # parts of the parent, whose unchanged articles are inherited
    suppressed: tuple[str, ...] = ()  # ids of pages of the part that were taken down
    files: SettingFiles = ()  # the files that the chunker's settings name

    @property
    def bytes(self) -> int:
        """Return the number of compressed bytes of the dump that are read."""
        return sum(piece.length for piece in self.part.slices)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that decide the passages; reads the part's bytes. Inherited parts are not an input.

        Raises:
            InputError: the source cannot be read.
        """
        return {
            "source": source_digest(self.part),
            "kind": self.part.kind,
            "siteinfo": asdict(self.siteinfo),
            "recipe": self.recipe.identity(),
            "code": VERSION,
            "libraries": versions("pyarrow"),
            **({"suppressed": self.suppressed} if self.suppressed else {}),  # other parts' keys do not change
        }


def tasks_of(store: Store, plan: Plan, chunker: StoredChunker, parent: Parent) -> list[ChunkTask]:
    """Return the tasks of a plan's parts, with the parts that each inherits from and its pages that were taken down."""
    gone = store.takedowns.pages(plan.siteinfo.dbname)
    return [
        ChunkTask(
            part,
            plan.siteinfo,
            chunker.recipe,
            parent.cut(part),
            pages_within(part.kind, part.first_page, part.last_page, gone),
            chunker.files,
        )
        for part in plan.parts
    ]


def chunk(task: ChunkTask, store: Store) -> Report:
    """Chunk one part into `passages`, once: the same bytes with the same recipe are never chunked again."""

    def produce(workdir: Path) -> Produced:
        out, log = workdir / "passages.parquet", workdir / "articles.parquet"
        spans = workdir / "spans.npy" if task.recipe.spans else None
        with Inheritance(local_cuts(store, task.earlier)) as earlier:
            files = local_paths(store, task.files)
            facts = chunk_part(task.part, task.siteinfo, task.recipe, out, log, earlier, task.suppressed, files, spans)
        made = {"passages": out, "article_log": log} | ({"spans": spans} if spans else {})
        return Produced(made, asdict(facts))

    record, made = store.memo.once("chunk", task.inputs(), produce)
    return CutPart.of(record, made=made).to_json()


def run(tasks: Sequence[ChunkTask], launch: Launch, on_progress: OnProgress | None = None) -> list[CutPart]:
    """Chunk all parts; return the report of each, in order."""
    near = sum(task.bytes for task in tasks) <= _NEAR  # looking up a part means reading it

    reports = run_job("chunk", chunk, tasks, launch, on_progress, _seconds, memoised=near)
    return [CutPart.from_json(report) for report in reports]


def _seconds(task: ChunkTask) -> float:
    if task.earlier:
        return task.bytes / _TAKEN_OVER
    model = sum(blob.size for _, named in task.files for _, blob in named)
    return task.bytes * (1 / _PARSED + model / _MODELLED)
