"""Report which results each stage of a build would reuse, and which inputs prevent further reuse.

Nothing is built and nothing is written to the store. The dump is planned and chunked in this
process, into a temporary folder, because the passages decide which vectors can be reused. Parts and
articles whose passages can be reused are not chunked again.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beam_jobs.chunk import (
    ChunkTask,
    collect_tables,
    load_page_table,
    load_template_table,
    plan_chunk_tasks,
)
from beam_jobs.embed import EmbedTask, describe_requests, list_precision_variants
from beam_jobs.index_work import get_index_inputs
from beam_jobs.workers import get_worker_memory
from rag_model.corpus.article_log import ReusableArticles
from rag_model.corpus.chunk import chunk_part
from rag_model.corpus.markup.template_table import NO_TEMPLATES
from rag_model.corpus.metadata import PageTable
from rag_model.corpus.records import Plan
from rag_model.digest import digest_bytes, digest_file
from rag_model.index.kind import ShardUpdatingKind, get_kind
from rag_model.index.plan import IndexPlan
from rag_model.process import temporary_folder
from rag_model.snapshots.encoding import StoredEncoder, fetch_setting_files, store_chunker
from rag_model.snapshots.parent import Parent, ParentPart, fetch_parent_files
from rag_model.snapshots.planning import plan_indexes, plan_parts, store_encoders
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.snapshots.reused_training import find_reuse_obstacles, find_shard_list, read_shards
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.diff import iter_differences
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.build_history import forecast_build, read_history
from rag_model.store.versions.manifest import EMBEDDINGS, TEXT

_KIND_PATH = "plan.kind"  # path of the index kind in the inputs of an index


@dataclass(frozen=True, slots=True)
class StageReuse:
    """The results that one stage would reuse."""

    stage: str  # plan, chunk, embed; train/hnsw, shard/hnsw or index/hnsw for the index `hnsw`
    # unit of the counts: parts, articles, passages or indexes; `if it fits` for a trained file,
    # `to update` for the graphs of cells
    unit: str
    reused: int  # number of units that would be reused
    total: int  # number of all units
    tasks: int
    recorded: int  # number of tasks whose outputs are all recorded
    # by name of an input, the number of tasks whose most similar record differs in this input;
    # `no record` counts the tasks without a comparable record
    changed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """The results that a build would reuse, by stage."""

    ref: str  # the ref that names the parent snapshot
    parent: str | None  # id of the parent snapshot; None: the ref is new
    stages: tuple[StageReuse, ...]
    # the expected cost, computed from past builds
    forecast: Mapping[str, Any] = field(default_factory=dict)
    requests: tuple[str, ...] = ()  # sentences about what endpoints must embed


@dataclass(slots=True)
class _StageCounts:
    """The counts of one stage, updated while its tasks are looked up."""

    records: "_RecordedInputs"
    reused: int = 0
    total: int = 0
    tasks: int = 0
    recorded: int = 0
    changed: Counter[str] = field(default_factory=Counter)

    def count_task(self, total: int, reused: int, missing_inputs: Mapping[str, Any] | None) -> None:
        """Count a task with `total` units, of which `reused` would be reused.

        `missing_inputs` are the inputs of a task that is not recorded, else None.
        """
        self.total, self.reused, self.tasks = self.total + total, self.reused + reused, self.tasks + 1
        self.recorded += missing_inputs is None
        if missing_inputs is not None:
            self.changed.update(self.records.find_changed_inputs(missing_inputs))

    def to_stage(self, stage: str, unit: str) -> StageReuse:
        """Return the counts as a row of the report."""
        changes = dict(sorted(self.changed.items()))
        return StageReuse(stage, unit, self.reused, self.total, self.tasks, self.recorded, changes)


class _RecordedInputs:
    """The inputs of all memo records of a stage.

    `varying_input`, which differs from part to part, is not compared. If `considered_inputs` are
    given, only these are compared.
    """

    def __init__(
        self, store: Store, stage: str, varying_input: str = "", considered_inputs: Sequence[str] = ()
    ) -> None:
        comparable_inputs = (
            {
                k: v
                for k, v in recorded_inputs.items()
                if k != varying_input and (k in considered_inputs or not considered_inputs)
            }
            for recorded_inputs in store.memo.iter_inputs(stage)
        )
        self._distinct_inputs = list({json.dumps(entry, sort_keys=True): entry for entry in comparable_inputs}.values())
        self._varying_input = varying_input

    def find_changed_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Return the names of the inputs in which the most similar record differs."""
        if not self._distinct_inputs:
            return ["no record"]
        compared_inputs = {k: v for k, v in inputs.items() if k != self._varying_input}
        fewest_changes = min(
            (
                [name for name, _ in iter_differences(recorded_inputs, compared_inputs)]
                for recorded_inputs in self._distinct_inputs
            ),
            key=len,
        )
        if _KIND_PATH in fewest_changes:  # a record of another kind of index is not comparable
            return ["no record"]
        return fewest_changes or ([self._varying_input] if self._varying_input else [])


def explain(
    store: Store,
    dump: str,
    encoder: str,
    recipe: Recipe,
    ref: str = "latest",
    limit: int | None = None,
    beam_options: Sequence[str] = (),
) -> ReuseReport:
    """Report which results `reindex` would reuse with the same arguments.

    Raises:
        BookwheelError: for the same reasons as in `reindex`, before anything is built.
    """
    check_indexes_and_retrievers(recipe, recipe.list_representations())
    parent = Parent.from_ref(store, ref)
    with temporary_folder("explain") as folder:
        scratch_store = Store.open(f"{folder}/store", create=True)
        plan = plan_parts(scratch_store, dump, recipe, limit, parent, store)
        encoders = store_encoders(scratch_store, encoder, recipe, store, parent.pins)
        chunker = store_chunker(scratch_store, recipe.chunk)
        files = fetch_setting_files(scratch_store, chunker.files)
        lookup = _ReuseLookup(store, parent, encoders, recipe, beam_options, folder / "passages.parquet", files)
        tables = collect_tables(
            scratch_store,
            plan,
            dump,
            recipe.chunk.metadata,
            lambda _name, run, tasks, _seconds: [run(task, scratch_store) for task in tasks],
        )
        lookup.table = load_template_table(scratch_store, tables.templates)
        for task in plan_chunk_tasks(store, plan, chunker, parent, tables):
            chunk_result = lookup.look_up_passages(task, load_page_table(scratch_store, task))
            for name, stored_encoder in encoders.items():
                lookup.look_up_vectors(
                    name, chunk_result, parent.find_encoded_parts(task.part, stored_encoder.space.digest)
                )
    dimensions = {name: stored_encoder.space.dim for name, stored_encoder in encoders.items()}
    memory = get_worker_memory(beam_options)
    index_plans = plan_indexes(recipe.index, lookup.chunk_results, dimensions, memory, parent)
    index_stages = [
        stage
        for name, index_plan in index_plans.items()
        for stage in (
            lookup.look_up_training(name, index_plan),
            *lookup.look_up_shards(name, index_plan),
            lookup.look_up_index(name, index_plan),
        )
    ]
    stages = (
        _compare_ranges(plan, parent),
        lookup.chunk.to_stage("chunk", "articles"),
        *lookup.list_embed_stages(),
        *index_stages,
    )
    embed_stage = next(stage for stage in lookup.list_embed_stages() if stage.stage == "embed")
    history = read_history(parent.manifest)
    forecast = forecast_build(history, embed_stage.total - embed_stage.reused)
    request_sentences = (
        describe_requests(stored_encoder, lookup.chunk_results, stage.total - stage.reused)
        for stored_encoder, stage in zip(encoders.values(), lookup.list_embed_stages(), strict=True)
    )
    parent_id = parent.manifest.id if parent.manifest else None
    return ReuseReport(ref, parent_id, stages, forecast, tuple(filter(None, request_sentences)))


def _compare_ranges(plan: Plan, parent: Parent) -> StageReuse:
    """Count the parts whose range of pages is the same as in the parent; they may be unchanged."""
    parent_parts = parent.manifest.content.parts if parent.manifest else ()
    parent_ranges = {(part.first_page, part.last_page) for part in parent_parts}
    n_unchanged = sum((part.first_page, part.last_page) in parent_ranges for part in plan.parts)
    n_parts = len(plan.parts)
    changed = {"range": n_parts - n_unchanged} if n_unchanged < n_parts else {}
    return StageReuse("plan", "parts", n_unchanged, n_parts, n_parts, n_unchanged, changed)


class _ReuseLookup:
    """Looks up, part by part, recorded results and the rows of the parent that would be reused."""

    def __init__(
        self,
        store: Store,
        parent: Parent,
        encoders: Mapping[str, StoredEncoder],
        recipe: Recipe,
        beam_options: Sequence[str],
        scratch: Path,  # file for the passages of the part that is being chunked
        setting_files: Mapping[str, Path],
    ) -> None:
        self.chunk = _StageCounts(_RecordedInputs(store, "chunk", "source"))
        self.chunk_results: list[ChunkResult] = []
        self.table = NO_TEMPLATES  # the templates of the dump
        self._embed = {name: _StageCounts(_RecordedInputs(store, "embed", "passages")) for name in encoders}
        # recorded files of the parts by representation; passages are under `TEXT`
        self._rows: dict[str, list[BlobRef]] = {name: [] for name in (TEXT, *encoders)}
        self._store, self._parent = store, parent
        self._encoders, self._recipe, self._beam_options = encoders, recipe, beam_options
        self._scratch, self._files = scratch, setting_files

    def list_embed_stages(self) -> list[StageReuse]:
        """Return a row of the report for each representation."""
        return [
            stage_counts.to_stage("embed" if name == EMBEDDINGS else f"embed {name}", "passages")
            for name, stage_counts in self._embed.items()
        ]

    def look_up_passages(self, task: ChunkTask, page_table: PageTable) -> ChunkResult:
        """Return the result of the chunk job for a part, either recorded or computed here."""
        inputs = task.inputs()
        record = self._store.memo.find("chunk", self._store.memo.compute_key(inputs))
        if record is not None:
            chunk_result = ChunkResult.from_record(record)
            self._rows[TEXT] += [chunk_result.passages] if chunk_result.rows else []
            self.chunk.count_task(chunk_result.stats.articles, chunk_result.stats.articles, None)
        else:
            with ReusableArticles(fetch_parent_files(self._store, task.parent_parts), self.table) as reusable_articles:
                chunk_arguments = task.part, task.siteinfo, task.recipe, self._scratch, None, reusable_articles
                stats = chunk_part(
                    *chunk_arguments, task.removed_pages, self._files, template_table=self.table, page_table=page_table
                )
            chunk_result = ChunkResult(BlobRef(digest_file(self._scratch), self._scratch.stat().st_size), stats)
            self.chunk.count_task(stats.articles, stats.inherited, inputs)
        self.chunk_results.append(chunk_result)
        return chunk_result

    def look_up_vectors(self, name: str, chunk_result: ChunkResult, parent_parts: tuple[ParentPart, ...]) -> None:
        """Count the vectors of a part that would be reused in the representation `name`."""
        stage_counts = self._embed[name]
        task = EmbedTask.create(chunk_result, self._encoders[name], self._recipe.dtype_of(name), parent_parts)
        inputs_by_precision = [variant.inputs() for variant in list_precision_variants(task, self._beam_options)]
        memo, n_rows = self._store.memo, chunk_result.rows
        records = (memo.find("embed", memo.compute_key(inputs)) for inputs in inputs_by_precision)
        record = next(filter(None, records), None)
        if record is not None:
            stage_counts.count_task(n_rows, n_rows, None)
            self._rows[name] += [record.outputs["embeddings"]] if n_rows else []
            return
        passages = (
            self._store.blobs.get_local_path(chunk_result.passages)
            if self._store.blobs.exists(chunk_result.passages)
            else self._scratch
        )
        reused_rows = task.row_format.count_reusable(passages, fetch_parent_files(self._store, parent_parts))
        # Workers on other machines may use any precision: assume the one of the most similar record.
        inputs = min(inputs_by_precision, key=lambda inputs: len(stage_counts.records.find_changed_inputs(inputs)))
        stage_counts.count_task(n_rows, reused_rows, inputs)

    def look_up_training(self, index_name: str, plan: IndexPlan) -> StageReuse:
        """Report whether the parent's trained file (cells and quantizers) is reused if new vectors
        fit it.
        """
        encoder = self._encoders.get(plan.over)
        changes = find_reuse_obstacles(self._parent, index_name, plan, encoder.space.digest if encoder else None)
        if changes and not self._find_changed_inputs("train", plan):
            changes = []
        n_reused = int(not changes)
        return StageReuse(f"train/{index_name}", "if it fits", n_reused, 1, 1, n_reused, dict.fromkeys(changes, 1))

    def look_up_shards(self, index_name: str, plan: IndexPlan) -> list[StageReuse]:
        """Report how many graphs of the parent's cells would be updated if the trained file still
        fits.
        """
        if not isinstance(get_kind(plan.kind), ShardUpdatingKind):
            return []
        stage, unit, total = f"shard/{index_name}", "to update", plan.shards
        if not self._find_changed_inputs("merge", plan):
            return [StageReuse(stage, unit, total, total, total, total, {})]
        encoder, manifest = self._encoders.get(plan.over), self._parent.manifest
        obstacles = find_reuse_obstacles(self._parent, index_name, plan, encoder.space.digest if encoder else None)
        shard_list = find_shard_list(manifest, index_name) if manifest and not obstacles else None
        shards = read_shards(self._store, shard_list) if shard_list else []
        missing_shards = [i for i, shard in enumerate(shards) if not self._store.blobs.exists(shard.blob)]
        changes = {f"cell {i} is missing": 1 for i in missing_shards} if shards else dict.fromkeys(obstacles, total)
        n_updatable = len(shards) - len(missing_shards)
        return [StageReuse(stage, unit, n_updatable, total, total, 0, changes or {"slices": total})]

    def look_up_index(self, index_name: str, plan: IndexPlan) -> StageReuse:
        """Report whether a finished index with this plan over the same vectors is recorded."""
        changes = self._find_changed_inputs("merge", plan)
        n_reused = int(not changes)
        return StageReuse(f"index/{index_name}", "indexes", n_reused, 1, 1, n_reused, dict.fromkeys(changes, 1))

    def _find_changed_inputs(self, stage: str, plan: IndexPlan) -> list[str]:
        """Return the inputs in which the most similar record of a stage differs, if any."""
        stage_counts = self._embed.get(plan.over, self.chunk)
        is_complete = stage_counts.recorded == stage_counts.tasks
        blob_list = json.dumps([ref.to_json() for ref in self._rows[plan.over]]).encode()
        inputs = {**get_index_inputs(plan), "vectors": digest_bytes(blob_list) if is_complete else "not made yet"}
        return _RecordedInputs(self._store, stage, considered_inputs=tuple(inputs)).find_changed_inputs(inputs)
