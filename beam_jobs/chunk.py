"""The chunk job: a part of the dump becomes one file of passages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from beam_jobs.job import Facts, Launch, OnProgress, run_job
from beam_jobs.libraries import versions
from rag_model.corpus.chunk import ChunkRecipe, chunk_part
from rag_model.corpus.plan import source_digest
from rag_model.corpus.records import Part, Siteinfo
from rag_model.store.memo import Produced
from rag_model.store.store import Store

CODE = 1  # raise it when the same bytes would give other passages


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """One part to read, clean and cut."""

    part: Part
    siteinfo: Siteinfo
    recipe: ChunkRecipe


def chunk(task: ChunkTask, store: Store) -> Facts:
    """Cut one part into `passages`, once: the same bytes under the same recipe are never cut again."""

    def produce(workdir: Path) -> Produced:
        out = workdir / "passages.parquet"
        facts = chunk_part(task.part, task.siteinfo, task.recipe, out)
        return Produced({"passages": out}, asdict(facts))

    inputs = {
        "source": source_digest(task.part),
        "kind": task.part.kind,
        "siteinfo": asdict(task.siteinfo),
        "recipe": asdict(task.recipe),
        "code": CODE,
        "libraries": versions("pyarrow"),
    }
    record, made = store.memo.once("chunk", inputs, produce)
    return {**record.facts, "passages": asdict(record.outputs["passages"]), "made": made}


def run(tasks: Sequence[ChunkTask], launch: Launch, on_progress: OnProgress | None = None) -> list[Facts]:
    """Cut all parts; return each one's facts, in their order."""
    return run_job("chunk", chunk, tasks, launch, on_progress)
