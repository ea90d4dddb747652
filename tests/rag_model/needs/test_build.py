"""What a build will need: it grows with the dump and the encoder, fits into the limits, and says what does not."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.errors import InputError, ResourceError
from rag_model.index.recipe import IndexRecipe
from rag_model.needs.build import WORDS, Bulk, bulk_of, work_of
from rag_model.needs.machine import Limits, Needs
from rag_model.needs.machine import needs_of as given_to
from rag_model.snapshots.recipe import Recipe
from tests.fixtures.tiny import save_bert

ROOM = Limits(memory=64 * 10**9, cores=8)
SMALL = Bulk(passages=5_000, part=1_000, dim=384, weights=90_000_000, operations=3.4e9)
WIKIPEDIA = Bulk(passages=21_000_000, part=40_000, dim=768, weights=440_000_000, operations=2.7e10)
GRAPH_AND_CODES = Recipe().index
CODES = {"ivfpq": IndexRecipe("OPQ96_768,IVF16384_HNSW32,PQ96np")}


def needs_of(
    bulk: Bulk, indexes: Mapping[str, IndexRecipe], limits: Limits, hours: float, *, local: bool = True
) -> Needs:
    return given_to(work_of(bulk, indexes, limits.memory, local=local), limits, hours)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("tiny"))


def test_the_demo_is_estimated_as_what_it_came_to(demo_dump: Path, tiny: Path) -> None:
    bulk = bulk_of(str(demo_dump), tiny, WORDS)
    assert bulk.passages == pytest.approx(5_417, rel=0.01)
    assert bulk.dim == 32
    assert bulk.weights == (tiny / "model.safetensors").stat().st_size
    assert 0 < bulk.part < bulk.passages


def test_longer_passages_are_fewer_and_a_limit_of_articles_limits_them(demo_dump: Path, tiny: Path) -> None:
    whole = bulk_of(str(demo_dump), tiny, WORDS).passages
    assert bulk_of(str(demo_dump), tiny, 2 * WORDS).passages == pytest.approx(whole / 2, abs=1)
    assert bulk_of(str(demo_dump), tiny, WORDS, limit=10).passages == 600


@pytest.mark.parametrize(("name", "size", "passages"), [("p.tsv", 65_000, 100), ("d.jsonl.gz", 32_000, 100)])
def test_other_sources_are_counted_by_what_their_names_end_in(
    tmp_path: Path, tiny: Path, name: str, size: int, passages: int
) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    assert bulk_of(str(tmp_path / name), tiny, WORDS).passages == passages


def test_a_dump_that_is_not_there_is_said_so(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(InputError, match="names no file"):
        bulk_of(str(tmp_path / "none.bz2"), tiny, WORDS)


def test_a_small_build_gets_a_small_machine_and_a_large_one_a_gpu() -> None:
    small = needs_of(SMALL, GRAPH_AND_CODES, ROOM, hours=6)
    assert (small.cores, small.gpus) == (1, 0)
    assert small.memory < 4 * 10**9
    roomy = Limits(memory=256 * 10**9, cores=32, gpus=8)
    large = needs_of(WIKIPEDIA, CODES, roomy, hours=6)
    assert 1 <= large.gpus <= 8
    assert large.memory > small.memory
    assert large.disk > small.disk
    assert large.hours < 24
    assert needs_of(WIKIPEDIA, CODES, Limits(roomy.memory, roomy.cores), hours=6).hours > 24  # without a GPU


def test_as_fast_as_can_be_takes_all_cores() -> None:
    assert needs_of(SMALL, GRAPH_AND_CODES, ROOM, hours=0).cores == ROOM.cores


def test_cores_that_memory_has_no_room_for_are_not_asked_for() -> None:
    short = needs_of(SMALL, GRAPH_AND_CODES, Limits(memory=4 * 10**9, cores=8), hours=0)
    assert 1 <= short.cores < 8
    assert short.memory <= 4 * 10**9


def test_workers_elsewhere_are_not_this_runs_to_count() -> None:
    assert needs_of(WIKIPEDIA, GRAPH_AND_CODES, Limits(10**9, cores=8), hours=0, local=False).cores == 1


@pytest.mark.parametrize(
    ("memory", "says"),
    [(500 * 10**6, "its launcher alone takes"), (1_500 * 10**6, "memory to embed"), (3 * 10**9, r"use \S+")],
)
def test_what_does_not_fit_is_refused_with_what_would(memory: int, says: str) -> None:
    bulk = WIKIPEDIA if memory > 10**9 * 2 else SMALL
    with pytest.raises(ResourceError, match=says):
        needs_of(bulk, GRAPH_AND_CODES, Limits(memory, cores=2), hours=0)


@given(st.integers(1, 10**8), st.integers(2 * 10**9, 10**12), st.integers(1, 64), st.integers(0, 8), st.floats(0, 100))
def test_what_is_given_is_within_the_limits(passages: int, memory: int, cores: int, gpus: int, hours: float) -> None:
    bulk = Bulk(passages, max(1, passages // 16), 64, 10**8, 1e9)
    limits = Limits(memory, cores, gpus)
    try:
        needs = needs_of(bulk, {"codes": IndexRecipe("IVF,PQ")}, limits, hours)
    except ResourceError:
        return
    assert needs.memory <= limits.memory
    assert 1 <= needs.cores <= limits.cores
    assert 0 <= needs.gpus <= limits.gpus
    assert max(needs.stages.values()) <= needs.memory
