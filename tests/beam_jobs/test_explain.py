"""`--explain` foretells what a build would reuse, and writes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.explain import ReuseReport, StageReuse, explain
from beam_jobs.index_work import index_inputs
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.snapshots.encoding import EncodeRecipe
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from tests.fixtures.monthly_dumps import RECIPE, Built, Dumps, build
from tests.fixtures.tiny import save_bert

GRAPH = replace(RECIPE, index={"hnsw": IndexRecipe("HNSW8")})


def stages(found: ReuseReport) -> dict[str, StageReuse]:
    return {row.stage: row for row in found.stages}


@pytest.fixture
def look(store: Store, dumps: Dumps, tiny: Path) -> Callable[..., dict[str, StageReuse]]:
    def run(dump: str = dumps.old, encoder: Path = tiny, recipe: Recipe = GRAPH, ref: str = "latest") -> Any:
        return stages(explain(store, dump, str(encoder), recipe, ref))

    return run


def test_explanation_of_the_same_dump_finds_all_outputs(look: Any, month: Built, store: Store) -> None:
    found = look()
    rows = month.counts["passages"]
    assert found["plan"] == StageReuse("plan", "parts", 3, 3, 3, 3, {})
    assert found["chunk"] == StageReuse("chunk", "articles", 24, 24, 3, 3, {})
    assert found["embed"] == StageReuse("embed", "passages", rows, rows, 3, 3, {})
    assert found["train/hnsw"] == StageReuse("train/hnsw", "if it fits", 0, 1, 1, 0, {"no record": 1})
    assert found["index/hnsw"] == StageReuse("index/hnsw", "indexes", 0, 1, 1, 0, {"no record": 1})
    # As after `gc`, which deletes the record of an index that no snapshot has.
    other = {**index_inputs(resolve(IndexRecipe("IVF,Flat"), rows, 32)), "vectors": "none"}
    store.memo.write_record("merge", store.memo.compute_key(other), {}, {}, other)
    assert look()["index/hnsw"].changed == {"no record": 1}


def test_of_a_new_dump_it_foretells_what_the_build_then_counts(
    look: Any, store: Store, dumps: Dumps, tiny: Path
) -> None:
    files = sorted(path for path in Path(store.files.local_path("")).rglob("*"))
    found = look(dumps.new)
    assert sorted(path for path in Path(store.files.local_path("")).rglob("*")) == files, "nothing is written"
    assert found["chunk"].changed == {"source": found["chunk"].tasks - found["chunk"].recorded}
    now = build(store, dumps.new, tiny)
    assert (found["plan"].reused, found["plan"].changed["range"]) == (2, found["plan"].total - 2)
    assert found["chunk"].total - found["chunk"].reused == now.parsed == 5
    assert (found["embed"].reused, found["embed"].total) == (now.counts["reused"], now.counts["passages"])
    assert set(found["embed"].changed) == {"passages"}


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
    look: Any, setting: dict[str, Any], chunk: dict[str, int], embed: dict[str, int]
) -> None:
    found = look(recipe=replace(GRAPH, **setting))
    assert (found["chunk"].changed, found["embed"].changed) == (chunk, embed)


def test_another_encoder_is_named_by_its_space(look: Any, tmp_path: Path) -> None:
    found = look(encoder=save_bert(tmp_path / "other", seed=2))
    assert (found["chunk"].reused, found["embed"].reused) == (24, 0)
    assert found["embed"].changed == {"space": 3}


def test_an_empty_store_has_nothing(dumps: Dumps, tiny: Path, tmp_path: Path) -> None:
    found = explain(Store.open(str(tmp_path), create=True), dumps.old, str(tiny), GRAPH)
    assert found.parent is None
    assert found.stages[0].changed == {"range": 3}
    assert {row.stage: set(row.changed) for row in found.stages[1:]} == {
        "chunk": {"no record"},
        "embed": {"no record"},
        "train/hnsw": {"no parent"},
        "shard/hnsw": {"no parent"},
        "index/hnsw": {"no record"},
    }
    assert all(row.reused == 0 for row in found.stages)
