"""Measure the first word of a streamed answer: `bookwheel serve --reader concat` beside the bare model.

Each question is sent to the service; then its prompt is given to the model alone, by the same
writer in this process. `ratio` is the service's median time to the first word over that of the bare
model. The service's time also includes HTTP, encoding, the search and the events. Prints one JSON
line. By default the model is a Llama of 6 layers with random weights, and passages and questions
are the demo's; the full measurement is

    python tests/benchmarks/bench_stream.py --model FOLDER --passages passages.jsonl.xz --questions a.jsonl.xz
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch
from service_load import K, add_sample_options, cpu_seconds, load_sample, memory_mb, publish, service
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from flows.demo import demo_encoder
from rag_model.encoders.files import resolve_folder
from rag_model.errors import StoppedError
from rag_model.reading.model import open_reader
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.writer import Prompt
from rag_model.store import Snapshot, Store

_WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}  # like the service
_REST = 0.1  # seconds between two readings of the service's CPU time


@dataclass(frozen=True, slots=True)
class FirstWord:
    """Latencies of one question, in milliseconds."""

    passages: float
    word: float
    bare: float  # until the first word of the bare model


def write_random_llama(folder: Path) -> Path:
    """Write a Llama of 6 layers over the demo encoder's tokens."""
    set_seed(1)
    config = LlamaConfig(
        vocab_size=30_522,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=4096,
        bos_token_id=101,
        eos_token_id=102,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(resolve_folder(demo_encoder()) / "tokenizer.json", folder)
    special = {"bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


def time_stream(address: str, question: str) -> tuple[float, float]:
    """Return the milliseconds to the passages and to the first word, then disconnect, so that the service stops."""
    connection = HTTPConnection(address)
    start, passages = time.perf_counter(), 0.0
    body = json.dumps({"questions": [question], "k": K, "stream": True})
    connection.request("POST", "/answer", body, {"Content-Type": "application/json", "Host": "localhost"})
    reply = connection.getresponse()
    while line := reply.readline():
        if line.startswith(b"event: passages"):
            passages = (time.perf_counter() - start) * 1e3
        if line.startswith((b"event: text", b"event: answer")):
            word = (time.perf_counter() - start) * 1e3
            reply.close()
            connection.close()
            return passages, word
    raise SystemExit(f"the stream ended without a word (status {reply.status})")


def time_bare_model(writer: Any, prompt: Prompt) -> float:
    """Return the milliseconds to the first word that a model generates from a prompt."""
    word_times: list[float] = []
    start = time.perf_counter()
    with suppress(StoppedError):
        writer.write([prompt], lambda: bool(word_times), lambda _, text: word_times.append(time.perf_counter()))
    return (word_times[0] - start) * 1e3 if word_times else (time.perf_counter() - start) * 1e3


def wait_until_idle(process: int) -> None:
    """Wait until the service has stopped generating the abandoned answer, so that it does not slow the bare model."""
    previous_seconds = -1.0
    while (current_seconds := cpu_seconds(process)) > previous_seconds + 0.01:
        previous_seconds = current_seconds
        time.sleep(_REST)


def measure(folder: Path, model: Path, questions: Sequence[str]) -> dict[str, Any]:
    """Ask the service and the bare model each question in turn; return the report."""
    settings, latencies = ReaderSettings("concat"), []
    options = ("--model", str(model), "--reader", "concat", "--poll", "60")
    with (
        Snapshot.open(str(folder / "store")) as snapshot,
        service(str(folder / "store"), folder / "dest", *options) as (address, process),
    ):
        reader: Any = open_reader(snapshot, str(folder / "store"), str(model), None, settings)[1]
        prompts = [reader.build_prompt(q, reader.build_context(q, hits)) for q, hits in _retrieve(reader, questions)]
        time_bare_model(reader.writer, prompts[0])
        time_stream(address, questions[0])  # warm-up
        for question, prompt in zip(questions, prompts, strict=True):
            passages, word = time_stream(address, question)
            wait_until_idle(process)
            latencies.append(FirstWord(passages, word, time_bare_model(reader.writer, prompt)))
        peak = memory_mb(process, "VmHWM")
        tokens = statistics.median(reader.writer.count_tokens([prompt.user for prompt in prompts]))
    return {
        "benchmark": "stream",
        "questions": len(questions),
        "prompt_tokens": tokens,
        "ratio": round(_compute_median(latencies, "word") / _compute_median(latencies, "bare"), 3),
        "first_word_ms": _compute_median(latencies, "word"),
        "bare_first_word_ms": _compute_median(latencies, "bare"),
        "passages_ms": _compute_median(latencies, "passages"),
        "ratios": [round(latency.word / latency.bare, 2) for latency in latencies],
        "threads": torch.get_num_threads(),
        "peak_mb": peak,
    }


def _retrieve(reader: Any, questions: Sequence[str]) -> list[tuple[str, Any]]:
    return list(zip(questions, reader.retriever.search(questions, K), strict=True))


def _compute_median(latencies: Sequence[FirstWord], name: str) -> float:
    return round(statistics.median(float(getattr(latency, name)) for latency in latencies), 1)


def main() -> None:
    if not _WAITS.items() <= os.environ.items():  # libraries read these variables when they are loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_WAITS})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sample_options(parser, count=300)
    parser.set_defaults(max_questions=10)
    parser.add_argument("--model", type=Path, help="a folder of a generator; by default one of random weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows, vectors, questions = load_sample(options, Path(name))
        publish(Store.open(f"{name}/store", create=True), rows, vectors, Path(name, "work"))
        if options.model is None:
            Path(name, "llama").mkdir()
        model = options.model or write_random_llama(Path(name, "llama"))
        print(json.dumps(measure(Path(name), model, questions)))


if __name__ == "__main__":
    main()
