"""Measure `POST /retrieve` under the load of trainings: 2,560 queries in a request, and hundreds of requests at once.

`ratio` is the queries a second in one large request over those of a bare loop that encodes and
searches 64 at a time in one process with the same library and snapshot; both take turns, and
medians of the rounds are compared. Hundreds of requests are the load of GEM's reliability test:
1,000 requests of one query in MessagePack, each on its own connection. `single` is a client that
sends one query at a time to /search, alone and during a large request. Prints one JSON line. By
default the passages and questions are the demo's; the full measurement is

    python tests/benchmarks/bench_retrieve.py --passages passages.jsonl.xz --questions a.jsonl.xz --count 83541
        --max-questions 3000 --rounds 3 --cache FOLDER
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import msgspec
from bench_serve import measure_best_loop
from isolated_run import run_alone
from service_load import add_sample_options, cpu_seconds, load, memory_mb, percentile_ms, print_measurement, service

BATCH = 64
SECONDS = 4.0  # of the bare loop, and of a single client


async def send_singles(url: str, queries: Sequence[str], at_once: int, total: int) -> list[float | None]:
    """Send requests of one query, `at_once` at a time; return the seconds of each, or None for a failure."""
    slots = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)

    async with httpx.AsyncClient(limits=limits, timeout=30.0) as client:

        async def send(number: int) -> float | None:
            query = queries[number % len(queries)]
            body = msgspec.msgpack.encode({"query": query, "topk": 3, "return_scores": True})
            async with slots:
                start = time.perf_counter()
                try:
                    reply = await client.post(url, content=body)
                    reply.raise_for_status()
                    assert len(msgspec.msgpack.decode(reply.content)["result"]) == 3
                except (httpx.HTTPError, AssertionError):
                    return None
                return time.perf_counter() - start

        return await asyncio.gather(*(send(number) for number in range(total)))


def retrieve(url: str, queries: Sequence[str]) -> float:
    """Send all queries in one request, as Search-R1 does; return the seconds."""
    start = time.perf_counter()
    reply = httpx.post(url, json={"queries": queries, "topk": 3, "return_scores": True}, timeout=None)
    reply.raise_for_status()
    assert [len(documents) for documents in reply.json()["result"]] == [3] * len(queries)
    return time.perf_counter() - start


def retrieve_until_killed(url: str, queries: Sequence[str]) -> None:
    """Send one large request after another."""
    while True:
        retrieve(url, queries)


def describe_singles(seconds: Sequence[float | None]) -> dict[str, Any]:
    latencies = sorted(value for value in seconds if value is not None)
    return {
        "requests": len(seconds),
        "failed": len(seconds) - len(latencies),
        "p50_ms": round(statistics.median(latencies) * 1e3, 1),
        "p99_ms": round(latencies[int(0.99 * len(latencies))] * 1e3, 1),
    }


def measure(folder: Path, questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    all_queries = (questions * -(-options.queries // len(questions)))[: options.queries]
    with service(str(folder / "store"), folder / "dest", "--poll", "60") as (address, process):
        url = f"http://{address}/retrieve"
        retrieve(url, all_queries[:BATCH])
        rates, bare_rates, cpu_ms = [], [], []
        for _ in range(options.rounds):
            cpu_start = cpu_seconds(process)
            rates.append(len(all_queries) / retrieve(url, all_queries))
            cpu_ms.append((cpu_seconds(process) - cpu_start) / len(all_queries) * 1e3)
            bare_rates.append(measure_best_loop(str(folder / "dest"), questions, BATCH, SECONDS))
        at_once = {
            str(n): describe_singles(run_alone(_run_singles, url, questions, n, options.requests).value)
            for n in options.at_once
        }
        unloaded_replies = load(address, questions, 1, SECONDS)
        # Reading a large reply delays all threads of a process, so the client has its own.
        large = get_context("spawn").Process(target=retrieve_until_killed, args=(url, all_queries))
        large.start()
        load(address, questions, 1, SECONDS / 2)  # until the first large request has arrived
        loaded_replies = load(address, questions, 1, SECONDS)
        large.kill()
        large.join()
        peak = memory_mb(process, "VmHWM")
    return {
        "benchmark": "retrieve",
        "passages": options.count,
        "queries": len(all_queries),
        "ratio": round(statistics.median(rates) / statistics.median(rate.questions_s for rate in bare_rates), 3),
        "cpu_ratio": round(statistics.median(rate.cpu_ms for rate in bare_rates) / statistics.median(cpu_ms), 3),
        "queries_s": round(statistics.median(rates), 1),
        "at_once": at_once,
        "single": {
            "p50_ms": [percentile_ms(unloaded_replies, 50), percentile_ms(loaded_replies, 50)],
            "p99_ms": [percentile_ms(unloaded_replies, 99), percentile_ms(loaded_replies, 99)],
        },
        "peak_mb": peak,
    }


def _run_singles(url: str, queries: Sequence[str], at_once: int, total: int) -> list[float | None]:
    return asyncio.run(send_singles(url, queries, at_once, total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sample_options(parser, count=3_000)
    parser.add_argument("--queries", type=int, default=2_560, help="queries of the large request")
    parser.add_argument("--requests", type=int, default=1_000, help="requests of one query")
    parser.add_argument("--at-once", type=int, nargs="+", default=[50, 128, 512])
    parser.add_argument("--rounds", type=int, default=1)
    print_measurement(parser.parse_args(), measure)


if __name__ == "__main__":
    main()
