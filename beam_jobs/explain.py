"""Explain what a build would reuse in each stage, and which changed input prevents the rest.

Nothing is built and nothing is written to the store. The dump is planned and chunked in this process, into a temporary
folder, because only its passages tell which vectors exist; parts and articles that can be reused are not chunked again.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from beam_jobs.chunk import ChunkTask, tasks_of
from beam_jobs.embed import EmbedTask
from beam_jobs.index_tasks import deciding
from beam_jobs.workers import worker_memory
from rag_model.corpus.chunk import chunk_part
from rag_model.corpus.lineage import Inheritance
from rag_model.corpus.records import Plan
from rag_model.digest import digest_bytes, digest_file
from rag_model.index.plan import IndexPlan
from rag_model.snapshots.chunking import local_paths, store_chunker
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoders import store_encoders
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.heritage import obstacles
from rag_model.snapshots.parent import Earlier, Parent, local_files
from rag_model.snapshots.planning import plan_indexes, plan_parts
from rag_model.snapshots.recipe import Recipe, check_fit
from rag_model.store.comparing.diff import differences
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.paths import EMBEDDINGS, TEXT


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one stage would reuse."""

    stage: str  # plan, chunk, embed, or of an index: train/hnsw, index/hnsw
    unit: str  # parts, articles, passages, indexes; for a trained file: whether it fits
    reused: int  # units that would not be made again
    total: int
    tasks: int
    recorded: int  # tasks whose outputs all exist
    changed: Mapping[str, int]  # input -> tasks whose nearest record (or range) differs in it; or `no record`


@dataclass(frozen=True, slots=True)
class Explained:
    """What a build would reuse."""

    ref: str
    parent: str | None  # id of the snapshot that the build inherits from
    stages: tuple[Outlook, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Tally:
    """Counts of one stage while its tasks are looked up."""

    past: "_Past"
    reused: int = 0
    total: int = 0
    tasks: int = 0
    recorded: int = 0
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, total: int, reused: int, lacking: Mapping[str, Any] | None) -> None:
        """Count a task; `lacking` are the inputs of a task that is not recorded."""
        self.total, self.reused, self.tasks = self.total + total, self.reused + reused, self.tasks + 1
        self.recorded += lacking is None
        if lacking is not None:
            self.changed.update(self.past.changed(lacking))

    def outlook(self, stage: str, unit: str) -> Outlook:
        """Return the row of the table."""
        changed = dict(sorted(self.changed.items()))
        return Outlook(stage, unit, self.reused, self.total, self.tasks, self.recorded, changed)


class _Past:
    """The inputs of a stage's records; `own` is the input that differs from part to part."""

    def __init__(self, store: Store, stage: str, own: str = "", only: Sequence[str] = ()) -> None:
        wanted = (
            {k: v for k, v in past.items() if k != own and (k in only or not only)} for past in store.memo.inputs(stage)
        )
        self._all = list({json.dumps(past, sort_keys=True): past for past in wanted}.values())
        self._own = own

    def changed(self, inputs: Mapping[str, Any]) -> list[str]:
        """Return the names of the inputs in which the nearest record differs."""
        if not self._all:
            return ["no record"]
        shared = {k: v for k, v in inputs.items() if k != self._own}
        nearest = min(([name for name, _ in differences(past, shared)] for past in self._all), key=len)
        return nearest or ([self._own] if self._own else [])


def explain(
    store: Store,
    dump: str,
    encoder: str,
    recipe: Recipe,
    ref: str = "latest",
    limit: int | None = None,
    beam_options: Sequence[str] = (),
) -> Explained:
    """Return what `reindex` would reuse with the same arguments.

    Raises:
        BookwheelError: as `reindex`, for errors that occur without building.
    """
    check_fit(recipe, recipe.represented())
    parent = Parent.of(store, ref)
    with tempfile.TemporaryDirectory(prefix="bookwheel-explain-") as folder:
        scratch = Store.open(f"{folder}/store", create=True)
        plan = plan_parts(scratch, dump, recipe, limit, parent)
        encoders = store_encoders(scratch, encoder, recipe, store)
        chunker = store_chunker(scratch, recipe.chunk)
        files = local_paths(scratch, chunker.files)
        look = _Look(store, parent, encoders, recipe, Path(folder) / "passages.parquet", files)
        for task in tasks_of(store, plan, chunker, parent):
            cut = look.at_passages(task)
            for name, its in encoders.items():
                look.at_vectors(name, cut, parent.encoded(task.part, its.space.digest))
    widths = {name: its.space.dim for name, its in encoders.items()}
    plans = plan_indexes(recipe.index, look.cuts, widths, worker_memory(beam_options), parent)
    indexes = [row for name, plan in plans.items() for row in (look.at_trained(name, plan), look.at_index(name, plan))]
    stages = (
        _ranges(plan, parent),
        look.chunk.outlook("chunk", "articles"),
        *look.embedded(),
        *indexes,
    )
    return Explained(ref, parent.manifest.id if parent.manifest else None, stages)


def _ranges(plan: Plan, parent: Parent) -> Outlook:
    """Compare the parts' ranges of pages with the parent's: a part with the same range can be the same file."""
    before = parent.manifest.content.parts if parent.manifest else ()
    kept = {(part.first_page, part.last_page) for part in before}
    there = sum((part.first_page, part.last_page) in kept for part in plan.parts)
    moved = len(plan.parts) - there
    return Outlook("plan", "parts", there, len(plan.parts), len(plan.parts), there, {"range": moved} if moved else {})


class _Look:
    """Look up one part after another: what is recorded, and what would be inherited."""

    def __init__(
        self,
        store: Store,
        parent: Parent,
        encoders: Mapping[str, StoredEncoder],
        recipe: Recipe,
        scratch: Path,
        files: Mapping[str, Path],
    ) -> None:
        self.chunk = _Tally(_Past(store, "chunk", "source"))
        self.cuts: list[CutPart] = []
        self._embed = {name: _Tally(_Past(store, "embed", "passages")) for name in encoders}
        self._rows: dict[str, list[BlobRef]] = {name: [] for name in (TEXT, *encoders)}  # of recorded parts
        self._store, self._parent = store, parent
        self._encoders, self._recipe, self._scratch, self._files = encoders, recipe, scratch, files

    def embedded(self) -> list[Outlook]:
        """Return the rows of the table of each representation."""
        return [
            tally.outlook("embed" if name == EMBEDDINGS else f"embed {name}", "passages")
            for name, tally in self._embed.items()
        ]

    def at_passages(self, task: ChunkTask) -> CutPart:
        """Return what the chunk job would report about a part, with its passages."""
        inputs = task.inputs()
        record = self._store.memo.get("chunk", self._store.memo.key(inputs))
        if record is not None:
            cut = CutPart.of(record)
            self._rows[TEXT] += [cut.passages] if cut.rows else []
            self.chunk.add(cut.facts.articles, cut.facts.articles, None)
        else:
            with Inheritance(local_files(self._store, task.earlier)) as earlier:
                given = task.part, task.siteinfo, task.recipe, self._scratch
                facts = chunk_part(*given, earlier=earlier, suppressed=task.suppressed, files=self._files)
            cut = CutPart(BlobRef(digest_file(self._scratch), self._scratch.stat().st_size), facts)
            self.chunk.add(facts.articles, facts.inherited, inputs)
        self.cuts.append(cut)
        return cut

    def at_vectors(self, name: str, cut: CutPart, earlier: tuple[Earlier, ...]) -> None:
        """Look up a part's vectors of a representation."""
        tally = self._embed[name]
        task = EmbedTask.of(cut, self._encoders[name], self._recipe.dtype_of(name), earlier)
        inputs, rows = task.inputs(), cut.rows
        record = self._store.memo.get("embed", self._store.memo.key(inputs))
        if record is not None:
            tally.add(rows, rows, None)
            self._rows[name] += [record.outputs["embeddings"]] if rows else []
            return
        passages = self._store.blobs.local(cut.passages) if self._store.blobs.exists(cut.passages) else self._scratch
        known = task.form.count_known(passages, local_files(self._store, earlier))
        tally.add(rows, known, inputs)

    def at_trained(self, name: str, plan: IndexPlan) -> Outlook:
        """Look up cells and quantizers of this plan; the parent's are used if new vectors fit them."""
        encoder = self._encoders.get(plan.over)
        lacking = obstacles(self._parent, name, plan, encoder.space.digest if encoder else None)
        if lacking and not self._unlike("train", plan):
            lacking = []
        there = int(not lacking)
        return Outlook(f"train/{name}", "if it fits", there, 1, 1, there, dict.fromkeys(lacking, 1))

    def at_index(self, name: str, plan: IndexPlan) -> Outlook:
        """Look up a finished index of this plan over these vectors."""
        changed = self._unlike("merge", plan)
        there = int(not changed)
        return Outlook(f"index/{name}", "indexes", there, 1, 1, there, dict.fromkeys(changed, 1))

    def _unlike(self, stage: str, plan: IndexPlan) -> list[str]:
        """Return the inputs in which a stage's nearest record differs; [] if the record is of these vectors."""
        tally = self._embed.get(plan.over, self.chunk)
        whole = tally.recorded == tally.tasks
        listed = json.dumps([ref.to_json() for ref in self._rows[plan.over]]).encode()
        inputs = {**deciding(plan), "vectors": digest_bytes(listed) if whole else "not made yet"}
        return _Past(self._store, stage, only=tuple(inputs)).changed(inputs)
