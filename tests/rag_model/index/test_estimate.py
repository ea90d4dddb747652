import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_model.index.build import run_stages
from rag_model.index.estimate import estimate_resources
from rag_model.index.quality.results import PROCESS_BYTES
from rag_model.index.recipe import IndexRecipe, resolve

Make = Callable[..., Any]  # fixtures of conftest.py
WIKIPEDIA = (21_015_324, 768)


@pytest.mark.parametrize(
    "factory",
    [
        "HNSW8",
        "HNSW32_SQ8",
        "HNSW16_SQfp16",
        "IVF,PQ",
        "OPQ4_16,IVF16_HNSW8,PQ4x4np",
        "IVF16,RaBitQ4",
        "IVF16,SQ8",
        "IVF16,PQ4np,Refine(SQfp16)",
        "Flat",
    ],
)
def test_disk_bytes_match_the_index_file(
    factory: str, make_vectors: Make, write_parts: Make, build_index: Make
) -> None:
    path, plan = build_index(write_parts(make_vectors(3000), [1000]), IndexRecipe(factory))
    cost = estimate_resources(plan)
    assert cost.disk_bytes == pytest.approx(path.stat().st_size, rel=0.02)
    assert cost.disk_bytes < cost.search_bytes


@pytest.mark.parametrize("factory", ["HNSW8", "IVF64,PQ4np", "Flat"])
def test_work_bytes_bound_the_work_files(factory: str, make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    parts = write_parts(make_vectors(3000), [1000])
    plan = resolve(IndexRecipe(factory, cells=4), 3000, 32)
    (work := tmp_path / "work").mkdir()
    run_stages(plan, parts, work / "index", work)
    written_bytes = sum(path.stat().st_size for path in work.iterdir()) + (work / "index").stat().st_size
    assert 0.5 * estimate_resources(plan).work_bytes < written_bytes < 1.1 * estimate_resources(plan).work_bytes


MEASURE_STAGE = """
import sys
from pathlib import Path

from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.index.kind import get_kind
from rag_model.index.build import iter_slices


def read_peak_memory() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


work, factory, n, d = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
plan = resolve(IndexRecipe(factory, cells=2, ef_construction=10), n, d)
trained, piece, parts = work / "trained", work / "scattered", [work / "part-00000.npy"]
builder = get_kind(plan.kind)
bytes_before = read_peak_memory()
if sys.argv[5] == "train":
    builder.train(plan, parts, trained)
elif sys.argv[5] == "scatter":
    builder.scatter(plan, trained, parts[0], 0, piece)
else:
    builder.shard(plan, trained, iter_slices([piece], plan.shards, 0), 0, work / "shard")
print(read_peak_memory() - bytes_before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_stage_bytes_bound_the_memory(make_vectors: Make, write_parts: Make, tmp_path: Path) -> None:
    """Each stage runs in a process of its own because the peak of an earlier stage would hide its peak."""
    n, d = 20_000, 128
    write_parts(make_vectors(n, d), [])
    command = [sys.executable, "-c", MEASURE_STAGE, str(tmp_path), "HNSW4", str(n), str(d)]
    measured_bytes = {
        stage: int(subprocess.run([*command, stage], check=True, capture_output=True).stdout)
        for stage in ("train", "scatter", "shard")
    }
    expected = estimate_resources(resolve(IndexRecipe("HNSW4", cells=2), n, d), n).stages
    for stage in ("scatter", "shard"):
        limit = expected[stage] - PROCESS_BYTES
        assert limit / 4 < measured_bytes[stage] < 1.2 * limit, stage


def test_stages_of_wikipedia_fit_a_small_machine() -> None:
    for factory in ("HNSW32", "HNSW32_SQ8", "IVF,PQ", "Flat"):
        cost = estimate_resources(resolve(IndexRecipe(factory), *WIKIPEDIA))
        assert max(cost.stages.values()) == cost.peak_bytes() < 8 * 10**9
    assert estimate_resources(resolve(IndexRecipe("HNSW32"), *WIKIPEDIA)).search_bytes > 64 * 10**9


def test_memory_falls_with_cells_and_with_parts() -> None:
    undivided, divided = (
        estimate_resources(resolve(IndexRecipe("HNSW32", cells=cells), 10**6, 96)) for cells in (1, 16)
    )
    assert divided.stages["shard"] - PROCESS_BYTES < (undivided.stages["shard"] - PROCESS_BYTES) / 3
    assert divided.stages["merge"] == pytest.approx(undivided.stages["merge"], rel=0.1)
    plan = resolve(IndexRecipe("HNSW32"), 10**6, 96)
    assert estimate_resources(plan, 10_000).stages["scatter"] < estimate_resources(plan, 100_000).stages["scatter"]
