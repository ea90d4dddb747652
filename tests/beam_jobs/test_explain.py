"""`--explain` predicts what a build would reuse, and writes nothing."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.explain import StageReuse, explain
from beam_jobs.index_work import get_index_inputs
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.encoding import EncodeRecipe
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from tests.fixtures.monthly_dumps import RECIPE, BuildResult, Dumps, build
from tests.fixtures.tiny import save_bert

GRAPH = replace(RECIPE, index={"hnsw": IndexRecipe("HNSW8")})


@pytest.fixture
def explain_stages(store: Store, dumps: Dumps, tiny: Path) -> Callable[..., dict[str, StageReuse]]:
    def run(dump: str = dumps.old, encoder: Path = tiny, recipe: Recipe = GRAPH, ref: str = "latest") -> Any:
        return {row.stage: row for row in explain(store, dump, str(encoder), recipe, ref).stages}

    return run


def test_explanation_of_the_same_dump_finds_all_outputs(explain_stages: Any, month: BuildResult, store: Store) -> None:
    stages = explain_stages()
    rows = month.counts["passages"]
    assert stages["plan"] == StageReuse("plan", "parts", 3, 3, 3, 3, {})
    assert stages["chunk"] == StageReuse("chunk", "articles", 24, 24, 3, 3, {})
    assert stages["embed"] == StageReuse("embed", "passages", rows, rows, 3, 3, {})
    assert stages["train/hnsw"] == StageReuse("train/hnsw", "if it fits", 0, 1, 1, 0, {"no record": 1})
    assert stages["index/hnsw"] == StageReuse("index/hnsw", "indexes", 0, 1, 1, 0, {"no record": 1})
    # As after `gc`, which deletes the record of an index that no snapshot has.
    foreign_inputs = {**get_index_inputs(resolve(IndexRecipe("IVF,Flat"), rows, 32)), "vectors": "none"}
    store.memo.write_record("merge", store.memo.compute_key(foreign_inputs), {}, {}, foreign_inputs)
    assert explain_stages()["index/hnsw"].changed == {"no record": 1}


def test_explanation_of_a_new_dump_equals_the_counts_of_the_build(
    explain_stages: Any, store: Store, dumps: Dumps, tiny: Path
) -> None:
    files = sorted(path for path in Path(store.files.local_path("")).rglob("*"))
    stages = explain_stages(dumps.new)
    assert sorted(path for path in Path(store.files.local_path("")).rglob("*")) == files, "nothing is written"
    assert stages["chunk"].changed == {"source": stages["chunk"].tasks - stages["chunk"].recorded}
    rebuild = build(store, dumps.new, tiny)
    assert (stages["plan"].reused, stages["plan"].changed["range"]) == (2, stages["plan"].total - 2)
    assert stages["chunk"].total - stages["chunk"].reused == rebuild.n_parsed == 5
    assert (stages["embed"].reused, stages["embed"].total) == (rebuild.counts["reused"], rebuild.counts["passages"])
    assert set(stages["embed"].changed) == {"passages"}


@pytest.mark.parametrize(
    ("setting", "chunk", "embed"),
    [
        ({"chunk": ChunkRecipe(words=10, quarantine_floor=30)}, {"recipe.quarantine_floor": 3}, {}),
        ({"chunk": ChunkRecipe(words=20)}, {"recipe.words": 3}, {"passages": 3}),
        ({"encode": EncodeRecipe(dtype="float32")}, {}, {"dtype": 3}),
        ({"encode": EncodeRecipe(spec={"max_length": 32})}, {}, {"space": 3}),
    ],
)
def test_a_changed_setting_is_named_at_the_stage_that_it_changes(
    explain_stages: Any, setting: dict[str, Any], chunk: dict[str, int], embed: dict[str, int]
) -> None:
    stages = explain_stages(recipe=replace(GRAPH, **setting))
    assert (stages["chunk"].changed, stages["embed"].changed) == (chunk, embed)


def test_another_encoder_is_named_by_its_space(explain_stages: Any, tmp_path: Path) -> None:
    stages = explain_stages(encoder=save_bert(tmp_path / "other", seed=2))
    assert (stages["chunk"].reused, stages["embed"].reused) == (24, 0)
    assert stages["embed"].changed == {"space": 3}


def test_explain_finds_vectors_of_remote_workers_only_for_remote_runs(store: Store, dumps: Dumps, tiny: Path) -> None:
    cpu_records = [
        (inputs, store.memo.find("embed", store.memo.compute_key(inputs))) for inputs in store.memo.iter_inputs("embed")
    ]
    shutil.rmtree(store.files.local_path("memo/embed"))
    for inputs, record in cpu_records:
        assert record
        gpu_inputs = {**inputs, "arithmetic": "cuda bfloat16"}
        store.memo.write_record("embed", store.memo.compute_key(gpu_inputs), record.outputs, record.stats, gpu_inputs)
    other_dtype = replace(RECIPE, encode=EncodeRecipe(dtype="float32"))
    for flags, recipe, n_recorded, changed in (
        ((), RECIPE, 0, {"arithmetic": 3}),
        (("--runner=FlinkRunner",), RECIPE, 3, {}),
        (("--runner=FlinkRunner",), other_dtype, 0, {"dtype": 3}),
    ):
        report = explain(store, dumps.old, str(tiny), recipe, beam_options=flags)
        embed_stage = next(stage for stage in report.stages if stage.stage == "embed")
        assert (embed_stage.recorded, embed_stage.changed) == (n_recorded, changed)


def test_an_empty_store_has_nothing(dumps: Dumps, tiny: Path, tmp_path: Path) -> None:
    report = explain(Store.open(str(tmp_path), create=True), dumps.old, str(tiny), GRAPH)
    assert report.parent is None
    assert report.stages[0].changed == {"range": 3}
    assert {row.stage: set(row.changed) for row in report.stages[1:]} == {
        "chunk": {"no record"},
        "embed": {"no record"},
        "train/hnsw": {"no parent"},
        "shard/hnsw": {"no parent"},
        "index/hnsw": {"no record"},
    }
    assert all(row.reused == 0 for row in report.stages)
