"""Measure one search on the command line beside bare scripts: CPU seconds and memory of the whole process.

`bookwheel search` of a small store of the demo's passages takes turns with two scripts that do only
the necessary: they import torch, encode the question, open the index with faiss and search it.
`script` loads the encoder like bookwheel, `transformers` like its users. `ratio` compares with the
CPU seconds of `script`, by the median of the rounds; the scripts open no store, verify no digest
and read no passage. Prints one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service_load import add_sample_options, load_sample, publish

from rag_model.store import Snapshot, Store
from rag_model.store.versions.manifest import QUESTION_ENCODER

QUESTION = "Who wrote Animal Farm?"
K = 5
SCRIPT = """
import sys
import torch, tokenizers, faiss
from pathlib import Path
from rag_model.encoders.encoder import Encoder
question_vectors = Encoder.load(Path(sys.argv[1]), "question").encode_questions([sys.argv[3]])
print(faiss.read_index(sys.argv[2]).search(question_vectors, int(sys.argv[4])))
"""
TRANSFORMERS = """
import sys
import torch, faiss
from transformers import AutoModel, PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1] + "/tokenizer.json")
model = AutoModel.from_pretrained(sys.argv[1]).eval()
with torch.inference_mode():
    hidden = model(torch.tensor([tokenizer(sys.argv[3])["input_ids"]]))[0]
    question_vectors = torch.nn.functional.normalize(hidden.mean(1)).numpy()
print(faiss.read_index(sys.argv[2]).search(question_vectors, int(sys.argv[4])))
"""
WATCHER = """
import os, sys
silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=silent), 0)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""  # it is small, since the kernel counts the memory of a parent in the peak of its child


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU time and memory of one process."""

    cpu_seconds: float
    peak_mb: float  # resident, mapped files included


def measure_command(command: list[str]) -> ProcessCost:
    """Run a command and measure its process; a failure ends the benchmark."""
    process = subprocess.run(
        [sys.executable, "-S", "-c", WATCHER, *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with exit status {process.returncode}: see its output above")
    seconds, kilobytes = map(float, process.stdout.split())
    return ProcessCost(seconds, kilobytes * 1024 / 1e6)


def list_commands(store: Path, folder: Path) -> dict[str, list[str]]:
    """Return three commands that answer the question."""
    program = str(Path(sys.executable).with_name("bookwheel"))
    with Snapshot.open(str(store), "latest") as snapshot:
        encoder, index = snapshot.folder(QUESTION_ENCODER), snapshot.path("index/hnsw.faiss")
        arguments = [str(encoder), str(index), QUESTION, str(K)]
    return {
        "bookwheel": [program, "search", QUESTION, "-k", str(K), "--store", str(store)],
        "script": [sys.executable, "-c", SCRIPT, *arguments],
        "transformers": [sys.executable, "-c", TRANSFORMERS, *arguments],
    }


def measure(ways: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    """Run each command once to fill the page cache, then all in turns; return the report."""
    for command in ways.values():
        measure_command(command)
    round_costs = [{name: measure_command(command) for name, command in ways.items()} for _ in range(rounds)]
    seconds = {name: [round(costs[name].cpu_seconds, 2) for costs in round_costs] for name in ways}
    return {
        "ratio": _median_ratio(seconds["script"], seconds["bookwheel"]),
        "times_script": _median_ratio(seconds["bookwheel"], seconds["script"]),
        "times_transformers": _median_ratio(seconds["bookwheel"], seconds["transformers"]),
        "cpu_seconds": {name: statistics.median(round_seconds) for name, round_seconds in seconds.items()},
        "peak_mb": {name: round(max(costs[name].peak_mb for costs in round_costs), 1) for name in ways},
        "rounds": seconds,
    }


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return round(statistics.median(first / second for first, second in zip(numerators, denominators, strict=True)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sample_options(parser, count=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows, vectors, _ = load_sample(options, Path(name))
        store = Path(name, "store")
        publish(Store.open(str(store), create=True), rows, vectors, Path(name, "work"))
        size = round(sum(file.stat().st_size for file in store.rglob("*") if file.is_file()) / 1e6, 1)
        report = {"benchmark": "cli", "passages": options.count, "store_mb": size}
        print(json.dumps({**report, **measure(list_commands(store, Path(name)), options.rounds)}))


if __name__ == "__main__":
    main()
