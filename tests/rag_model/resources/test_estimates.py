"""What a build will need: it grows with the dump and the encoder, fits into the limits, and says what does not."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, ResourceError
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.process import parse_bytes
from rag_model.resources import RunLimits, RunResources
from rag_model.resources import choose_resources as given_to
from rag_model.resources.estimates import (
    DEFAULT_MAX_WORDS,
    estimate_build,
    estimate_passages,
    estimate_query_seconds,
    estimate_stage_seconds,
)
from rag_model.retrieve.expression import parse
from rag_model.snapshots.recipe import Recipe
from tests.fixtures.tiny import save_bert

ROOM = RunLimits("64GB", 8)
SMALL, WIKIPEDIA = 5_000, 21_000_000  # passages
GRAPH_AND_CODES = Recipe().index
CODES = {"ivfpq": IndexRecipe("OPQ96_768,IVF16384_HNSW32,PQ96np")}


def needs_of(
    passages: int, encoder: Path, indexes: Mapping[str, IndexRecipe], most: RunLimits, hours: float
) -> RunResources:
    return given_to(estimate_build(passages, encoder, indexes, parse_bytes(most.memory)), most, hours)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of BERT-base, and a file as large as its weights: nothing else is read."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30_522}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    told = {"weights": {"dtype": "F32", "shape": [110_000_000], "data_offsets": [0, 440_000_000]}}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header := json.dumps(told).encode())) + header)
        file.truncate(8 + len(header) + 440_000_000)
    return folder


def test_the_demo_is_estimated_as_what_it_came_to(demo_dump: Path) -> None:
    assert estimate_passages(str(demo_dump), DEFAULT_MAX_WORDS) == pytest.approx(5_417, rel=0.01)


def test_longer_passages_are_fewer_and_a_limit_of_articles_limits_them(demo_dump: Path) -> None:
    whole = estimate_passages(str(demo_dump), DEFAULT_MAX_WORDS)
    assert estimate_passages(str(demo_dump), 2 * DEFAULT_MAX_WORDS) == pytest.approx(whole / 2, abs=1)
    assert estimate_passages(str(demo_dump), DEFAULT_MAX_WORDS, limit=10) == 600


@pytest.mark.parametrize(("name", "size", "passages"), [("p.tsv", 65_000, 100), ("d.jsonl.gz", 32_000, 100)])
def test_other_sources_are_counted_by_what_their_names_end_in(
    tmp_path: Path, name: str, size: int, passages: int
) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    assert estimate_passages(str(tmp_path / name), DEFAULT_MAX_WORDS) == passages


def test_a_query_costs_what_its_retriever_compares() -> None:
    def seconds(expression: str, passages: int = WIKIPEDIA) -> float:
        return estimate_query_seconds(parse(expression), passages, 768, ["late"])

    exact, late = seconds("exact"), seconds("late")
    assert exact == pytest.approx(2 * 768 * WIKIPEDIA / 7e10)
    assert late == pytest.approx(exact * 32 * 120 * 128 / 768)
    assert seconds("interpolate(exact:1000, bm25:1000, 1.3)") == seconds("rrf(exact, exact)") / 2 == exact
    assert seconds("bm25:1000") == seconds("hnsw") == 0
    candidates = seconds("maxsim(bm25:1000, late, 1000, rounds=0)")
    assert 0.1 < candidates < late / 1_000
    assert seconds("maxsim(bm25:500, late, 1000, graph=hnsw)") == candidates
    assert seconds("maxsim(exact, late)") == pytest.approx(exact + candidates / 2)
    assert seconds("maxsim(bm25:1000, late, 1000)", passages=100) == pytest.approx(candidates / 10)


def test_a_dump_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file matches"):
        estimate_passages(str(tmp_path / "none.bz2"), DEFAULT_MAX_WORDS)


def test_a_small_build_gets_a_small_machine_and_a_large_one_a_gpu(tiny: Path, base: Path) -> None:
    small = needs_of(SMALL, tiny, GRAPH_AND_CODES, ROOM, hours=6)
    assert (small.cores, small.gpus) == (1, 0)
    assert small.memory < 4 * 10**9
    large = needs_of(WIKIPEDIA, base, CODES, RunLimits("256GB", 32, 8), hours=6)
    assert 1 <= large.gpus <= 8
    assert large.memory > small.memory
    assert large.work.disk > small.work.disk
    assert large.hours < 24
    assert needs_of(WIKIPEDIA, base, CODES, RunLimits("256GB", 32), hours=6).hours > 24  # without a GPU


def test_as_fast_as_can_be_takes_all_cores(base: Path) -> None:
    assert needs_of(SMALL, base, GRAPH_AND_CODES, ROOM, hours=0).cores == ROOM.cores


def test_cores_that_memory_has_no_room_for_are_not_asked_for(base: Path) -> None:
    short = needs_of(SMALL, base, GRAPH_AND_CODES, RunLimits("5GB", 8), hours=0)
    assert 1 <= short.cores < 8
    assert short.memory <= 5 * 10**9


@pytest.mark.parametrize(
    ("passages", "memory", "says"),
    [
        (SMALL, "500MB", r"embed needs \d\.\d GB of memory, and a run may use 500 MB: raise the limit"),
        (SMALL, "1500MB", "the stage embed needs .* of memory"),
        (WIKIPEDIA, "4GB", r"HNSW32 over .* are available: use IVF\S+$"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(passages: int, memory: str, says: str, base: Path) -> None:
    with pytest.raises(ResourceError, match=says):
        needs_of(passages, base, GRAPH_AND_CODES, RunLimits(memory, 2), hours=0)


@given(st.integers(1, 10**8), st.integers(2 * 10**9, 10**12), st.integers(1, 64), st.integers(0, 8), st.floats(0, 100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_given_is_within_the_limits(
    tiny: Path, passages: int, memory: int, cores: int, gpus: int, hours: float
) -> None:
    try:
        needs = needs_of(passages, tiny, {"codes": IndexRecipe("IVF,PQ")}, RunLimits(str(memory), cores, gpus), hours)
    except ResourceError:
        return
    assert needs.memory <= memory
    assert 1 <= needs.cores <= cores
    assert 0 <= needs.gpus <= gpus
    assert max(needs.work.compute_stage_memory(needs.cores).values()) <= needs.memory


def seconds(factory: str, n: int, cells: int | None = None) -> dict[str, float]:
    return estimate_stage_seconds(resolve(IndexRecipe(factory, cells=cells), n, 96), 96)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,PQ4x4np", "IVF16,SQ8", "Flat", "MaxSim", "BM25"])
def test_every_kind_says_how_long_its_stages_take(factory: str) -> None:
    said = estimate_stage_seconds(get_kind_for_factory(factory).plan(IndexRecipe(factory), 3000, 8), 8)
    assert said.keys() == {"train", "scatter", "merge"} | ({"shard"} if factory == "HNSW8" else set())
    assert all(spent > 0 for spent in said.values())


def test_a_graph_of_more_vectors_or_larger_cells_takes_longer() -> None:
    small, large = (seconds("HNSW32", n, 4) for n in (100_000, 1_000_000))
    assert all(large[stage] >= 9.9 * small[stage] for stage in ("scatter", "shard", "merge"))
    assert large["shard"] > 11 * small["shard"], "a vector costs more in a larger graph"
    finer = seconds("HNSW32", 1_000_000, 64)
    assert finer["shard"] < large["shard"]
    assert finer["merge"] == large["merge"]


def test_more_candidates_take_longer() -> None:
    few, many = (resolve(IndexRecipe("HNSW32", ef_construction=ef), 100_000, 96) for ef in (50, 100))
    assert estimate_stage_seconds(many, 96)["shard"] == pytest.approx(2 * estimate_stage_seconds(few, 96)["shard"])


def test_comparing_with_every_centroid_takes_longer_than_their_graph() -> None:
    assert seconds("IVF65536,SQ8", 10**8)["scatter"] > 5 * seconds("IVF65536_HNSW32,SQ8", 10**8)["scatter"]
    assert seconds("IVF64,SQ8", 10**6)["scatter"] == seconds("IVF64_HNSW32,SQ8", 10**6)["scatter"]


def test_codes_and_a_rotation_take_longer_to_train() -> None:
    plain, codes, rotated = (
        seconds(name, 10**6)["train"] for name in ("IVF64,SQ8", "IVF64,PQ24np", "OPQ,IVF64,PQ24np")
    )
    assert plain < codes < rotated
