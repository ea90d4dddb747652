"""`bookwheel index`: builds an index file for faiss from a file of vectors, and resumes a killed build."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.machine.workplace import open_work_store
from rag_model.errors import ResourceError
from rag_model.index.build import build_index
from rag_model.index.recipe import IndexRecipe
from tests.fixtures.forked_processes import ForkedCommand
from tests.flows.conftest import IN_PROCESS

N, D = 1500, 16
DEADLINE = 300.0  # seconds until a test gives up on a condition
GRAPH = ("--index", "HNSW8", "--shards", "3", "--ef-construction", "40")


@pytest.fixture(scope="module")
def vectors() -> Any:
    rows = np.random.default_rng(1).standard_normal((N, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def vectors_file(vectors: Any, tmp_path: Path) -> Path:
    np.save(tmp_path / "vectors.npy", vectors)
    return tmp_path / "vectors.npy"


@pytest.fixture(scope="module")
def graph_bytes(vectors: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a graph of all vectors, built without interruption."""
    out = tmp_path_factory.mktemp("whole") / "index"
    build_index(vectors, out, IndexRecipe("HNSW8", cells=3, ef_construction=40))
    return out.read_bytes()


def measure_self_recall(out: Path, vectors: Any) -> float:
    """Return the share of vectors whose nearest neighbour is the vector itself."""
    index = faiss.read_index(str(out))
    assert (index.ntotal, index.d) == (len(vectors), D)
    return float((index.search(vectors, 1)[1][:, 0] == np.arange(len(vectors))).mean())


def test_graph_is_built_from_shards(vectors_file: Path, vectors: Any, bookwheel: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.faiss"
    result = bookwheel("index", vectors_file, out, *GRAPH, "--metric", "ip", "--recall", "0.9", "--json")
    assert result.code == 0, result.err
    assert result.json | {"factory": "HNSW8", "metric": "ip", "n": N, "d": D, "cells": 3, "dropped": 0} == result.json
    assert measure_self_recall(out, vectors) > 0.99
    assert result.json["bytes"] == out.stat().st_size
    assert faiss.read_index(str(out)).hnsw.efSearch == result.json["search"]["efSearch"]
    assert result.json["health"]["unreachable"] == 0
    recalls = [effort["recall_mean"] for effort in result.json["curve"]]
    assert recalls == sorted(recalls)
    assert recalls[-1] > 0.99
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.faiss", "vectors.npy"]


def test_text_output_names_index_and_recall(vectors_file: Path, bookwheel: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "questions.npy", np.load(vectors_file, allow_pickle=False)[:40] + 0.01)
    result = bookwheel(
        "index", vectors_file, tmp_path / "out", "--index", "IVF8,SQ8", "--questions", tmp_path / "questions.npy"
    )
    assert result.code == 0, result.err
    for message in ("IVF8,SQ8 (ip)", f"{N:,} of {D} dimensions", "nprobe", "measured with 40 questions", "recall@20"):
        assert message in result.out


def test_default_index_is_the_best_that_fits_into_memory(vectors_file: Path, bookwheel: Any, tmp_path: Path) -> None:
    assert bookwheel("index", vectors_file, tmp_path / "out", "--memory", "1GB", "--json").json["factory"] == "HNSW32"


def test_parts_in_parquet_give_the_bytes_of_one_array(
    vectors: Any, graph_bytes: bytes, bookwheel: Any, tmp_path: Path
) -> None:
    (folder := tmp_path / "parts").mkdir()
    for number, part in enumerate(np.split(vectors, [100, 900])):
        table = pa.table({"id": pa.array(range(len(part))), "embedding": pa.array(list(part))})
        pq.write_table(table, folder / f"part-{number}.parquet")
    assert bookwheel("index", folder, tmp_path / "out", *GRAPH).code == 0
    assert (tmp_path / "out").read_bytes() == graph_bytes


def test_rows_with_nan_are_rejected_or_dropped(
    vectors_file: Path, vectors: Any, bookwheel: Any, tmp_path: Path
) -> None:
    invalid_vectors = vectors.copy()
    invalid_vectors[[5, 700]] = np.nan
    np.save(vectors_file, invalid_vectors)
    result = bookwheel("index", vectors_file, tmp_path / "out", *GRAPH)
    assert result.code == 1
    assert result.complaint.startswith(f"row 5 of {vectors_file} holds a NaN or an infinity")
    result = bookwheel("index", vectors_file, tmp_path / "out", *GRAPH, "--invalid", "drop", "--json")
    assert result.json["dropped"] == 2
    rows = np.load(result.json["rows"], allow_pickle=False)
    assert measure_self_recall(tmp_path / "out", vectors[rows]) > 0.99
    assert not set(rows) & {5, 700}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{vectors}"], 2, "needs VECTORS and OUT"),
        (["none.npy", "{out}"], 1, "there is no file none.npy"),
        (["{vectors}", "{folder}"], 2, "is a folder"),
        (["{vectors}", "{folder}/a/b"], 2, "there is no folder"),
        (["{vectors}", "{vectors}"], 2, "is one of the vector files"),
        (["{vectors}", "{out}", "--index", "HNSW8,PQ"], 2, "HNSW8,PQ"),
        (["{vectors}", "{out}", "--index", "IVF4,PQ5"], 2, "PQ5"),
        (["{vectors}", "{out}", "--memory", "much"], 2, "not an amount of memory"),
        (["{vectors}", "{out}", "--memory", "1MB", "--index", "HNSW8"], 1, "1 MB are available: add memory"),
        (["{vectors}", "{out}", "--recall", "1.5"], 2, "recall_target is 1.5"),
        (["{vectors}", "{out}", "--questions", "{vectors}", "--questions", "none.npy"], 2, "questions"),
        (["{vectors}", "{out}", "--column", "a", "--nonsense"], 2, "nonsense"),
        (["{vectors}", "{out}", "--", "--runner=Nope"], 2, "no runner Nope"),
        (["--plan"], 2, "--plan needs --n and --d"),
        (["--plan", "--n", "1000", "-d", "9", "--index", "Impact"], 2, "--d is 9, but Impact has no dimension"),
    ],
)
def test_invalid_arguments_fail_with_one_sentence(
    arguments: list[str], code: int, message: str, vectors_file: Path, bookwheel: Any, tmp_path: Path
) -> None:
    paths = {"vectors": vectors_file, "out": tmp_path / "out", "folder": tmp_path}
    result = bookwheel("index", *(word.format(**paths) for word in arguments))
    assert (result.code, message in result.complaint) == (code, True), result.err
    assert not (tmp_path / "out").exists()


def test_insufficient_disk_is_reported_before_the_build(
    vectors_file: Path, tmp_path: Path, executable: Path, build_disk_prefix: Callable[[str, Path], list[str]]
) -> None:
    command = [executable, "index", vectors_file, tmp_path / "out", "--work", tmp_path / "small", *GRAPH]
    result = subprocess.run(
        [*build_disk_prefix("100k", tmp_path / "small"), *command], check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "of disk in" in result.stderr
    assert "cut" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_impossible_disk_requirement_leaves_no_files(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceError, match=f"of disk in {tmp_path}"),
        open_work_store(tmp_path / "out", None, 10**18, 0),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_foreign_work_folder_is_kept(vectors_file: Path, bookwheel: Any, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "thesis.tex").write_text("years of work")
    result = bookwheel("index", vectors_file, tmp_path / "out", *GRAPH)
    assert result.code == 2
    assert "out.work exists and is not a work folder" in result.complaint
    assert (tmp_path / "out.work" / "thesis.tex").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("stage", "records", "beam"),
    [
        ("cut", 1, []),
        ("scatter", 1, [IN_PROCESS]),
        ("shard", 1, ["--direct_num_workers=1"]),
        ("shard", 3, []),
    ],
)
def test_killed_run_resumes_to_the_same_file(
    stage: str, records: int, beam: list[str], vectors_file: Path, graph_bytes: bytes, bookwheel: Any, tmp_path: Path
) -> None:
    """The run is killed when a stage has a number of records: between shards, and (in the last case) in the merge."""
    out, memo = tmp_path / "out", tmp_path / "out.work" / "memo"
    process = ForkedCommand(["index", str(vectors_file), str(out), *GRAPH, "--", *beam], tmp_path)
    wait_until(lambda: len(list((memo / stage).glob("*.json"))) >= records, lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    assert len(list((memo / stage).glob("*.json"))) >= records
    assert bookwheel("index", vectors_file, out, *GRAPH).code == 0
    assert out.read_bytes() == graph_bytes
    assert not (tmp_path / "out.work").exists()


def wait_until(condition: Callable[[], object], is_running: Callable[[], bool]) -> None:
    """Wait until `condition` is true; fail if the process ends before that."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        assert is_running(), "the process ended before the condition became true"
        time.sleep(0.002)


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("factory", ["HNSW8", "IVF64,PQ4", "Flat"])
def test_index_of_fewer_vectors_than_cells_or_lists(n: int, factory: str, bookwheel: Any, tmp_path: Path) -> None:
    vectors = np.eye(n, D, dtype=np.float32)
    vectors[n // 2] = 0
    np.save(tmp_path / "few.npy", vectors)
    command = ["index", tmp_path / "few.npy", tmp_path / "out", "--index", factory, "--shards", 8, "--metric", "l2"]
    result = bookwheel(*command, "--json")
    assert result.code == 0, result.err
    assert faiss.read_index(str(tmp_path / "out")).ntotal == n
    assert factory == "Flat" or result.json["notes"]


def test_plan_needs_no_vectors(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--n", 21015324, "-d", 768, "--memory", "30GB", "--json")
    assert result.code == 0, result.err
    assert result.json["factory"] == "HNSW32_SQ8"
    assert max(result.json["build_bytes"], result.json["search_bytes"]) <= 30 * 10**9
    assert (
        result.json["cpu_seconds"].keys() == result.json["stage_bytes"].keys() == {"train", "scatter", "shard", "merge"}
    )


def test_plan_includes_bytes_of_reranking_vectors(bookwheel: Any) -> None:
    command = ["index", "--plan", "--n", 40_000, "-d", 16, "--index", "IVF64,PQ4x4np,Refine(vectors)"]
    result = bookwheel(*command)
    assert "1 MB on disk in addition to the index, 32 bytes a passage" in result.out, result.err
    assert bookwheel(*command, "--json").json["beside_bytes"] == 40_000 * 32


@pytest.mark.parametrize(
    ("factory", "advice"),
    [("IVF8,SQ8,Refine(vectors)", "use Refine(SQfp16)"), ("HNSW8_SQ4,Refine(vectors)", "leave Refine(vectors) out")],
)
def test_index_file_cannot_rerank_with_separate_vectors(
    factory: str, advice: str, vectors_file: Path, bookwheel: Any, tmp_path: Path
) -> None:
    result = bookwheel("index", vectors_file, tmp_path / "out", "--index", factory)
    assert result.code == 2
    assert f"reranks with vectors outside the index file: {advice}" in result.complaint


def test_plan_that_does_not_fit_names_an_alternative(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--n", 21015324, "-d", 768, "--memory", "16GB", "--index", "HNSW32")
    assert result.code == 1
    assert "use IVF16384_HNSW32,PQ192np" in result.complaint


def test_plan_reads_the_size_of_a_vector_file(vectors_file: Path, bookwheel: Any, tmp_path: Path) -> None:
    result = bookwheel("index", vectors_file, tmp_path / "out", "--plan", "--index", "IVF8,SQ8")
    assert f"IVF8,SQ8 over {N:,} vectors of {D} dimensions" in result.out
    assert not (tmp_path / "out").exists()


def test_index_setting_does_not_apply_to_index_command(
    vectors_file: Path, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting `index` names an index of a snapshot, so it applies to `search` and not to the command `index`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text('index = "exact"\nquestions = "dev.csv"\nmetric = "l2"\n')
    monkeypatch.setenv("BOOKWHEEL_INDEX", "exact")
    result = bookwheel("index", vectors_file, tmp_path / "out", "--memory", "1GB", "--json")
    assert result.code == 0, result.err
    assert (result.json["factory"], result.json["metric"]) == ("HNSW32", "l2")


def test_index_setting_applies_to_search(
    library: Path, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text('index = "nothing"\n')
    result = bookwheel("search", "Who?", "--store", library)
    assert result.code != 0
    assert "nothing" in result.complaint
