"""`bookwheel serve` beside a bare loop of encode and search without HTTP: questions a second, and how long one waits.

One JSON line. Each of so many clients asks one question at a time; the bare loop encodes and searches as many at once,
in one process with the cores to itself, by the same library and the same pulled snapshot. The clients run in a process
of their own on the same cores. `ratio` is of questions a second at the most clients, the median of the rounds. By
default the passages and questions are the demo's; in earnest

    python tests/benchmarks/bench_serve.py --passages passages.jsonl.xz --questions a.jsonl.xz --count 60000
        --asked 3000 --seconds 20 --cache FOLDER
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from alone import alone
from passages import drawn, embedded
from served import K, load, memory_mb, percentile_ms, publish, service

from rag_model.retrieve.dense import DenseRetriever
from rag_model.store import Snapshot, Store

CORES = 2


def bare(folder: str, questions: list[str], together: int, seconds: float) -> float:
    """Return how many questions a second are encoded and searched, `together` at once."""
    with Snapshot.from_folder(Path(folder)) as snapshot:
        retriever = DenseRetriever.of(snapshot)
        retriever.search(questions[:together], K)
        began, done = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            start = done % len(questions)
            asked = (questions + questions)[start : start + together]
            retriever.search(asked, K)
            done += together
        return done / (time.perf_counter() - began)


def bare_best(folder: str, questions: list[str], together: int, seconds: float) -> float:
    """Return the better of one thread and all cores: few short questions are no work for two."""
    arguments = bare, folder, questions, together, seconds
    return max(alone(*arguments, threads=threads).value for threads in (1, CORES))


def measure(folder: Path, questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Serve and ask, then loop, in turns; return the report."""
    store, rounds = str(folder / "store"), []
    for _ in range(options.rounds):
        with service(store, folder / "dest", "--poll", "60") as (address, process):
            load(address, questions, max(options.clients), 2.0)  # warm
            asked = {n: alone(load, address, questions, n, options.seconds).value for n in options.clients}
            peak = memory_mb(process, "VmHWM")
        loops = {n: bare_best(str(folder / "dest"), questions, n, options.seconds) for n in options.clients}
        rounds.append({n: (asked[n], loops[n], peak) for n in options.clients})
    report = {str(n): _of_clients([one[n] for one in rounds]) for n in options.clients}
    return {
        "benchmark": "serve",
        "passages": options.count,
        "ratio": report[str(max(options.clients))]["ratio"],
        "clients": report,
        "failed": sum(reply.status != 200 for one in rounds for asked, _, _ in one.values() for reply in asked),
        "peak_mb": max(peak for one in rounds for _, _, peak in one.values()),
    }


def _of_clients(rounds: list[tuple[list[Any], float, float]]) -> dict[str, Any]:
    rates = [len(asked) / (asked[-1].ended - asked[0].began) for asked, _, _ in rounds]
    return {
        "questions_s": round(statistics.median(rates), 1),
        "bare_questions_s": round(statistics.median(loop for _, loop, _ in rounds), 1),
        "ratio": round(statistics.median(rate / loop for rate, (_, loop, _) in zip(rates, rounds, strict=True)), 2),
        "p50_ms": statistics.median(percentile_ms(asked, 50) for asked, _, _ in rounds),
        "p99_ms": statistics.median(percentile_ms(asked, 99) for asked, _, _ in rounds),
        "rounds": [[round(rate, 1), round(loop, 1)] for rate, (_, loop, _) in zip(rates, rounds, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines; by default the demo's")
    parser.add_argument("--questions", type=Path, nargs="*", default=[], help="JSON lines; by default the demo's")
    parser.add_argument("--count", type=int, default=3_000, help="passages")
    parser.add_argument("--asked", type=int, default=74, help="different questions")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="where vectors are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, given = Path(name), (options.passages, options.questions, options.count, options.asked)
        vectors = embedded(options.cache or folder / "cache", *given).passages
        rows, questions = drawn(*given)
        publish(Store.open(str(folder / "store"), create=True), rows, vectors, folder / "work")
        print(json.dumps(measure(folder, questions, options)))


if __name__ == "__main__":
    main()
