"""The index jobs build the same bytes as one process, and build lost files again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest

from beam_jobs import index, index_work
from beam_jobs.index_work import IndexInProgress, ShardTask, read_blob_list
from beam_jobs.job_settings import JobSettings
from beam_jobs.workers import START_VARIABLE
from rag_model.errors import InputError, StoreError
from rag_model.index import build as stages
from rag_model.index.files.pieces import SLICE_LOCATION_DTYPE, SliceTable
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.quality.results import PROCESS_BYTES
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.search import open_index
from rag_model.store.objects.blobs import BlobRef, Blobs
from rag_model.store.objects.files import Files
from rag_model.store.store import Store
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import write_parts

N, D, PARTS = 1200, 16, 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Parts of unequal size, the last one the largest."""
    folder = tmp_path_factory.mktemp("vectors")
    vectors = np.random.default_rng(5).standard_normal((N, D), np.float32)
    paths = [folder / f"{number}.npy" for number in range(PARTS)]
    for path, part_vectors in zip(paths, np.split(vectors, [200, 500]), strict=True):
        np.save(path, part_vectors / np.linalg.norm(part_vectors, axis=1, keepdims=True))
    return paths


@pytest.fixture(scope="module")
def plans() -> dict[str, VectorPlan]:
    """Plans of a graph with four cells and of inverted lists."""
    recipes = {"hnsw": IndexRecipe("HNSW8", cells=4), "ivf": IndexRecipe("IVF8,SQ8")}
    return {name: resolve(recipe, N, D) for name, recipe in recipes.items()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


BEAM = "--runner=FnApiRunner"  # without it the launcher runs the tasks of such small jobs


def create_job_settings(store: Store, *flags: str) -> JobSettings:
    return JobSettings.new(store.url, flags)


def start_builds(store: Store, plans: dict[str, VectorPlan], files: Sequence[Path]) -> list[IndexInProgress]:
    vectors = [store.blobs.put_file(path) for path in files]
    return [index.start_index(store, name, plan, vectors) for name, plan in plans.items()]


def build_shards(
    store: Store, plans: dict[str, VectorPlan], files: Sequence[Path], *flags: str
) -> list[IndexInProgress]:
    """Run all jobs except the merge."""
    builds = start_builds(store, plans, files)
    for job in (index.train, index.scatter, index.build_shards):
        builds = job(builds, create_job_settings(store, *flags))
    return builds


def read_pieces(store: Store, blob_list: BlobRef | None) -> list[BlobRef]:
    assert blob_list is not None
    return read_blob_list(store, blob_list)


def test_jobs_build_the_same_bytes_as_one_process(
    store: Store, plans: dict[str, VectorPlan], files: list[Path], tmp_path: Path
) -> None:
    builds = build_shards(store, plans, files, BEAM)
    for built_index in index.merge(builds, create_job_settings(store, BEAM)):
        (work := tmp_path / built_index.name).mkdir()
        stages.run_stages(built_index.plan, files, work / "whole", work)
        assert store.blobs.read(built_index.blob) == (work / "whole").read_bytes()
    by_name = {build.name: build for build in builds}
    assert len(read_pieces(store, by_name["hnsw"].pieces)) == PARTS
    assert len(read_pieces(store, by_name["hnsw"].shards)) == 4
    assert read_pieces(store, by_name["ivf"].shards) == []


@pytest.mark.parametrize("factory", ["HNSW8", "IVF8,SQ8", "Impact1"])
def test_training_reads_only_sampled_rows_of_a_remote_store(
    store: Store, files: list[Path], s3_store_url: str, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    kind = get_kind_for_factory(factory)
    plan = kind.plan(IndexRecipe(factory, cells=4 if "HNSW" in factory else None), N, D)
    plan = replace(plan, train_sample=300) if isinstance(plan, VectorPlan) else plan
    remote, fetched_ids = Store.open(s3_store_url, create=True), set[str]()
    fetch: Callable[[Blobs, BlobRef], Path] = Blobs.get_local_path
    monkeypatch.setattr(Blobs, "get_local_path", lambda blobs, ref: fetched_ids.add(ref.id) or fetch(blobs, ref))
    trained_blobs = []
    for stage_store in (store, remote):
        fetched_ids.clear()
        (build,) = start_builds(stage_store, {"built": plan}, files)
        trained_blobs.append(index_work.train_one(build, stage_store)["blob"])
    assert trained_blobs[0] == trained_blobs[1]
    assert not fetched_ids


def test_recorded_stages_do_not_run_again(store: Store, plans: dict[str, VectorPlan], files: list[Path]) -> None:
    first = index.merge(build_shards(store, plans, files, BEAM), create_job_settings(store, BEAM))
    records = {path: path.stat().st_mtime_ns for path in store.files.local_path("memo").rglob("*.json")}
    assert index.merge(build_shards(store, plans, files), create_job_settings(store)) == first
    assert {path: path.stat().st_mtime_ns for path in store.files.local_path("memo").rglob("*.json")} == records


@pytest.mark.parametrize("stage", ["pieces", "shards"])
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_lost_file_is_named_and_built_again(
    stage: str, damage: str, store: Store, plans: dict[str, VectorPlan], files: list[Path]
) -> None:
    graph = {"hnsw": plans["hnsw"]}
    builds = build_shards(store, graph, files)
    lost_file = store.files.local_path(read_pieces(store, getattr(builds[0], stage))[1].path)
    content = lost_file.read_bytes()
    lost_file.chmod(0o644)
    lost_file.unlink() if damage == "missing" else lost_file.write_bytes(content[:-9])
    with pytest.raises(StoreError, match=lost_file.name):
        index.merge(builds, create_job_settings(store))
    (built_index,) = index.merge(build_shards(store, graph, files), create_job_settings(store))
    assert store.blobs.exists(built_index.blob)
    assert lost_file.read_bytes() == content


def test_a_damaged_slice_is_named(store: Store, plans: dict[str, VectorPlan], files: list[Path]) -> None:
    """The length, stamp and headers of the piece are right."""
    (build,) = index.scatter(
        index.train(start_builds(store, {"hnsw": plans["hnsw"]}, files), create_job_settings(store)),
        create_job_settings(store),
    )
    path = store.files.local_path(read_pieces(store, build.pieces)[1].path)
    content, table = path.read_bytes(), read_slice_locations(store, build)
    path.chmod(0o644)
    offset = int(table["start"][2, 1]) + 30  # shard 2, part 1
    path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
    with pytest.raises(StoreError, match=f"{path.name} .* is damaged"):
        index.build_shards([build], create_job_settings(store))
    path.write_bytes(content)
    (built_index,) = index.merge(index.build_shards([build], create_job_settings(store)), create_job_settings(store))
    assert store.blobs.exists(built_index.blob)


def read_slice_locations(store: Store, build: IndexInProgress) -> SliceTable:
    assert build.slice_locations is not None
    return np.frombuffer(store.blobs.read(build.slice_locations), SLICE_LOCATION_DTYPE).reshape(
        build.plan.shards, PARTS
    )


@pytest.mark.parametrize("field", ["start", "size", "rows", "digest"])
def test_damaged_slice_locations_are_named(
    field: str, store: Store, plans: dict[str, VectorPlan], files: list[Path], tmp_path: Path
) -> None:
    """No shard without some of its rows is recorded; deleting the named blob gives the same index."""
    (build,) = index.scatter(
        index.train(start_builds(store, {"hnsw": plans["hnsw"]}, files), create_job_settings(store)),
        create_job_settings(store),
    )
    assert build.slice_locations is not None
    locations, path = read_slice_locations(store, build).copy(), store.files.local_path(build.slice_locations.path)
    locations[field][2, 1] = locations[field][2, 0] if field == "digest" else 0
    path.chmod(0o644)
    path.write_bytes(locations.tobytes())
    with pytest.raises(StoreError, match=f"{path.name} .* is damaged"):
        index.build_shards([build], create_job_settings(store))
    path.unlink()
    (built_index,) = index.merge(build_shards(store, {"hnsw": plans["hnsw"]}, files), create_job_settings(store))
    stages.run_stages(built_index.plan, files, tmp_path / "whole", tmp_path)
    assert store.blobs.read(built_index.blob) == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("offset", [0, -1], ids=["head", "table"])
def test_a_deleted_damaged_piece_is_built_again(
    offset: int, store: Store, plans: dict[str, VectorPlan], files: list[Path]
) -> None:
    graph = {"hnsw": plans["hnsw"]}
    (build,) = build_shards(store, graph, files)
    path = store.files.local_path(read_pieces(store, build.pieces)[1].path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises((StoreError, InputError), match=f"{path.name}.* damaged.* delete"):
        index.merge(build_shards(store, graph, files), create_job_settings(store))
    path.unlink()
    (built_index,) = index.merge(build_shards(store, graph, files), create_job_settings(store))
    assert store.blobs.exists(built_index.blob)


def test_parts_may_be_empty_and_mix_precisions(store: Store, plans: dict[str, VectorPlan], tmp_path: Path) -> None:
    """Parts have no row, one row, or many, in float16 or float32."""
    samples = np.random.default_rng(6).standard_normal((N, D), np.float32)
    vectors = (samples / np.linalg.norm(samples, axis=1, keepdims=True)).astype(np.float16)
    parts = np.split(vectors, [0, 1, 600])
    paths = [tmp_path / f"{number}.npy" for number in range(len(parts))]
    for number, path in enumerate(paths):
        np.save(path, parts[number].astype((np.float16, np.float32)[number % 2]))
    (built_index,) = index.merge(build_shards(store, {"hnsw": plans["hnsw"]}, paths), create_job_settings(store))
    (work := tmp_path / "work").mkdir()
    stages.run_stages(built_index.plan, paths, work / "whole", work)
    assert store.blobs.read(built_index.blob) == (work / "whole").read_bytes()
    rows = open_index(work / "whole").search(vectors[:9].astype(np.float32), 1, efSearch=N)[1]
    assert rows[:, 0].tolist() == list(range(9))


def test_a_shard_reads_only_its_own_slices(store: Store, plans: dict[str, VectorPlan], files: list[Path]) -> None:
    """One request for each piece, because reading whole pieces would grow with the square of the corpus."""
    (build,) = index.scatter(
        index.train(start_builds(store, {"hnsw": plans["hnsw"]}, files), create_job_settings(store)),
        create_job_settings(store),
    )
    scattered, table = {ref.path for ref in read_pieces(store, build.pieces)}, read_slice_locations(store, build)
    calls = list[tuple[str, int, int]]()

    class CountingFiles(Files):
        def read_range(self, path: str, start: int, end: int) -> bytes:
            calls.append((path, start, end))
            return super().read_range(path, start, end)

        def open(self, path: str, size: int) -> BinaryIO:
            assert path not in scattered
            return super().open(path, size)

    counting_store = Store(CountingFiles(store.url))
    for number, column in enumerate(table):
        calls.clear()
        index_work.build_shard(ShardTask(build, number, **index._read_cells(store, build)[number]), counting_store)
        sizes = [end - start for path, start, end in calls if path in scattered]
        assert sizes == column["size"].tolist()


def test_a_shard_to_be_built_alone_gets_all_cores(
    store: Store, plans: dict[str, VectorPlan], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded shards need no cores."""
    graph, thread_counts = {"hnsw": plans["hnsw"]}, list[int]()
    use_threads = index_work.engine.use_threads

    def record_threads(count: int) -> AbstractContextManager[None]:
        if count > 1:  # the recall of a new graph is measured with one thread
            thread_counts.append(count)
        return use_threads(count)

    monkeypatch.setattr(index_work.engine, "use_threads", record_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setenv(START_VARIABLE, "1000")  # seconds, so that the launcher runs all tasks
    builds = start_builds(store, graph, files)
    for job in (index.train, index.scatter, index.build_shards):
        builds = job(builds, create_job_settings(store))
    assert thread_counts == [2, 2, 2, 2]
    lost_shard = read_pieces(store, builds[0].shards)[1]
    store.files.local_path(lost_shard.path).unlink()
    index.build_shards(builds, create_job_settings(store))
    assert thread_counts[4:] == [8]


def test_a_shard_of_another_build_is_refused(store: Store, plans: dict[str, VectorPlan], files: list[Path]) -> None:
    graph = plans["hnsw"]
    other_plan = resolve(IndexRecipe("HNSW8", cells=4, seed=1), N, D)
    (build,), (other_build,) = (build_shards(store, {"hnsw": plan}, files) for plan in (graph, other_plan))
    mixed = replace(build, shards=other_build.shards)
    with pytest.raises(InputError, match="shard 0 of HNSW8 is a piece of another build"):
        index.merge([mixed], create_job_settings(store))


def test_every_row_is_in_exactly_one_cell(store: Store, plans: dict[str, VectorPlan], files: list[Path]) -> None:
    (build,) = index.scatter(
        index.train(start_builds(store, {"hnsw": plans["hnsw"]}, files), create_job_settings(store)),
        create_job_settings(store),
    )
    assert build.cells is not None
    rows = [cell["rows"] for cell in json.loads(store.blobs.read(build.cells))]
    assert len(rows) == 4
    assert sum(rows) == N  # without `linked`, no vector is linked into a second cell


def test_a_cell_with_nearly_all_rows_is_searchable(store: Store, tmp_path: Path) -> None:
    vectors = np.full((N, D), 0.25, np.float32)
    vectors[:8] = np.eye(8, D, dtype=np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    plan = resolve(IndexRecipe("HNSW8", cells=4), N, D)
    (built_index,) = index.merge(
        build_shards(store, {"hnsw": plan}, [tmp_path / "vectors.npy"]), create_job_settings(store)
    )
    rows = open_index(store.blobs.get_local_path(built_index.blob)).search(vectors[:8], 1, efSearch=N)[1]
    assert rows[:, 0].tolist() == list(range(8))


@pytest.mark.slow
def test_pieces_are_read_from_an_object_store(
    plans: dict[str, VectorPlan], files: list[Path], s3_store_url: str, tmp_path: Path
) -> None:
    store = Store.open(s3_store_url, create=True)
    for built_index in index.merge(build_shards(store, plans, files, BEAM), create_job_settings(store, BEAM)):
        (work := tmp_path / built_index.name).mkdir()
        stages.run_stages(built_index.plan, files, work / "whole", work)
        assert store.blobs.read(built_index.blob) == (work / "whole").read_bytes()


def test_training_starts_one_local_worker_for_each_gpu(
    store: Store, plans: dict[str, VectorPlan], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_jobs: list[tuple[str, int, tuple[str, ...]]] = []
    run_job = index.run_job

    def record_job(
        stage: str, function: Any, tasks: Sequence[Any], job_settings: JobSettings, *rest: Any, **named: Any
    ) -> Any:
        started_jobs.append((stage, len(tasks), job_settings.flags))
        return run_job(stage, function, tasks, replace(job_settings, flags=()), *rest, **named)

    monkeypatch.setattr(index, "run_job", record_job)
    monkeypatch.setattr(index, "engine", SimpleNamespace(count_gpus=lambda: 3))
    monkeypatch.setattr(JobSettings, "is_too_small", lambda job_settings, seconds: job_settings.flags == ())
    builds = index.train(start_builds(store, plans, files), JobSettings.new(store.url, ["--direct_num_workers=8"]))
    assert [build.trained_file is not None for build in builds] == [True, True]
    assert started_jobs == [("train", 2, ("--direct_num_workers=3",)), ("train", 0, ("--direct_num_workers=8",))]


_MEMORY_OF_A_WORKER = """
import sys
from pathlib import Path

from beam_jobs.local_worker import serve_requests
from rag_model.index.kind import get_kind
from rag_model.index.recipe import IndexRecipe


def read_peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


serve_requests()  # its input is empty, so it only imports the jobs
print(read_peak())
part, kind = Path(sys.argv[1]), get_kind("bm25")
plan = kind.plan(IndexRecipe("BM25"), 40, 0)
kind.scatter(plan, part, part, 0, part.with_suffix(".piece"))
print(read_peak(), kind.estimate(plan).stages["scatter"])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux reports the memory")
def test_estimates_count_the_imports_of_a_worker_and_the_compiled_functions(tmp_path: Path) -> None:
    (part,) = write_parts([build_passage(f"title {number}", "A text of pigs.") for number in range(40)], [], tmp_path)
    command = [sys.executable, "-c", _MEMORY_OF_A_WORKER, str(part)]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout
    bytes_after_import, bytes_after_scatter, estimate = map(int, output.split())
    # Resident memory differs by a quarter between machines, with their huge pages and processors.
    assert 0.5 * PROCESS_BYTES < bytes_after_import < PROCESS_BYTES
    assert 0.5 * estimate < bytes_after_scatter < estimate
