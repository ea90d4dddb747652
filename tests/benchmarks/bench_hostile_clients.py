"""Measure how long clients wait while a hostile client holds 1,000 connections of the service.

Well-behaved clients send one question at a time, first alone, then while a client at another
address opens the connections, and reopens those that are closed. A quarter of them each are idle,
send the first bytes of a request's head, send the first bytes of its body, and request long replies
that they do not read. `ratio` is the p99 of the other clients during the attack over their p99
alone, as the median of the rounds. The hostile client and the others run in one process each on the
same cores. Prints one JSON line.
"""

import argparse
import asyncio
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from isolated_run import run_alone
from service_load import (
    TimedRequest,
    add_sample_options,
    get,
    load,
    memory_mb,
    percentile_ms,
    print_measurement,
    service,
)

HOSTILE = "127.0.0.2"  # a second address of this machine
_PAUSE = 0.5  # seconds before a closed connection is opened again
_HEAD = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
_GREEDY = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40
_SENT = (b"", _HEAD[:40], _HEAD + b'{"questions"', _GREEDY)


@dataclass(frozen=True, slots=True)
class Round:
    """The requests of well-behaved clients without and with the hostile client, and the service's memory after each."""

    baseline: list[TimedRequest]
    hostile: list[TimedRequest]
    baseline_mb: float
    hostile_mb: float
    healthy: bool  # whether /healthz answered while the hostile client was connected


def attack(address: str, connections: int, started: Event, done: Event) -> None:
    """Hold connections until `done`; set `started` once each has been tried."""
    asyncio.run(_attack(address, connections, started, done))


async def _attack(address: str, connections: int, started: Event, done: Event) -> None:
    attempts = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(_hold_open(address, _SENT[n % len(_SENT)], attempts)) for n in range(connections)]
    for _ in tasks:
        await attempts.acquire()
    started.set()
    await asyncio.to_thread(done.wait)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _hold_open(address: str, request: bytes, attempts: asyncio.Semaphore) -> None:
    host, port = address.rsplit(":", 1)
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(HOSTILE, 0), limit=1024)
            writer.write(request)
            attempts.release()
            with suppress(OSError):
                await (reader.read() if not request else _wait_until_closed(writer))
            writer.transport.abort()
        attempts.release()
        await asyncio.sleep(_PAUSE)


async def _wait_until_closed(writer: asyncio.StreamWriter) -> None:
    """Wait until the service closes a connection from which nothing is read."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while not writer.transport.is_closing():
        await asyncio.sleep(1.0)
        writer.write(b"")


def measure(folder: Path, questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure a service without and with the hostile client, in turns; return the report."""
    rounds = [_run_round(folder, questions, options) for _ in range(options.rounds)]
    p99 = [(percentile_ms(trial.baseline, 99), percentile_ms(trial.hostile, 99)) for trial in rounds]
    return {
        "benchmark": "hostile_clients",
        "passages": options.count,
        "hostile": options.hostile,
        "clients": options.clients,
        "ratio": round(statistics.median(hostile_ms / alone_ms for alone_ms, hostile_ms in p99), 2),
        "p99_ms": statistics.median(alone_ms for alone_ms, _ in p99),
        "hostile_p99_ms": statistics.median(hostile_ms for _, hostile_ms in p99),
        "hostile_requests": [len(trial.hostile) for trial in rounds],
        "failed": sum(response.status != 200 for trial in rounds for response in trial.hostile),
        "healthy": all(trial.healthy for trial in rounds),
        "peak_mb": max(trial.baseline_mb for trial in rounds),
        "hostile_peak_mb": max(trial.hostile_mb for trial in rounds),
    }


def _run_round(folder: Path, questions: list[str], options: argparse.Namespace) -> Round:
    context = get_context("spawn")
    with service(str(folder / "store"), folder / "dest", "--poll", "60") as (address, process):
        load(address, questions, options.clients, 2.0)  # warm-up
        alone_responses = run_alone(load, address, questions, options.clients, options.seconds).value
        memory = memory_mb(process, "VmHWM")
        started, done = context.Event(), context.Event()
        hostile = context.Process(target=attack, args=(address, options.hostile, started, done))
        hostile.start()
        try:
            started.wait()
            time.sleep(1.0)  # until the service has accepted as many connections as it allows
            hostile_responses = run_alone(load, address, questions, options.clients, options.seconds).value
            healthy = get(address, "/healthz")[0] == 200
        finally:
            done.set()
            hostile.join()
        return Round(alone_responses, hostile_responses, memory, memory_mb(process, "VmHWM"), healthy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sample_options(parser, count=3_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--hostile", type=int, default=1_000, help="connections of the hostile client")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    print_measurement(parser.parse_args(), measure)


if __name__ == "__main__":
    main()
