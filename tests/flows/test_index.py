"""`bookwheel index`: anyone's vectors become a file that plain faiss reads, whatever happens on the way."""

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
    drawn = np.random.default_rng(1).standard_normal((N, D)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.fixture
def given(vectors: Any, tmp_path: Path) -> Path:
    np.save(tmp_path / "vectors.npy", vectors)
    return tmp_path / "vectors.npy"


@pytest.fixture(scope="module")
def whole(vectors: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The graph of all vectors, built in one go."""
    out = tmp_path_factory.mktemp("whole") / "index"
    build_index(vectors, out, IndexRecipe("HNSW8", cells=3, ef_construction=40))
    return out.read_bytes()


def found(out: Path, vectors: Any) -> float:
    """Return the share of vectors that find themselves."""
    index = faiss.read_index(str(out))
    assert (index.ntotal, index.d) == (len(vectors), D)
    return float((index.search(vectors, 1)[1][:, 0] == np.arange(len(vectors))).mean())


def test_a_graph_of_shards(given: Path, vectors: Any, bookwheel: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.faiss"
    made = bookwheel("index", given, out, *GRAPH, "--metric", "ip", "--recall", "0.9", "--json")
    assert made.code == 0, made.err
    assert made.json | {"factory": "HNSW8", "metric": "ip", "n": N, "d": D, "cells": 3, "dropped": 0} == made.json
    assert found(out, vectors) > 0.99
    assert made.json["bytes"] == out.stat().st_size
    assert faiss.read_index(str(out)).hnsw.efSearch == made.json["search"]["efSearch"]
    assert made.json["health"]["unreachable"] == 0
    recalls = [effort["recall_mean"] for effort in made.json["curve"]]
    assert recalls == sorted(recalls)
    assert recalls[-1] > 0.99
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.faiss", "vectors.npy"]


def test_words_for_people(given: Path, bookwheel: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "questions.npy", np.load(given, allow_pickle=False)[:40] + 0.01)
    result = bookwheel(
        "index", given, tmp_path / "out", "--index", "IVF8,SQ8", "--questions", tmp_path / "questions.npy"
    )
    assert result.code == 0, result.err
    for words in ("IVF8,SQ8 (ip)", f"{N:,} of {D} dimensions", "nprobe", "measured with 40 questions", "recall@20"):
        assert words in result.out


def test_without_a_factory_the_best_that_fits_is_built(given: Path, bookwheel: Any, tmp_path: Path) -> None:
    assert bookwheel("index", given, tmp_path / "out", "--memory", "1GB", "--json").json["factory"] == "HNSW32"


def test_parts_in_parquet_give_the_bytes_of_one_array(
    vectors: Any, whole: bytes, bookwheel: Any, tmp_path: Path
) -> None:
    (folder := tmp_path / "parts").mkdir()
    for number, part in enumerate(np.split(vectors, [100, 900])):
        table = pa.table({"id": pa.array(range(len(part))), "embedding": pa.array(list(part))})
        pq.write_table(table, folder / f"part-{number}.parquet")
    assert bookwheel("index", folder, tmp_path / "out", *GRAPH).code == 0
    assert (tmp_path / "out").read_bytes() == whole


def test_rows_that_are_no_vectors(given: Path, vectors: Any, bookwheel: Any, tmp_path: Path) -> None:
    holed = vectors.copy()
    holed[[5, 700]] = np.nan
    np.save(given, holed)
    result = bookwheel("index", given, tmp_path / "out", *GRAPH)
    assert result.code == 1
    assert result.complaint.startswith(f"row 5 of {given} holds a NaN or an infinity")
    result = bookwheel("index", given, tmp_path / "out", *GRAPH, "--invalid", "drop", "--json")
    assert result.json["dropped"] == 2
    rows = np.load(result.json["rows"], allow_pickle=False)
    assert found(tmp_path / "out", vectors[rows]) > 0.99
    assert not set(rows) & {5, 700}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{given}"], 2, "needs VECTORS and OUT"),
        (["none.npy", "{out}"], 1, "there is no file none.npy"),
        (["{given}", "{folder}"], 2, "is a folder"),
        (["{given}", "{folder}/a/b"], 2, "there is no folder"),
        (["{given}", "{given}"], 2, "is one of the vector files"),
        (["{given}", "{out}", "--index", "HNSW8,PQ"], 2, "HNSW8,PQ"),
        (["{given}", "{out}", "--index", "IVF4,PQ5"], 2, "PQ5"),
        (["{given}", "{out}", "--memory", "much"], 2, "not an amount of memory"),
        (["{given}", "{out}", "--memory", "1MB", "--index", "HNSW8"], 1, "1 MB are available: add memory"),
        (["{given}", "{out}", "--recall", "1.5"], 2, "recall_target is 1.5"),
        (["{given}", "{out}", "--questions", "{given}", "--questions", "none.npy"], 2, "questions"),
        (["{given}", "{out}", "--column", "a", "--nonsense"], 2, "nonsense"),
        (["{given}", "{out}", "--", "--runner=Nope"], 2, "no runner Nope"),
        (["--plan"], 2, "--plan needs --n and --d"),
        (["--plan", "--n", "1000", "-d", "9", "--index", "Impact"], 2, "--d is 9, but Impact has no dimension"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: list[str], code: int, says: str, given: Path, bookwheel: Any, tmp_path: Path
) -> None:
    places = {"given": given, "out": tmp_path / "out", "folder": tmp_path}
    result = bookwheel("index", *(word.format(**places) for word in words))
    assert (result.code, says in result.complaint) == (code, True), result.err
    assert not (tmp_path / "out").exists()


def test_too_little_disk_is_said_before_the_work(
    given: Path, tmp_path: Path, executable: Path, on_a_disk_of: Callable[[str, Path], list[str]]
) -> None:
    command = [executable, "index", given, tmp_path / "out", "--work", tmp_path / "small", *GRAPH]
    result = subprocess.run(
        [*on_a_disk_of("100k", tmp_path / "small"), *command], check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "of disk in" in result.stderr
    assert "cut" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_more_disk_than_any_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceError, match=f"of disk in {tmp_path}"),
        open_work_store(tmp_path / "out", None, 10**18, 0),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_work_folder_that_is_somebody_elses(given: Path, bookwheel: Any, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "thesis.tex").write_text("years of work")
    result = bookwheel("index", given, tmp_path / "out", *GRAPH)
    assert result.code == 2
    assert "out.work exists and is not a work folder" in result.complaint
    assert (tmp_path / "out.work" / "thesis.tex").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("stage", "records", "beam"),
    [
        ("cut", 1, ()),
        ("scatter", 1, (IN_PROCESS,)),
        ("shard", 1, ("--direct_num_workers=1",)),
        ("shard", 3, ()),
    ],
)
def test_a_run_killed_goes_on_and_ends_the_same(
    stage: str,
    records: int,
    beam: tuple[str, ...],
    given: Path,
    whole: bytes,
    bookwheel: Any,
    tmp_path: Path,
) -> None:
    """Killed once so many records of a stage are there: between shards, and in the merge, the last of them."""
    out, memo = tmp_path / "out", tmp_path / "out.work" / "memo"
    running = ForkedCommand(["index", str(given), str(out), *GRAPH, "--", *beam], tmp_path)
    until(lambda: len(list((memo / stage).glob("*.json"))) >= records, lambda: running.poll() is None)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert not out.exists()
    assert len(list((memo / stage).glob("*.json"))) >= records
    assert bookwheel("index", given, out, *GRAPH).code == 0
    assert out.read_bytes() == whole
    assert not (tmp_path / "out.work").exists()


def until(condition: Callable[[], object], still: Callable[[], bool]) -> None:
    """Return once `condition` holds; fail when it cannot any more."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "not seen in time"
        assert still(), "not seen before the process ended"
        time.sleep(0.002)


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("factory", ["HNSW8", "IVF64,PQ4", "Flat"])
def test_fewer_vectors_than_cells_or_lists(n: int, factory: str, bookwheel: Any, tmp_path: Path) -> None:
    few = np.eye(n, D, dtype=np.float32)
    few[n // 2] = 0
    np.save(tmp_path / "few.npy", few)
    command = ["index", tmp_path / "few.npy", tmp_path / "out", "--index", factory, "--shards", 8, "--metric", "l2"]
    result = bookwheel(*command, "--json")
    assert result.code == 0, result.err
    assert faiss.read_index(str(tmp_path / "out")).ntotal == n
    assert factory == "Flat" or result.json["notes"]


def test_planning_needs_no_vectors(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--n", 21015324, "-d", 768, "--memory", "30GB", "--json")
    assert result.code == 0, result.err
    assert result.json["factory"] == "HNSW32_SQ8"
    assert max(result.json["build_bytes"], result.json["search_bytes"]) <= 30 * 10**9
    assert (
        result.json["cpu_seconds"].keys() == result.json["stage_bytes"].keys() == {"train", "scatter", "shard", "merge"}
    )


def test_a_plan_says_what_the_vectors_beside_an_index_take(bookwheel: Any) -> None:
    command = ["index", "--plan", "--n", 40_000, "-d", 16, "--index", "IVF64,PQ4x4np,Refine(vectors)"]
    result = bookwheel(*command)
    assert "1 MB on disk in addition to the index, 32 bytes a passage" in result.out, result.err
    assert bookwheel(*command, "--json").json["beside_bytes"] == 40_000 * 32


@pytest.mark.parametrize(
    ("factory", "advice"),
    [("IVF8,SQ8,Refine(vectors)", "use Refine(SQfp16)"), ("HNSW8_SQ4,Refine(vectors)", "leave Refine(vectors) out")],
)
def test_an_index_file_cannot_count_on_vectors_beside_it(
    factory: str, advice: str, given: Path, bookwheel: Any, tmp_path: Path
) -> None:
    result = bookwheel("index", given, tmp_path / "out", "--index", factory)
    assert result.code == 2
    assert f"reranks with vectors outside the index file: {advice}" in result.complaint


def test_a_plan_that_cannot_fit_names_one_that_would(bookwheel: Any) -> None:
    result = bookwheel("index", "--plan", "--n", 21015324, "-d", 768, "--memory", "16GB", "--index", "HNSW32")
    assert result.code == 1
    assert "use IVF16384_HNSW32,PQ192np" in result.complaint


def test_vectors_can_be_planned_for(given: Path, bookwheel: Any, tmp_path: Path) -> None:
    result = bookwheel("index", given, tmp_path / "out", "--plan", "--index", "IVF8,SQ8")
    assert f"IVF8,SQ8 over {N:,} vectors of {D} dimensions" in result.out
    assert not (tmp_path / "out").exists()


def test_settings_name_no_factory(given: Path, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`index` in settings is an index of a snapshot: for `search`, not for the verb of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text('index = "exact"\nquestions = "dev.csv"\nmetric = "l2"\n')
    monkeypatch.setenv("BOOKWHEEL_INDEX", "exact")
    made = bookwheel("index", given, tmp_path / "out", "--memory", "1GB", "--json")
    assert made.code == 0, made.err
    assert (made.json["factory"], made.json["metric"]) == ("HNSW32", "l2")


def test_settings_name_an_index_for_search(
    library: Path, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text('index = "nothing"\n')
    result = bookwheel("search", "Who?", "--store", library)
    assert result.code != 0
    assert "nothing" in result.complaint
