"""One small model twice: behind llama.cpp's server, and in memory by torch; the same questions, passages and prompts.

Natural Questions with short answers over a library of their contexts and others (`cited_questions`). MiniLM finds k
passages once; `--reader concat` writes an answer from them by `openai:MODEL` and by the local generator, in turns,
question by question, greedily, one thread each. CPU seconds of an answer are the server process's and the client's, or
this process's: seconds of the clock are told too, but on shared cores they are the neighbours'. `ratio` is the CPU
seconds in memory by those behind the server. EM, F1 and answers that hold a gold answer with 95 % intervals, tokens
read and written as each side counts them, and the share of equal answers: llama.cpp multiplies by Q4_1 as stored, torch
by the same weights in bfloat16, so that long answers part. A table, then one JSON line.

    python tests/benchmarks/bench_llama.py --data FOLDER --model FOLDER_OF_A_GGUF [--asked 60]

The server is that of the package xllamacpp, started by `tests/fixtures/llama_launcher.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from cited_questions import draw
from paper_answers import publish
from served import cpu_seconds, memory_mb

from flows.demo import demo_encoder
from rag_model.endpoint import Endpoint
from rag_model.evaluation.bootstrap import Estimate, estimate_difference, estimate_mean
from rag_model.evaluation.measures.answers import exact_match, token_f1
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import answer_matcher
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.reading.answer import Answer
from rag_model.reading.concat import ConcatReader
from rag_model.reading.writers.chat_settings import ChatSettings
from rag_model.reading.writers.endpoint import EndpointWriter
from rag_model.reading.writers.local import LocalWriter
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.store.versions.snapshot import Snapshot

_LAUNCHER = Path(__file__).parents[1] / "fixtures" / "llama_launcher.py"
_CONTEXT = 4096  # tokens
_SIDES = ("llama.cpp", "torch")


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer, and what it took."""

    answer: Answer
    cpu: float  # seconds
    wall: float


@contextmanager
def server(model: Path) -> Iterator[tuple[str, int]]:
    """Serve the GGUF file of a folder with one slot and one thread; gives the base URL and the process."""
    files = sorted(model.glob("*.gguf"))
    if not files:
        raise SystemExit(f"{model} has no GGUF file: give a folder with one")
    command = [sys.executable, str(_LAUNCHER), "--model", str(files[0]), "--port", "0", "--ctx-size", str(_CONTEXT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip().rstrip("/")
        while httpx.get(f"{address}/health").status_code != 200:
            time.sleep(0.2)
        yield f"{address}/v1", process.pid
    finally:
        process.terminate()
        process.wait()


def asked(reader: ConcatReader, question: Question, hits: Sequence[Hit], process: int | None) -> Asked:
    """Answer one question; the CPU seconds of another process count too."""
    before = time.process_time() + (cpu_seconds(process) if process else 0.0)
    began = time.perf_counter()
    answer = reader.answer_from([question.text], [hits])[0]
    wall = time.perf_counter() - began
    return Asked(answer, time.process_time() + (cpu_seconds(process) if process else 0.0) - before, wall)


def answers(options: argparse.Namespace, folder: Path) -> tuple[list[Question], dict[str, list[Asked]], float]:
    """Return questions, the answers of both sides, and the server's peak memory in MB."""
    drawn = draw(options.data, 1, options.asked, options.library, options.seed)
    identity = publish(drawn.library, folder, "llama", options.encoder)
    with Snapshot.open(str(folder / "store"), identity) as snapshot, server(options.model) as (url, process):
        hits = open_retriever(snapshot, "hnsw").search([one.text for one in drawn.test], options.k)
        settings = ChatSettings(max_new_tokens=options.max_tokens, context=_CONTEXT, concurrency=1)
        there = EndpointWriter("model", settings, Endpoint(url))
        generator = load_generator(options.model, device="cpu", dtype=options.dtype)
        here = LocalWriter(generator, "model", DecodingSettings(max_new_tokens=options.max_tokens), 1)
        sides = {"llama.cpp": (ConcatReader(None, there), process), "torch": (ConcatReader(None, here), None)}
        for reader, other in sides.values():  # warm; by a prompt of its own, since the server keeps what it has read
            asked(reader, drawn.dev[0], hits[0], other)
        found: dict[str, list[Asked]] = {name: [] for name in sides}
        for at, (question, some) in enumerate(zip(drawn.test, hits, strict=True)):
            for name, (reader, other) in list(sides.items())[:: 1 if at % 2 else -1]:
                found[name].append(asked(reader, question, some, other))
        peak = memory_mb(process, "VmHWM")
        there.close()
    return drawn.test, found, peak


def measures(questions: Sequence[Question], side: Sequence[Asked]) -> dict[str, list[float]]:
    """Return each measure of each answer."""
    pairs = [(one.answer.text, question) for one, question in zip(side, questions, strict=True)]
    return {
        "EM": [exact_match(text, question.answers) for text, question in pairs],
        "F1": [token_f1(text, question.answers) for text, question in pairs],
        "holds a gold answer": [float(answer_matcher(question)(text)) for text, question in pairs],
        "CPU seconds": [one.cpu for one in side],
        "seconds": [one.wall for one in side],
        "tokens read": [float(one.answer.usage.prompt_tokens) for one in side if one.answer.usage],
        "tokens written": [float(one.answer.usage.new_tokens) for one in side if one.answer.usage],
    }


def compared(questions: Sequence[Question], found: dict[str, list[Asked]]) -> dict[str, Any]:
    """Return means, intervals and paired differences of both sides."""
    first, second = (measures(questions, found[name]) for name in _SIDES)
    equal = [a.answer.text == b.answer.text for a, b in zip(*(found[name] for name in _SIDES), strict=True)]
    return {
        "rows": {
            name: {
                **{side: _ends(estimate_mean(some[name])) for side, some in zip(_SIDES, (first, second), strict=True)},
                "difference": _ends(estimate_difference(first[name], second[name])),
            }
            for name in first
        },
        "equal_answers": sum(equal) / len(equal),
        "ratio": round(sum(second["CPU seconds"]) / sum(first["CPU seconds"]), 2),
    }


def _ends(one: Estimate) -> list[float]:
    return [round(value, 3) for value in (one.value, one.low, one.high)]


def _cell(ends: Sequence[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*ends)


def main() -> None:
    """Run, print the table, and one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of train_triples and passages, as .jsonl.xz")
    parser.add_argument("--model", type=Path, required=True, help="a folder with the GGUF file of a chat model")
    parser.add_argument("--encoder", default=demo_encoder())
    parser.add_argument("--asked", type=int, default=8, help="questions")
    parser.add_argument("--library", type=int, default=200, help="passages beside those of the questions")
    parser.add_argument("--longest", type=int, default=24, help="tokens of an answer, at most")
    parser.add_argument("-k", type=int, default=3, help="passages of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="of the generator in memory")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-llama-") as name:
        questions, found, peak = answers(options, Path(name))
    told = compared(questions, found)
    for row, cells in {"": ["---"] * 3, **told["rows"]}.items():
        shown = cells if isinstance(cells, list) else [_cell(ends) for ends in cells.values()]
        print(f"| {row or '---'} | {' | '.join(shown)} |")
    head = {"benchmark": "llama", "asked": len(questions), "k": options.k, "dtype": options.dtype}
    print(json.dumps({**head, **told, "server_peak_mb": peak, "peak_mb": memory_mb(os.getpid(), "VmHWM")}))


if __name__ == "__main__":
    main()
