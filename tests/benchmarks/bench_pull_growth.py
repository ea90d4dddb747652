"""How the cost of a pull grows with the number of parts: made-up snapshots in stores on this disk, to fresh folders.

A part has what one of 256 KiB of a dump has with a static encoder of 64 dimensions: 1,659 passages as Parquet, vectors,
a file of articles; the graph and the index of words grow with the parts. Contents are random but for passages, which
are words. Sizes are pulled in turns, each pull in a fresh process. One JSON line: CPU seconds of Python and libraries
(`user`) and of the kernel (`system`), seconds, peak memory, medians of the rounds; and the exponent e of CPU = a n^e
from the smallest to the largest size. The peer is the line n^1.
`python tests/benchmarks/bench_pull_growth.py [--parts 10,40] [--rounds 3]`; `--parts 302,1209 --rounds 5` are half a
million and two million passages, 4.5 GB of disk.
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.store import BlobRef, Content, Manifest, PartEntry, Store
from rag_model.store.pulling.pull import pull

ROWS = 1_659  # of a part
BYTES = {"embeddings/{}.npy": 212_000, "articles/{}.parquet": 20_000}  # of a part's other files
INDEXES = {"index/hnsw.faiss": 900_000, "index/bm25.bm25": 300_000}  # bytes for each part
_TEXTS = 2_000


class Maker:
    """Writes made-up files to a store."""

    def __init__(self, store: Store, folder: Path) -> None:
        """Write each file in `folder` first."""
        self._store, self._file = store, folder / "file"
        self._bits, rng = np.random.default_rng(0), random.Random(0)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5_000)]
        self._texts = [" ".join(rng.choices(words, k=100)) for _ in range(_TEXTS)]

    def publish(self, parts: int) -> str:
        """Store a snapshot of so many parts; return its id."""
        files, entries = {}, []
        for number in range(parts):
            name = f"part-{number:05d}"
            files[f"passages/{name}.parquet"] = self._passages(number)
            files |= {path.format(name): self._random(size) for path, size in BYTES.items()}
            entries.append(PartEntry(name, number, number, ROWS))
        files |= {path: self._random(size * parts) for path, size in INDEXES.items()}
        return self._store.snapshots.publish(Manifest(Content({"kind": "wiki"}, tuple(entries), files)))

    def _passages(self, part: int) -> BlobRef:
        with PassageWriter(self._file) as writer:
            for row in range(ROWS):
                text = self._texts[(7 * part + row) % _TEXTS]
                writer.write(Passage(f"{part}:{row}", str(part), 1, f"Title {row}", "", text, 0, 100, f"{row:032x}"))
        return self._store.blobs.put_file(self._file)

    def _random(self, size: int) -> BlobRef:
        self._file.write_bytes(self._bits.bytes(size))
        return self._store.blobs.put_file(self._file)


def fetch(url: str, snapshot: str, dest: Path) -> dict[str, float]:
    """Pull once, in this process; return what it took."""
    store, before, start = Store.open(url), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    pull(store, snapshot, dest)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user_s": spent.ru_utime - before.ru_utime,
        "system_s": spent.ru_stime - before.ru_stime,
        "seconds": time.perf_counter() - start,
        "peak_mb": int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024 / 1e6,
    }


def alone(url: str, snapshot: str, dest: Path) -> dict[str, float]:
    """Pull once in a fresh process, to a fresh folder."""
    os.sync()  # what the one before left unwritten is not this one's to wait for
    command = [sys.executable, __file__, "--fetch", url, snapshot, str(dest)]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(dest)
    return dict(json.loads(child.stdout))


def measure(sizes: list[int], rounds: int, folder: Path) -> dict[str, object]:
    """Publish a snapshot of each size, and pull them in turns; return the report."""
    snapshots = {}
    for parts in sizes:
        url = str(folder / f"store-{parts}")
        snapshots[parts] = url, Maker(Store.open(url, create=True), folder).publish(parts)
    found: dict[int, list[dict[str, float]]] = {parts: [] for parts in sizes}
    for _ in range(rounds):
        for parts, (url, snapshot) in snapshots.items():
            found[parts].append(alone(url, snapshot, folder / "dest"))
    costs = {parts: _medians(every) for parts, every in found.items()}
    (few, least), *_, (many, most) = costs.items()
    return {
        "benchmark": "pull_growth",
        "rounds": rounds,
        "passages": [ROWS * parts for parts in sizes],
        "costs": [{name: round(value, 2) for name, value in cost.items()} for cost in costs.values()],
        "exponent": {
            name: round(math.log(most[name] / least[name]) / math.log(many / few), 2) for name in ("cpu_s", "user_s")
        },
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    every = [{"cpu_s": one["user_s"] + one["system_s"], **one} for one in rounds]
    return {name: statistics.median(one[name] for one in every) for name in every[0]}


def main() -> None:
    """Measure, or pull once for the process that measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="10,40", help="two sizes or more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder on a disk with room for the stores")
    parser.add_argument("--fetch", nargs=3, help=argparse.SUPPRESS)  # in a child: store, snapshot, folder
    options = parser.parse_args()
    if options.fetch:
        url, snapshot, dest = options.fetch
        print(json.dumps(fetch(url, snapshot, Path(dest))))
        return
    sizes = sorted({*map(int, options.parts.split(","))})
    if len(sizes) < 2:
        parser.error("--parts needs two sizes or more")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        print(json.dumps(measure(sizes, options.rounds, Path(folder))))


if __name__ == "__main__":
    main()
