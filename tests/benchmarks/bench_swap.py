"""Swap snapshots under load: failed and mixed requests, latency during the swaps, and growth of memory.

One JSON line. The ref alternates between two snapshots of the same passages, whose titles are marked by snapshot;
each move is pulled (files that are there are hashed again), opened, warmed and swapped while clients send queries.
`ratio` is the 99th percentile outside of swaps over that during them; the goal is at least 1/3. `growth_mb` is the
growth of the service's anonymous memory: the median of the last tenth of the swaps less that of the second tenth. The
published run:

    python tests/benchmarks/bench_swap.py --passages passages.jsonl.xz --questions a.jsonl.xz --count 60000
        --max-questions 3000 --swaps 100 --cache FOLDER
"""

import argparse
import json
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from service_load import (
    TimedRequest,
    add_sample_options,
    get,
    load,
    load_sample,
    memory_mb,
    percentile_ms,
    publish,
    service,
)

from rag_model.store import Store
from rag_model.store.versions.moves import tag

MARKS = ("RED ", "BLU ")


def measure(store: Store, snapshots: list[str], questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Swap snapshots under load, and return the report."""
    folder = Path(store.files.local_path("")).parent
    mode = ["--in-memory"] if options.in_memory else []
    with service(store.url, folder / "dest", "--poll", "0.1", *mode) as (address, process):
        ours, theirs = get_context("spawn").Pipe()
        load_ended = folder / "ended"
        client = get_context("spawn").Process(
            target=_ask, args=(theirs, address, questions, options.clients, load_ended)
        )
        client.start()
        theirs.close()
        ours.recv()
        time.sleep(options.rest)
        swaps, memory = [], []
        for number in range(options.swaps):
            swap_start = time.monotonic()
            tag(store, snapshots[number % 2], "latest")
            while get(address, "/snapshot")[1]["snapshot"] != snapshots[number % 2]:
                time.sleep(0.02)
            swaps.append((swap_start, time.monotonic()))
            time.sleep(max(options.rest, swaps[-1][1] - swap_start))  # outside of a swap for as long as it took
            memory.append(memory_mb(process))
        load_ended.touch()
        requests: list[TimedRequest] = ours.recv()
        client.join()
    return {
        "benchmark": "swap",
        "passages": options.count,
        "clients": options.clients,
        **_report(requests, swaps, memory),
    }


def _ask(pipe: Connection, address: str, questions: list[str], clients: int, load_ended: Path) -> None:
    pipe.send("ready")
    pipe.send(load(address, questions, clients, load_ended))


def _report(requests: list[TimedRequest], swaps: list[tuple[float, float]], memory: list[float]) -> dict[str, Any]:
    during = [
        request
        for request in requests
        if any(request.end_seconds >= start and request.start_seconds <= end for start, end in swaps)
    ]
    during_ids = {id(request) for request in during}
    outside = [request for request in requests if id(request) not in during_ids]
    tenth = max(1, len(memory) // 10)
    p99 = {"during": percentile_ms(during, 99), "outside": percentile_ms(outside, 99)}
    return {
        "swaps": len(swaps),
        "swap_s": round(statistics.median(end - start for start, end in swaps), 2),
        "requests": len(requests),
        "requests_during_swaps": len(during),
        "failed": sum(request.status != 200 for request in requests),
        "mixed": sum(request.is_mixed for request in requests),
        "ratio": round(p99["outside"] / p99["during"], 2) if during else None,
        "p99_ms": p99,
        "p50_ms": {"during": percentile_ms(during, 50), "outside": percentile_ms(outside, 50)},
        "memory_mb": [memory[0], memory[-1]],
        "growth_mb": round(
            statistics.median(memory[-tenth:]) - statistics.median(memory[tenth : 2 * tenth] or memory[:1]), 1
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sample_options(parser, count=1_500)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--rest", type=float, default=1.0, help="seconds between two swaps, at least")
    parser.add_argument("--in-memory", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, vectors, questions = load_sample(options, folder)
        store = Store.open(str(folder / "store"), create=True)
        ids = [publish(store, rows, vectors, folder / mark.strip(), mark) for mark in MARKS]
        print(json.dumps(measure(store, ids, questions, options)))


if __name__ == "__main__":
    main()
