"""Measure `bookwheel serve` beside a bare loop of encode and search without HTTP: questions a second, and latency.

Each client sends one question at a time. The bare loop encodes and searches as many questions at
once as there are clients, in one process that has the cores to itself (the service waits
meanwhile), with the same library and pulled snapshot. The clients run in their own process on the
same cores and read replies as bytes, without parsing JSON, since the loop writes none. Both sides
take turns for each number of clients. `ratio` is of the questions a second with the most clients,
`cpu_ratio` of the CPU seconds of a question without the clients, which is more reliable where other
programs run. Both are medians of the rounds. Prints one JSON line. By default the passages and
questions are the demo's; the full measurement is

    python tests/benchmarks/bench_serve.py --passages passages.jsonl.xz --questions a.jsonl.xz --count 60000
        --max-questions 3000 --seconds 20 --cache FOLDER

With `--workers N`, a service of N processes takes turns with one of a single process instead of the
bare loop. `ratio` is then of the questions a second with the most clients, and `memory_mb` is the
memory of all processes of each service as proportional set sizes, in which a page that several
processes share counts once.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isolated_run import run_alone
from service_load import (
    K,
    TimedRequest,
    add_sample_options,
    cpu_seconds,
    list_processes,
    load,
    memory_mb,
    percentile_ms,
    print_measurement,
    proportional_mb,
    service,
)

from rag_model.retrieve.dense import DenseRetriever
from rag_model.store import Snapshot

CORES = 2


@dataclass(frozen=True, slots=True)
class Rate:
    """Questions a second, and the CPU time of a question."""

    questions_s: float
    cpu_ms: float  # of a question, over all threads, without the clients
    responses: tuple[TimedRequest, ...] = ()


def measure_loop(folder: str, questions: list[str], batch: int, seconds: float) -> Rate:
    """Encode and search in a loop, `batch` questions at once."""
    with Snapshot.from_folder(Path(folder)) as snapshot:
        retriever = DenseRetriever.from_snapshot(snapshot)
        retriever.search(questions[:batch], K)
        start_time, cpu_start, n_questions = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < start_time + seconds:
            start = n_questions % len(questions)
            retriever.search((questions + questions)[start : start + batch], K)
            n_questions += batch
        return Rate(
            n_questions / (time.perf_counter() - start_time), (time.process_time() - cpu_start) / n_questions * 1e3
        )


def measure_best_loop(folder: str, questions: list[str], batch: int, seconds: float) -> Rate:
    """Measure the loop with one thread and with all cores, and return the better rate."""
    rates: list[Rate] = [
        run_alone(measure_loop, folder, questions, batch, seconds, threads=n).value for n in (1, CORES)
    ]
    return max(rates, key=lambda rate: rate.questions_s)


def measure_service(endpoint: tuple[str, int], questions: list[str], clients: int, seconds: float) -> Rate:
    """Measure a running service."""
    address, process = endpoint
    processes = list_processes(process)
    cpu_start = sum(map(cpu_seconds, processes))
    responses = run_alone(load, address, questions, clients, seconds).value
    rate = len(responses) / (responses[-1].end_seconds - responses[0].start_seconds)
    return Rate(rate, (sum(map(cpu_seconds, processes)) - cpu_start) / len(responses) * 1e3, tuple(responses))


def measure(folder: Path, questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure a service and the bare loop in turns; return the report."""
    ours: list[dict[int, Rate]] = []
    theirs: list[dict[int, Rate]] = []
    with service(str(folder / "store"), folder / "dest", "--poll", "60") as endpoint:
        load(endpoint[0], questions, max(options.clients), 2.0)  # warm-up
        for _ in range(options.rounds):
            ours.append({})
            theirs.append({})
            for n in options.clients:
                ours[-1][n] = measure_service(endpoint, questions, n, options.seconds)
                theirs[-1][n] = measure_best_loop(str(folder / "dest"), questions, n, options.seconds)
        peak = memory_mb(endpoint[1], "VmHWM")
    report = {str(n): _compare_rates([our[n] for our in ours], [their[n] for their in theirs]) for n in options.clients}
    return {
        "benchmark": "serve",
        "passages": options.count,
        "ratio": report[str(max(options.clients))]["ratio"],
        "clients": report,
        "failed": sum(reply.status != 200 for turn in ours for rate in turn.values() for reply in rate.responses),
        "peak_mb": peak,
    }


def compare_workers(folder: Path, questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure a service of several processes and one of a single process in turns."""
    store, runs = str(folder / "store"), {}
    with (
        service(store, folder / "many", "--poll", "60", "--workers", str(options.workers)) as many,
        service(store, folder / "one", "--poll", "60") as single,
    ):
        services = {"many": many, "one": single}
        for endpoint in services.values():
            load(endpoint[0], questions, max(options.clients), 2.0)  # warm-up
        for name in services:
            runs[name] = {n: list[Rate]() for n in options.clients}
        for number in range(options.rounds * len(options.clients)):
            n = options.clients[number % len(options.clients)]
            for name, endpoint in services.items():
                runs[name][n].append(measure_service(endpoint, questions, n, options.seconds))
        memory = {name: sum(map(proportional_mb, list_processes(endpoint[1]))) for name, endpoint in services.items()}
    report = {
        str(n): {
            name: {
                "questions_s": round(statistics.median(rate.questions_s for rate in runs[name][n]), 1),
                "cpu_ms": round(statistics.median(rate.cpu_ms for rate in runs[name][n]), 2),
                "p50_ms": statistics.median(percentile_ms(rate.responses, 50) for rate in runs[name][n]),
                "p99_ms": statistics.median(percentile_ms(rate.responses, 99) for rate in runs[name][n]),
            }
            for name in services
        }
        for n in options.clients
    }
    most_clients = report[str(max(options.clients))]
    return {
        "benchmark": "serve_workers",
        "passages": options.count,
        "workers": options.workers,
        "ratio": round(most_clients["many"]["questions_s"] / most_clients["one"]["questions_s"], 2),
        "memory_mb": {name: round(size) for name, size in memory.items()},
        "clients": report,
        "failed": sum(
            response.status != 200
            for rates in runs.values()
            for rates_of_clients in rates.values()
            for rate in rates_of_clients
            for response in rate.responses
        ),
    }


def _compare_rates(ours: list[Rate], theirs: list[Rate]) -> dict[str, Any]:
    rounds = list(zip(ours, theirs, strict=True))
    return {
        "questions_s": round(statistics.median(rate.questions_s for rate in ours), 1),
        "bare_questions_s": round(statistics.median(rate.questions_s for rate in theirs), 1),
        "ratio": round(statistics.median(our.questions_s / their.questions_s for our, their in rounds), 2),
        "cpu_ratio": round(statistics.median(their.cpu_ms / our.cpu_ms for our, their in rounds), 2),
        "p50_ms": statistics.median(percentile_ms(rate.responses, 50) for rate in ours),
        "p99_ms": statistics.median(percentile_ms(rate.responses, 99) for rate in ours),
        "cpu_ms": round(statistics.median(rate.cpu_ms for rate in ours), 2),
        "bare_cpu_ms": round(statistics.median(rate.cpu_ms for rate in theirs), 2),
        "rounds": [[round(our.questions_s, 1), round(their.questions_s, 1)] for our, their in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sample_options(parser, count=3_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes; several are compared with a single one")
    options = parser.parse_args()
    print_measurement(options, measure if options.workers == 1 else compare_workers)


if __name__ == "__main__":
    main()
