"""Measure operations on the descriptors of a store like Wikipedia's after ten years, where each request takes 20 ms.

The store is generated in memory (`far_store.py`): `--months` snapshots of `--parts` parts, of which
the share `--changed` changes each month; the records of chunk, embed and scatter of every part, of
`--cells` shards, and of the deltas between months; one ref a month beside `latest`. Blobs have a
size but no bytes, except for passages: all parts have the same 3,500 passages, before a change or
after it (1 % of the articles edited, one added, one deleted). Operations on descriptors are then
measured: planning which outputs each part reuses (`plan`), the look-ups of a rebuild without
changes, the check of a snapshot's files before it is published, all refs, `log`, `diff` of the last
two months, `expire` to twelve months, and `gc` of the expired ones.

Each operation has its seconds and its requests by kind. The peer sends the same requests one by one
(`alone`: their seconds). Prints a line after each operation on standard error, and one JSON line.
`python tests/benchmarks/bench_descriptors.py [--parts 6000 --cells 336 --months 120]` has the size
of all of Wikipedia.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from far_store import Far, latency

from beam_jobs.tasks import look_up_reports
from rag_model.corpus.chunk import VERSION
from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Part, Passage
from rag_model.digest import digest_bytes
from rag_model.snapshots.parent import Parent
from rag_model.store.diff import diff_snapshots
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.files import encode_json
from rag_model.store.objects.memo import TARGET_KEY, Memo, StageResult
from rag_model.store.pulling.deltas import STAGE as DELTAS
from rag_model.store.pulling.deltas import list_delta_steps
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import find_missing_files
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.snapshot import Snapshot

_MONTH = 30 * 86400.0  # seconds
_PAGES = 3_000  # page ids of a part
_ARTICLES, _EACH = 1_250, 3  # articles of a part, and passages of an article
_EDITED = 100  # one article in this number is edited in a month
_WIDTH, _LINKS = 4 * 384, 140  # bytes of a vector and of its links in a graph
_ROWS = _ARTICLES * _EACH
_NPY = 128  # bytes before the vectors of a part, which are float16
_STAGES = {"chunk": ("passages", "article_log"), "embed": ("embeddings",), "scatter": ("out",)}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the store."""

    parts: int
    cells: int
    months: int
    changed: float  # share of the parts, and of the shards, that differ from the month before


class DescriptorLibrary:
    """A store of descriptors that is written without requests."""

    def __init__(self, size: Size) -> None:
        """Write all months, the oldest first."""
        self.size, self.url = size, "far://wikipedia"
        self._age = 0.0
        self._blobs: dict[tuple[str, int, int], list[BlobRef]] = {}
        self._passages = [build_passage_file(changed=changed) for changed in (False, True)]
        self.store = Store.open(self.url, create=True)
        parent_content: Content | None = None
        for month in range(size.months):
            self._age = (size.months - 1 - month) * _MONTH
            parent_content = self._write_month(month, parent_content)

    def version(self, part: int, month: int) -> int:
        """Return the month of a part's last change."""
        return max(0, month - (month - part) % self._change_interval)

    @property
    def _change_interval(self) -> int:
        return max(1, round(1 / self.size.changed))

    def inputs(self, stage: str, part: int, month: int) -> dict[str, Any]:
        """Return the inputs of a stage, from which its record's key is computed."""
        return {"stage": stage, "part": part, "version": self.version(part, month), "code": 1}

    def _write_month(self, month: int, parent: Content | None) -> Content:
        parts, files = list[PartEntry](), dict[str, BlobRef]()
        for part in range(self.size.parts):
            name = f"part-{part:05d}"
            blobs = {stage: self._write_stage(stage, part, month) for stage in _STAGES}
            files[f"passages/{name}.parquet"], files[f"articles/{name}.parquet"] = blobs["chunk"]
            (files[f"embeddings/{name}.npy"],) = blobs["embed"]
            parts.append(PartEntry(name, part * _PAGES, (part + 1) * _PAGES - 1, _ROWS))
        for cell in range(self.size.cells):
            self._write_stage("shard", cell, month)
        files["index/hnsw.faiss"] = self._write_blob(f"index {month}", len(parts) * _ROWS * (_WIDTH + _LINKS))
        index = {"hnsw": {"factory": "HNSW32", "d": 384, "kind": "hnsw", "over": "embeddings", "row_bytes": _WIDTH}}
        space = {"embeddings": {"kind": "vectors", "space": {"digest": "sha256:" + "0" * 64, "dim": 384}}}
        content = Content({"kind": "wiki", "dbname": "enwiki"}, tuple(parts), files, {"month": month}, space, index)
        steps = list_delta_steps(parent, content) if parent else {}
        for step in (step for steps_of_path in steps.values() for step in steps_of_path):
            self._write_record(DELTAS, step.inputs(), {"delta": step.target.size // 20}, {TARGET_KEY: step.target.id})
        manifest = Manifest(content, provenance={"code": {"chunk": VERSION}})
        identity = manifest.id
        self._write_file(f"snapshots/{identity}.json", encode_json(manifest.to_json()))
        self._write_ref("latest", month + 1, identity)
        self._write_ref(f"month-{month:03d}", 1, identity)
        return content

    def _write_stage(self, stage: str, part: int, month: int) -> list[BlobRef]:
        version = self.version(part, month)
        stage_key = stage, part, version
        if stage_key not in self._blobs:
            sizes = dict.fromkeys(_STAGES.get(stage, ("out",)), _NPY + _ROWS * _WIDTH // 2)
            body = self._passages[version // self._change_interval % 2] if stage == "chunk" else b""
            sizes |= {"passages": len(body)} if body else {}
            self._blobs[stage_key] = self._write_record(
                stage, self.inputs(stage, part, month), sizes, {"rows": _ROWS}, body
            )
        return self._blobs[stage_key]

    def _write_record(
        self, stage: str, inputs: dict[str, Any], sizes: dict[str, int], facts: dict[str, Any], first: bytes = b""
    ) -> list[BlobRef]:
        """Write a record, and its outputs of the given sizes; the first output has the bytes `first`."""
        key, bodies = Memo.compute_key(inputs), iter([first])
        outputs = {name: self._write_blob(f"{key} {name}", size, next(bodies, b"")) for name, size in sizes.items()}
        value = {"format": 1, "stage": stage, "key": key, "facts": facts, "inputs": inputs, "by": None}
        output_refs = {name: ref.to_json() for name, ref in outputs.items()}
        self._write_file(f"memo/{stage}/{key}.json", encode_json({**value, "outputs": output_refs, "nonce": "0" * 16}))
        return [*outputs.values()]

    def _write_blob(self, seed: str, size: int, body: bytes = b"") -> BlobRef:
        ref = BlobRef(digest_bytes(seed.encode()), size)
        self._write_file(ref.path, body, size)
        return ref

    def _write_ref(self, ref: str, number: int, snapshot: str) -> None:
        value = {"format": 1, "number": number, "snapshot": snapshot, "created_at": "2026-11-01T00:00:00+00:00"}
        value |= {"previous": None, "nonce": "0" * 32, "note": ""}
        self._write_file(f"refs/{ref}/{number:08d}.json", encode_json(value))

    def _write_file(self, path: str, data: bytes, size: int | None = None) -> None:
        folder, _, name = f"wikipedia/{path}".rpartition("/")
        if name not in Far.folders.get(folder, {}):
            Far.write(f"wikipedia/{path}", data, len(data) if size is None else size, time.time() - self._age - 3600)


def build_passage_file(*, changed: bool) -> bytes:
    """Return the bytes of a part's passage file before or after a month's changes."""
    chance, words = random.Random(0), [f"w{number}" for number in range(5_000)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "passages.parquet")
        with PassageWriter(path) as writer:
            for article in range(_ARTICLES):
                page = str(_ARTICLES + 1 if changed and article == 0 else article + 1)  # deletes one article, adds one
                for position in range(_EACH):
                    text = " ".join(chance.choices(words, k=100))
                    if changed and position == 0 and article % _EDITED == 1:
                        text = f"Edited. {text}"
                    digest = Passage.hash_of(page, text)
                    writer.write(Passage(f"{page}-{position}", page, 1, page, "", text, 100 * position, 100, digest))
        return path.read_bytes()


def list_verbs(library: DescriptorLibrary) -> dict[str, Callable[[], Any]]:
    """Return the measured operations by name, in their order."""
    store = library.store
    return {
        "plan": partial(plan_build, library),
        "look-ups": partial(look_up_records, library),
        "publish": lambda: len(
            find_missing_files(store, store.snapshots.get(store.snapshots.resolve("latest")).content)
        ),
        "refs": lambda: len(store.refs.list_names()),
        "log": lambda: len(store.refs.read_history("latest")),
        "diff": lambda: compare_months(store),
        "expire": lambda: len(expire_store(store, ExpirePolicy(keep=12, older_than=366 * 86400.0)).moves),
        "gc": lambda: {kind: tally.files for kind, tally in collect_garbage(store).items()},
    }


def compare_months(store: Store) -> dict[str, Any]:
    """Compare the last two months."""
    parent = store.refs.list_numbers("latest")[-2]
    diff = diff_snapshots(Snapshot.from_store(store, f"latest@{parent}"), Snapshot.from_store(store, "latest"))
    fetched_bytes = {kind: pull.fetched_bytes for kind, pull in diff.pull.items()}
    return {"articles": dict(diff.articles), "passages": dict(diff.passages), "fetched_bytes": fetched_bytes}


def plan_build(library: DescriptorLibrary) -> int:
    """Find the chunk outputs that the next build reuses for each part; return their number."""
    parent = Parent.from_ref(library.store, "latest")
    parts = (Part(f"part-{n:05d}", "wiki", n * _PAGES, (n + 1) * _PAGES - 1, ()) for n in range(library.size.parts))
    return sum(len(parent.find_chunked_parts(part)) for part in parts)


def look_up_records(library: DescriptorLibrary) -> int:
    """Look up the records of a rebuild in which nothing changed."""
    last = library.size.months - 1
    stage_inputs = [library.inputs(stage, part, last) for stage in _STAGES for part in range(library.size.parts)]
    stage_inputs += [library.inputs("shard", cell, last) for cell in range(library.size.cells)]
    return sum(stats is not None for stats in look_up_reports(_look_up_stats, stage_inputs, library.store))


def _look_up_stats(inputs: dict[str, Any], store: Store) -> dict[str, Any]:
    return dict(store.memo.get_or_create(inputs["stage"], inputs, _refuse)[0].stats)


def _refuse(_: object) -> StageResult:
    raise AssertionError("the stage has a record, so it must not run")


def measure_verbs(library: DescriptorLibrary, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name, seconds and requests of each operation."""
    for name, verb in list_verbs(library).items():
        with latency(seconds) as requests:
            start, cpu_start = time.perf_counter(), time.process_time()
            output = verb()
            elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            request_counts: Counter[str] = Counter(requests)
        line = f"{name}: {elapsed:.1f} s, {cpu:.1f} CPU s, {request_counts.total():,} requests"
        print(line, file=sys.stderr, flush=True)
        yield (
            name,
            {
                "seconds": round(elapsed, 1),
                "cpu_seconds": round(cpu, 1),
                "requests": dict(request_counts),
                "alone": round(request_counts.total() * seconds, 1),
                "found": output,
            },
        )


def main() -> None:
    """Write the store, measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=60)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--months", type=int, default=24)
    parser.add_argument("--changed", type=float, default=0.1)
    parser.add_argument("--ms", type=float, default=20.0, help="latency of a request in milliseconds")
    options = parser.parse_args()
    size = Size(options.parts, options.cells, options.months, options.changed)
    store = DescriptorLibrary(size)
    files = sum(map(len, Far.folders.values()))
    settings = {name: getattr(size, name) for name in ("parts", "cells", "months", "changed")}
    results = dict(measure_verbs(store, options.ms / 1e3))
    print(json.dumps({"benchmark": "descriptors", **settings, "ms": options.ms, "files": files, "verbs": results}))


if __name__ == "__main__":
    main()
