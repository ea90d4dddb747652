"""The benchmark of DPR fine-tuning runs on a few examples and reports its measures."""

import json
from pathlib import Path

from rag_model.training.data.examples import Example
from tests.fixtures.benchmarks import run_benchmark


def test_dpr_benchmark_measures_before_and_after_training(tmp_path: Path, kings: list[Example]) -> None:
    rows = [
        {"question": example.question, "answers": example.answers, "context": example.positives[0].text}
        for example in kings[::2]
    ]
    (tmp_path / "triples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    passage = {"title": "A bookwheel", "text": "was a rotating desk."}
    (tmp_path / "passages.jsonl").write_text(json.dumps(passage) + "\n")
    sizes = ["--train", "6", "--dev", "2", "--test", "4", "--steps", "1", "--batch", "2", "--timed", "0"]
    files = ["--examples", tmp_path / "triples.jsonl", "--passages", tmp_path / "passages.jsonl"]
    report = json.loads(run_benchmark("bench_dpr.py", *sizes, *files, "--threads", "1", "--precision", "no"))
    assert [report[name] for name in ("train", "test", "corpus", "steps")] == [6, 4, 13, 1]
    for name in ("before", "after", "bm25"):
        assert report[name]["Success@5"] == [1.0, 1.0, 1.0]
    assert report["rise"]["Success@20"] == [0.0, 0.0, 0.0]
