"""The benchmarks of indexes run on small inputs and print the expected report."""

import json
import os
import shlex
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.benchmarks import gpu_day
from tests.fixtures.benchmarks import FOLDER, run_benchmark


def report(name: str, *arguments: str | Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run_benchmark(name, *arguments))  # one line, or this fails
    return parsed


def test_bench_hnsw_by_cells(tmp_path: Path, worker_threads: None) -> None:
    tiny = ["--cells", "2", "--parts", "1", "--dim", "16", "--links", "4", "--questions", "40", "--k", "5"]
    scaling_report = report("bench_hnsw.py", "--sizes", "300,600", *tiny, "--plot", tmp_path / "scaling.svg")
    small, large = scaling_report["rows"]
    assert (small["n"], small["cells"], large["n"], large["cells"]) == (300, 1, 600, 2)
    for row in scaling_report["rows"]:
        actual = row["builds"]["ours"]
        assert row["cpu_ratio"] > 0
        assert {"train", "scatter", "shard", "merge"} == set(actual["stages"])
        assert actual["stages"]["shard"]["runs"] == row["shards"] == row["cells"]
        assert row["unreachable"] == 0
        assert row["shortfall_mean"] < 0.1
    assert [row["n"] for row in scaling_report["scaling"]] == [300, 600]
    assert ElementTree.parse(tmp_path / "scaling.svg").getroot().tag.endswith("svg")


def test_bench_plan_compares_estimates_with_a_build(worker_threads: None) -> None:
    plan_report = report("bench_plan.py", "--cases", "300x8,600x8", "--index", "HNSW8")
    assert [case["n"] for case in plan_report["cases"]] == [300, 600]
    assert all(case["stages"].keys() == {"train", "scatter", "shard", "merge"} for case in plan_report["cases"])
    assert plan_report["error"] >= 0
    assert plan_report["wikipedia"]["n"] == 21_015_324


def test_bench_hnsw_builds_with_and_without_an_added_dimension(worker_threads: None) -> None:
    tiny = ["--n", "300", "--cells", "2", "--parts", "1", "--dim", "16", "--questions", "20", "--k", "5"]
    hnsw_report = report("bench_hnsw.py", *tiny, "--norms", "0.5", "--augment")
    assert set(hnsw_report["recall_at_distances"]) == {"one_shot", "ours", "equal_norm"}


def test_benchmarks_of_graphs_take_passages(tmp_path: Path, worker_threads: None) -> None:
    words = ["river", "king", "physics", "opera", "football", "castle", "protein", "railway"]
    passages, questions = tmp_path / "passages.jsonl", tmp_path / "questions.jsonl"
    rows = [{"title": a, "text": f"{b} and {c}"} for a in words for b in words for c in words]
    passages.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    questions.write_text("".join(f"{json.dumps({'question': word})}\n" for word in words))
    common_arguments = ["--passages", passages, "--questions", questions, "--max-questions", "8", "--cache", tmp_path]
    updated = report(
        "bench_graph_updates.py",
        *common_arguments,
        *("--words", "3", "--n", "150", "--generations", "2", "--measure", "2", "--no-peer"),
        *("--rebuilds", "2"),
    )["bookwheel"]
    assert updated["unreachable"] == [0, 0]
    assert max(updated["shortfall_20"], *updated["rebuilt_shortfalls_20"]) < 3
    memory_report = report("bench_index_memory.py", *common_arguments, "--n", "150", "--k", "5", "--only", "HNSW8")
    assert memory_report["real"]
    assert memory_report["indexes"][0]["recall_mean"] > 0.9


def test_gpu_builds_an_index_like_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uses_path, day = tmp_path / "used", tmp_path / "day"
    paths = filter(None, [str(FOLDER.parent / "fixtures" / "simulated_gpu"), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("SIMULATED_GPU", str(uses_path))
    index = "--vectors 2600 --dim 16 --cells 2 --parts 1 --questions 40 --k 5 --factory HNSW8 IVF16,PQ4np"
    arguments = ["gpu_day.py", "--out", str(day), "--only", "index", "--options", f"index={index}"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_error:
        gpu_day.main()
    assert exit_error.value.code == 0
    recorded = json.loads((day / "index.json").read_text())
    (index_report,) = recorded["reports"]
    assert index_report["device"] != "cpu"
    for factory in index_report["indexes"]:
        gpu, cpu = factory["gpu"], factory["cpu"]
        assert gpu["recall"] == cpu["recall"] > 0.5  # the fake GPU computes on the CPU
        assert gpu["hours_for_wikipedia"].keys() == gpu["gpu_mb"].keys() == cpu["seconds"].keys()
    uses = uses_path.read_text().splitlines()
    assert uses.count("graph on 0") == 2  # one for each cell, and none where the GPU is hidden
    # K-means, the losses and the part are one task each, so they use one GPU of the two.
    assert uses.count("centroids on 0") == 3
    assert len(uses) == 5  # the merge builds the upper levels without a GPU
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert {len(row) for row in rows} == {5}  # the columns of docs/benchmarks.md
    assert len(rows) == 2 + (4 + 1) + (3 + 1)
    assert [row[0] for row in rows if "recall@5" in row[0]] == ["| its recall@5"] * 2
    assert "failed" not in (day / "report.md").read_text()
    for options, expected in ((f"{index} --metric l2", None), (index, recorded)):
        (step,) = [step for step in gpu_day.list_steps(0, {}, {"index": options}) if step.name == "index"]
        assert gpu_day.find_result(step, day) == expected
    (day / "index.json").write_text('{"half')  # as left by a run that was killed while writing
    assert gpu_day.find_result(step, day) is None


@pytest.mark.parametrize(("name", "n_rows"), [("training-bf16", 1), ("decoding", 2)])
def test_steps_of_training_and_decoding_have_rows(name: str, n_rows: int, worker_threads: None) -> None:
    (step,) = [step for step in gpu_day.list_steps(0, {}, {}) if step.name == name]
    output = run_benchmark(step.script, *shlex.split(step.options))
    rows = list(step.rows([json.loads(line) for line in output.splitlines()]))
    assert [len(row) for row in rows] == [4] * n_rows
    assert ["precision bf16" in row[0] for row in rows] == [name == "training-bf16"] * n_rows


# This interpreter of an environment claims a GPU like a worker, and waits until each process has one.
CLAIMING_PYTHON = """#!{python}
import json, os, sys, time
from pathlib import Path
from rag_model.process import claim_gpu

if sys.argv[-1] == "--environment":
    print(json.dumps({{"torch": "{torch}", "device": "cpu"}}))
    sys.exit()
visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
gpu = claim_gpu(len(visible))
Path("{folder}", visible[gpu] + str(len(visible)) + "-" + str(os.getpid())).touch()
while len(list(Path("{folder}").glob("*" + str(len(visible)) + "-*"))) < len(visible):
    time.sleep(0.02)
report = dict.fromkeys(("layers", "hidden", "batch_tokens", "matmul_tflops", "share_of_matmul", "overlap"), 1)
report |= dict.fromkeys(("passages_per_s", "transformers_per_s", "from_text_per_s", "peak_gpu_mb"), 100)
print(json.dumps({{"benchmark": "embedding_gpu", "dtype": "bfloat16", "torch": "{torch}", "gpu": gpu, **report}}))
"""


def test_each_of_several_gpus_encodes_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, claims, day = tmp_path / "python", tmp_path / "claims", tmp_path / "day"
    python.write_text(CLAIMING_PYTHON.format(python=sys.executable, folder=claims, torch="2.12.1"))
    python.chmod(0o755)
    claims.mkdir()
    day.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f")
    steps = [step for step in gpu_day.list_steps(6, {}, {}) if step.name.startswith("embedding-gpus")]
    assert [(step.name, step.processes) for step in steps] == [(f"embedding-gpus-{n}", n) for n in (2, 4, 6)]
    steps = [replace(step, python=str(python)) for step in steps]
    results = {step.name: gpu_day.record_step(step, day) for step in steps}
    for step, gpus in zip(steps, ("ab", "abcd", "abcdef"), strict=True):  # each process has one of the first GPUs
        assert sorted(path.name[4] for path in claims.glob(f"*{step.processes}-*")) == list(gpus)
        assert gpu_day.find_result(step, day) == results[step.name]
    gpu_day.write_tables(steps, results, day)
    rows = (day / "rows.md").read_text().splitlines()[2::2]
    assert [row.split(" | ")[1].split(",")[0] for row in rows] == ["200 passages/s", "400 passages/s", "600 passages/s"]
    assert ["processes on 4 GPUs" in row for row in rows] == [False, True, False]
    result = results["embedding-gpus-2"]
    assert result is not None
    with pytest.raises(ValueError, match="used GPUs"):  # a GPU that another process had claimed
        list(gpu_day.embedding_rows([result["reports"][0]] * 2))


def test_another_environment_encodes_with_its_torch(tmp_path: Path) -> None:
    python = tmp_path / "python"
    environments = {}
    for torch in ("2.11.0", "2.12.1"):
        python.write_text(CLAIMING_PYTHON.format(python=sys.executable, folder=tmp_path, torch=torch))
        python.chmod(0o755)
        environments[torch] = gpu_day.read_environment(str(python))
    first, second = (
        next(step for step in gpu_day.list_steps(0, {str(python): environment}, {}) if step.python == str(python))
        for environment in environments.values()
    )
    assert (first.name, second.name) == ("embedding-torch-2.11.0", "embedding-torch-2.12.1")
    same_torch = gpu_day.list_steps(0, dict.fromkeys("ab", environments["2.11.0"]), {})
    assert [step.name for step in same_torch if step.python in "ab"] == [first.name, f"{first.name}-2"]
    second = replace(second, processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        result = gpu_day.record_step(second, tmp_path)
    assert result is not None
    assert result["environment"] == environments["2.12.1"]
    assert gpu_day.find_result(second, tmp_path) == result
    renamed = replace(second, environment=environments["2.11.0"])  # the environment has another torch now
    assert gpu_day.find_result(renamed, tmp_path) is None
    with pytest.raises(ValueError, match="give an interpreter that has torch"):
        gpu_day.read_environment(str(tmp_path / "none"))


def test_bench_gpu_index_measures_the_core_alone_without_a_gpu(worker_threads: None) -> None:
    tiny = ["--vectors", "600", "--dim", "16", "--parts", "1", "--questions", "20", "--k", "5", "--factory", "HNSW8"]
    gpu_report = report("bench_gpu_index.py", *tiny)
    assert (gpu_report["device"], gpu_report["graphs_on_the_gpu"]) == ("cpu", False)
    (index,) = gpu_report["indexes"]
    assert index["gpu"] is None
    assert index["cpu"]["gpu_mb"] is None
    assert index["cpu"]["recall"] > 0.9
    assert index["cpu"]["hours_for_wikipedia"]["shard"] > 0


def test_watch_counts_a_repeated_stage_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    stage_names = list[str]()
    watch = import_module("stages").Watch(os.getsid(0), lambda stage, seconds: stage_names.append(stage))
    try:
        lines = ["deltas …", "deltas done, 1.0 s", "gate …", "gate done, 2.0 s", "deltas …", "deltas done, 3.0 s"]
        watch.read(_slowly(line, watch) for line in lines)
    finally:
        stages = watch.stop()
    assert stage_names == ["deltas", "gate", "deltas 2"]
    assert stages.keys() == {"outside", "deltas", "gate", "deltas 2"}


def _slowly(line: str, watch: Any) -> str:
    """Return a line once the watcher has looked at the stage of the line before."""
    while watch._stage not in watch.stages:
        time.sleep(0.01)
    return line


def test_bench_index_search_compares_with_faiss(worker_threads: None) -> None:
    tiny = ["--n", "600", "--dim", "16", "--cells", "2", "--links", "4", "--questions", "40", "--k", "5"]
    search_report = report("bench_index_search.py", *tiny, "--rounds", "2")
    assert min(search_report["recall"].values()) >= 0.95
    assert search_report["ratio"]["batch"] > 0
    assert len(search_report["rounds"]["ours"]) == 2


def test_bench_index_memory_projects_memory_and_measures_recall(tmp_path: Path, worker_threads: None) -> None:
    table, kinds = tmp_path / "table.md", ["Flat", "HNSW8_SQ8", "IVF,RaBitQ4,Refine(vectors)"]
    tiny = ["--n", "1200", "--dim", "32", "--max-questions", "20", "--k", "5", "--markdown", table]
    flat, graph, lists = report("bench_index_memory.py", *tiny, "--only", *kinds)["indexes"]
    assert flat["index_gb"] == pytest.approx(4 * 768 * 21_015_324 / 1e9, abs=0.1)
    assert flat["recall_mean"] == 1
    assert flat["index_gb"] > graph["index_gb"] > lists["index_gb"]
    assert lists["vectors_on_disk_gb"] > 0
    assert len(table.read_text().splitlines()) == 2 + len(kinds)


def test_bench_small_memory_measures_each_size() -> None:
    tiny = ["--sizes", "600", "1200", "--dim", "32", "--max-questions", "20", "--k", "5"]
    tiny += ["--cold", "1", "--threads", "1", "--peers", "600"]
    (index,) = report("bench_small_memory.py", *tiny)["indexes"].values()
    assert [row["index"] for row in index["rows"]] == ["RR32,IVF8,RaBitQ", "RR32,IVF16,RaBitQ"]
    for row in index["rows"]:
        assert row["max_recall"] >= row["recall"] > 0.9
        assert row["row_reads"] == 50
    assert [peer["recall"] < 1 for peer in index["rows"][0]["plain_faiss"]] == [True, True]
    assert "plain_faiss" not in index["rows"][1]
    assert index["fit"]["codes"]["at_wikipedia"] > index["rows"][-1]["codes"]


def test_bench_maxsim_compares_codecs_and_candidates(tmp_path: Path) -> None:
    words = ["river", "king", "physics", "opera", "football", "castle"]
    passages, questions = tmp_path / "passages.jsonl", tmp_path / "questions.jsonl"
    rows = [{"id": f"{a}{b}", "title": a, "text": f"the {b} of the {a}, and of the {b}"} for a in words for b in words]
    passages.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    query_rows = [{"question": f"{a} of {b}", "paragraph": f"{a}{b}"} for a, b in pairwise(words)]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in query_rows))
    common_arguments = ["--passages", passages, "--questions", questions, "--cache", tmp_path / "cache"]
    maxsim_report = report(
        "bench_maxsim.py", *common_arguments, "--depths", "10", "20", "--codecs", "MaxSim,Bits2", "MaxSim,PQ32"
    )
    assert (maxsim_report["passages"], maxsim_report["questions"]) == (36, 5)
    assert maxsim_report["codecs"]["MaxSim,Bits2"]["error_ratio"] == 1
    assert maxsim_report["codecs"]["MaxSim,PQ32"]["code_bytes"] == 32
    assert {"all", "dense alone", "depth 20, rounds 1"} < maxsim_report["candidates"].keys()
    assert maxsim_report["candidates"]["depth 20, rounds 1"]["of_the_best_10"] > 0.5
    assert 0.5 <= maxsim_report["pooled"]["2"]["vectors"] < 0.6
    muvera_report = report("bench_muvera.py", *common_arguments, "--bits", "2", "--indexes", "Flat", "HNSW8")
    assert muvera_report["components"] == 10 * 4 * 16
    assert muvera_report["indexes"]["HNSW8"]["found_in_100"] == muvera_report["indexes"]["Flat"]["found_in_100"] == 1


def test_bench_sparse_compares_with_a_product_of_matrices(worker_threads: None) -> None:
    limits = ["--max-questions", "9", "--rounds", "1", "--parts", "3", "-k", "5"]
    sparse_report = report("bench_sparse.py", "--count", "500", "--terms", "20", "--question-terms", "12", *limits)
    assert sparse_report["ratio"] > 0
    assert (sparse_report["n"], sparse_report["questions"], sparse_report["model"]) == (500, 9, False)
    assert sparse_report["scores_are_equal"]
    assert sparse_report["merged_is_one_shot"]
    assert sparse_report["bytes_per_passage"] > sparse_report["bytes_per_passage_one_bit"]
