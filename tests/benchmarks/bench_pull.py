"""Measure `pull` from an S3 server on this machine beside s3fs's own recursive get of the same bytes.

Prints one JSON line: megabytes a second of both, their ratio, every round, the peak memory of each
process, and sizes; the cost of the memory-mapped copy of the passages, and its gain in reading 20
random passages. The snapshot is generated: its kinds of files have the proportions of English
Wikipedia's, its passages are real Parquet, and the rest is incompressible. `pull` verifies and
syncs the files, `get` does neither. Each side runs in a fresh process, in turns.
`python tests/benchmarks/bench_pull.py [--size 256] [--rounds 5]` takes about a minute.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import s3fs
from s3_server import environment_of, run_seaweed

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.store import BlobRef, Content, Manifest, PartEntry, Snapshot, Store
from rag_model.store.pulling.pull import pull

PARTS = 8
SHARES = {"passages": 0.06, "embeddings": 0.31, "index": 0.63}  # 21 million passages, 768 dimensions, float16, HNSW
BYTES_A_PASSAGE = 380  # of the generated text in Parquet
LOOKUPS, ROWS = 50, 20


def write_snapshot(store: Store, folder: Path, megabytes: int) -> str:
    """Publish a made-up snapshot of about `megabytes`; return its id."""
    files, parts = {}, []
    bits = np.random.default_rng(1)
    for number in range(PARTS):
        name = f"part-{number:05d}"
        rows = int(megabytes * 1e6 * SHARES["passages"] / PARTS / BYTES_A_PASSAGE)
        files[f"passages/{name}.parquet"] = write_passages(store, folder / name, rows, number)
        files[f"embeddings/{name}.npy"] = put_bytes(
            store, bits.bytes(int(megabytes * 1e6 * SHARES["embeddings"] / PARTS))
        )
        parts.append(PartEntry(name, number, number, rows))
    files["index/hnsw.faiss"] = put_bytes(store, bits.bytes(int(megabytes * 1e6 * SHARES["index"])))
    return store.snapshots.publish(Manifest(Content({"kind": "wiki"}, tuple(parts), files)))


def write_passages(store: Store, path: Path, rows: int, seed: int) -> BlobRef:
    """Store passages of 100 words from a vocabulary of 5,000."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5000)]
    with PassageWriter(path) as writer:
        for row in range(rows):
            text = " ".join(rng.choices(words, k=100))
            writer.write(Passage(f"{seed}:{row}", str(seed), 1, words[row % 5000], "", text, 0, 100, f"{row:032x}"))
    return store.blobs.put_file(path)


def put_bytes(store: Store, data: bytes) -> BlobRef:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return store.blobs.put_file(Path(file.name))


def fetch(how: str, url: str, snapshot: str, dest: Path) -> dict[str, float]:
    """Fetch once in this process; return the seconds and peak memory."""
    s3 = s3fs.S3FileSystem()
    s3.exists(f"{url}/blobs")  # opens the connection, since a service has one
    store = Store.open(url)
    start, cpu = time.perf_counter(), time.process_time()
    if how == "get":
        s3.get(f"{url}/blobs", str(dest), recursive=True)
    else:
        pull(store, snapshot, dest, with_mapped_copies=how == "mapped")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return {"seconds": round(seconds, 3), "cpu_s": round(cpu, 3), "peak_mb": round(peak)}


def fetch_in_process(how: str, url: str, snapshot: str, dest: Path, environment: dict[str, str]) -> dict[str, float]:
    """Fetch once in a fresh process to an empty folder."""
    shutil.rmtree(dest, ignore_errors=True)
    os.sync()  # so that it does not wait for another fetch's writes
    command = [sys.executable, __file__, "--fetch", how, url, snapshot, str(dest)]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return dict(json.loads(child.stdout))


def compute_ratio(theirs: list[dict[str, float]], ours: list[dict[str, float]], what: str) -> float:
    """Return the median ratio of the rounds; at 1 or more, ours takes no more."""
    return round(statistics.median(their[what] / our[what] for their, our in zip(theirs, ours, strict=True)), 2)


def measure_lookup_ms(folder: Path) -> float:
    """Return the median milliseconds to read 20 random passages of a pulled snapshot."""
    with Snapshot.from_folder(folder) as snapshot:
        rng, seconds = random.Random(0), []
        for _ in range(LOOKUPS + PARTS):
            rows = rng.sample(range(snapshot.n), ROWS)
            start = time.perf_counter()
            snapshot.passages(rows)
            seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds[PARTS:]) * 1e3, 2)


def compare(megabytes: int, rounds: int, folder: Path, endpoint: str) -> dict[str, object]:
    """Publish, then fetch in turns; return the report."""
    environment = {**os.environ, **environment_of(endpoint)}
    url = "s3://bench/store"
    publish = [sys.executable, __file__, "--publish", str(megabytes), url]
    process = subprocess.run(publish, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    snapshot, size = process.stdout.split()
    sides: dict[str, list[dict[str, float]]] = {"get": [], "pull": [], "mapped": []}
    lookups = {}
    dest = folder / "dest"  # both sides use the same disk space in turn
    fetch_in_process("get", url, snapshot, dest, environment)  # loads the server's files into memory
    for _ in range(rounds):
        for side, results in sides.items():
            results.append(fetch_in_process(side, url, snapshot, dest, environment))
            if side != "get":
                lookups[side] = measure_lookup_ms(dest)
    rates = {side: int(size) / 1e6 / statistics.median(run["seconds"] for run in runs) for side, runs in sides.items()}
    return {
        "benchmark": "pull",
        "megabytes": round(int(size) / 1e6),
        "files": 2 * PARTS + 1,
        "pull_mb_s": round(rates["pull"], 1),
        "get_mb_s": round(rates["get"], 1),
        "ratio": compute_ratio(sides["get"], sides["pull"], "seconds"),
        "ratio_with_mapped_passages": compute_ratio(sides["get"], sides["mapped"], "seconds"),
        "cpu_ratio": compute_ratio(sides["get"], sides["pull"], "cpu_s"),
        "peak_mb": {side: max(run["peak_mb"] for run in runs) for side, runs in sides.items()},
        "lookup_20_ms": {"mapped": lookups["mapped"], "parquet": lookups["pull"]},
        "rounds": sides,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="megabytes of the snapshot")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fetch", nargs=4, help=argparse.SUPPRESS)  # in a child: how, store, snapshot, folder
    parser.add_argument("--publish", nargs=2, help=argparse.SUPPRESS)  # in a child: megabytes, store
    options = parser.parse_args()
    if options.fetch:
        side, url, snapshot, dest = options.fetch
        print(json.dumps(fetch(side, url, snapshot, Path(dest))))
        return
    with tempfile.TemporaryDirectory() as name:
        if options.publish:
            megabytes, url = options.publish
            s3fs.S3FileSystem().makedirs("bench", exist_ok=True)
            store = Store.open(url, create=True)
            snapshot = write_snapshot(store, Path(name), int(megabytes))
            print(snapshot, sum(ref.size for ref in store.snapshots.get(snapshot).content.files.values()))
            return
        server = Path(name) / "server"
        server.mkdir()
        with run_seaweed(server) as endpoint:
            print(json.dumps(compare(options.size, options.rounds, Path(name), endpoint)))


if __name__ == "__main__":
    main()
