"""The resources of a build grow with the dump and the encoder, and stay within the limits."""

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
from rag_model.resources import RunLimits, RunResources, choose_resources
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

LIMITS = RunLimits("64GB", 8)
SMALL, WIKIPEDIA = 5_000, 21_000_000  # passages
GRAPH_AND_CODES = Recipe().index
CODES = {"ivfpq": IndexRecipe("OPQ96_768,IVF16384_HNSW32,PQ96np")}


def estimate_resources(
    passages: int, encoder: Path, indexes: Mapping[str, IndexRecipe], limits: RunLimits, hours: float
) -> RunResources:
    return choose_resources(estimate_build(passages, encoder, indexes, parse_bytes(limits.memory)), limits, hours)


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def bert_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of BERT-base and a sparse file with the size of its weights; nothing else is read."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30_522}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    header_fields = {"weights": {"dtype": "F32", "shape": [110_000_000], "data_offsets": [0, 440_000_000]}}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header := json.dumps(header_fields).encode())) + header)
        file.truncate(8 + len(header) + 440_000_000)
    return folder


def test_estimate_of_the_demo_matches_its_build(demo_dump: Path) -> None:
    assert estimate_passages(str(demo_dump), DEFAULT_MAX_WORDS) == pytest.approx(5_417, rel=0.01)


def test_longer_passages_and_a_limit_of_articles_give_fewer_passages(demo_dump: Path) -> None:
    all_passages = estimate_passages(str(demo_dump), DEFAULT_MAX_WORDS)
    assert estimate_passages(str(demo_dump), 2 * DEFAULT_MAX_WORDS) == pytest.approx(all_passages / 2, abs=1)
    assert estimate_passages(str(demo_dump), DEFAULT_MAX_WORDS, limit=10) == 600


@pytest.mark.parametrize(("name", "size", "passages"), [("p.tsv", 65_000, 100), ("d.jsonl.gz", 32_000, 100)])
def test_passages_of_other_formats_are_estimated_from_the_file_size(
    tmp_path: Path, name: str, size: int, passages: int
) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    assert estimate_passages(str(tmp_path / name), DEFAULT_MAX_WORDS) == passages


def test_query_time_depends_on_the_compared_vectors() -> None:
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


def test_missing_dump_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file matches"):
        estimate_passages(str(tmp_path / "none.bz2"), DEFAULT_MAX_WORDS)


def test_small_build_gets_a_small_machine_and_large_build_a_gpu(tiny_encoder: Path, bert_base: Path) -> None:
    small = estimate_resources(SMALL, tiny_encoder, GRAPH_AND_CODES, LIMITS, hours=6)
    assert (small.cores, small.gpus) == (1, 0)
    assert small.memory < 4 * 10**9
    large = estimate_resources(WIKIPEDIA, bert_base, CODES, RunLimits("256GB", 32, 8), hours=6)
    assert 1 <= large.gpus <= 8
    assert large.memory > small.memory
    assert large.work.disk > small.work.disk
    assert large.hours < 24
    assert estimate_resources(WIKIPEDIA, bert_base, CODES, RunLimits("256GB", 32), hours=6).hours > 24  # without a GPU


def test_zero_hours_requests_all_cores(bert_base: Path) -> None:
    assert estimate_resources(SMALL, bert_base, GRAPH_AND_CODES, LIMITS, hours=0).cores == LIMITS.cores


def test_memory_limit_reduces_the_cores(bert_base: Path) -> None:
    short = estimate_resources(SMALL, bert_base, GRAPH_AND_CODES, RunLimits("5GB", 8), hours=0)
    assert 1 <= short.cores < 8
    assert short.memory <= 5 * 10**9


@pytest.mark.parametrize(
    ("passages", "memory", "words"),
    [
        (SMALL, "500MB", r"embed needs \d\.\d GB of memory, and a run may use 500 MB: raise the limit"),
        (SMALL, "1500MB", "the stage embed needs .* of memory"),
        (WIKIPEDIA, "4GB", r"HNSW32 over .* are available: use IVF\S+$"),
    ],
)
def test_too_large_build_is_refused_with_advice(passages: int, memory: str, words: str, bert_base: Path) -> None:
    with pytest.raises(ResourceError, match=words):
        estimate_resources(passages, bert_base, GRAPH_AND_CODES, RunLimits(memory, 2), hours=0)


@given(st.integers(1, 10**8), st.integers(2 * 10**9, 10**12), st.integers(1, 64), st.integers(0, 8), st.floats(0, 100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_resources_are_within_the_limits(
    tiny_encoder: Path, passages: int, memory: int, cores: int, gpus: int, hours: float
) -> None:
    try:
        limits, indexes = RunLimits(str(memory), cores, gpus), {"codes": IndexRecipe("IVF,PQ")}
        resources = estimate_resources(passages, tiny_encoder, indexes, limits, hours)
    except ResourceError:
        return
    assert resources.memory <= memory
    assert 1 <= resources.cores <= cores
    assert 0 <= resources.gpus <= gpus
    assert max(resources.work.compute_stage_memory(resources.cores).values()) <= resources.memory


def estimate_stages(factory: str, n: int, cells: int | None = None) -> dict[str, float]:
    return estimate_stage_seconds(resolve(IndexRecipe(factory, cells=cells), n, 96), 96)


@pytest.mark.parametrize("factory", ["HNSW8", "IVF16,PQ4x4np", "IVF16,SQ8", "Flat", "MaxSim", "BM25"])
def test_every_index_kind_estimates_its_stages(factory: str) -> None:
    stage_seconds = estimate_stage_seconds(get_kind_for_factory(factory).plan(IndexRecipe(factory), 3000, 8), 8)
    assert stage_seconds.keys() == {"train", "scatter", "merge"} | ({"shard"} if factory == "HNSW8" else set())
    assert all(seconds > 0 for seconds in stage_seconds.values())


def test_graph_with_more_vectors_or_larger_cells_takes_longer() -> None:
    small, large = (estimate_stages("HNSW32", n, 4) for n in (100_000, 1_000_000))
    assert all(large[stage] >= 9.9 * small[stage] for stage in ("scatter", "shard", "merge"))
    assert large["shard"] > 11 * small["shard"], "a vector costs more in a larger graph"
    finer = estimate_stages("HNSW32", 1_000_000, 64)
    assert finer["shard"] < large["shard"]
    assert finer["merge"] == large["merge"]


def test_more_candidates_take_longer() -> None:
    few, many = (resolve(IndexRecipe("HNSW32", ef_construction=ef), 100_000, 96) for ef in (50, 100))
    assert estimate_stage_seconds(many, 96)["shard"] == pytest.approx(2 * estimate_stage_seconds(few, 96)["shard"])


def test_exact_centroid_search_takes_longer_than_a_centroid_graph() -> None:
    def estimate_scatter(factory: str, n: int) -> float:
        return estimate_stages(factory, n)["scatter"]

    assert estimate_scatter("IVF65536,SQ8", 10**8) > 5 * estimate_scatter("IVF65536_HNSW32,SQ8", 10**8)
    assert estimate_scatter("IVF64,SQ8", 10**6) == estimate_scatter("IVF64_HNSW32,SQ8", 10**6)


def test_codes_and_a_rotation_take_longer_to_train() -> None:
    plain, codes, rotated = (
        estimate_stages(name, 10**6)["train"] for name in ("IVF64,SQ8", "IVF64,PQ24np", "OPQ,IVF64,PQ24np")
    )
    assert plain < codes < rotated
