"""The benchmarks of encoders run on small inputs and print the expected report."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig

from tests.benchmarks.gpu_day import embedding_rows
from tests.fixtures.benchmarks import run_benchmark
from tests.fixtures.tiny import save_cross_encoder


def test_embedding_on_a_gpu_is_measured_on_a_cpu_too() -> None:
    report = json.loads(run_benchmark("bench_embedding_gpu.py", "--passages", "16", "--windows", "2", "--no-cudnn"))
    assert report["passages_per_s"] > 0
    assert 0 < report["share_of_matmul"] < 1
    assert np.isclose(report["hours_for_wikipedia"], 21_015_324 / report["passages_per_s"] / 3600, rtol=0.02)
    assert [len(row) for row in embedding_rows([report])] == [4, 4]
    assert BertConfig().hidden_size == 768  # on a GPU the benchmark measures BERT-base


def test_embedding_is_measured_beside_sentence_transformers(minilm: Path, worker_threads: None) -> None:
    arguments = ["--texts", "6", "--rounds", "1", "--threads", "1", "--model", str(minilm)]
    report = json.loads(run_benchmark("bench_embedding.py", *arguments))
    assert (report["texts"], report["dim"]) == (6, 384)
    assert report["cosine_min"] >= 0.999


@pytest.mark.slow
def test_reranking_benchmark_measures_the_gain(tmp_path: Path) -> None:
    rows = [{"id": str(n), "title": "River", "text": f"the king was born in the city {n}."} for n in range(6)]
    query_rows = [{"question": "who was born?", "answers": [str(n)], "paragraph": str(n)} for n in range(3)]
    files = []
    for name, file_rows in (("paragraphs", rows), ("questions", query_rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in file_rows))
        files += [f"--{name}", str(tmp_path / f"{name}.jsonl")]
    model = save_cross_encoder(tmp_path / "cross")
    # No rounds, because measuring the speed of the peer takes long.
    sizes = ["--rounds", "0", "--threads", "1", "--max-questions", "3", "--depth", "6"]
    files += ["--passages", str(tmp_path / "paragraphs.jsonl")]
    quality = json.loads(run_benchmark("bench_rerank.py", "--model", model, *sizes, *files))
    assert quality["questions"] == 3
    assert set(quality["gold@5"]) == {"input", "reranked", "difference"}
