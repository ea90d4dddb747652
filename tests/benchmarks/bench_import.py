"""Measure `bookwheel import` of passages and vectors in Parquet, like `facebook/wiki_dpr`, in MB of vectors a second.

The peer is pyarrow alone: it reads the same columns and writes the same bytes of vectors, without
checks, digests and passages. Prints one JSON line: `ratio` is the peer's CPU seconds over ours,
with one process each; `vectors_mb_per_second` is by the wall time of the job with two workers, with
their start; `memory_growth` is our peak of anonymous memory over that of a quarter of the rows.
`python tests/benchmarks/bench_import.py [--rows 100000] [--dim 768]` takes half a minute.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from isolated_run import run_alone

from beam_jobs.job import run_job
from beam_jobs.job_settings import JobSettings
from rag_model.index.files.intake import inspect_vectors
from rag_model.snapshots.imported import collect_parts, import_part, plan_import
from rag_model.store.store import Store

GROUP = 1_000  # rows of a row group, as the Hub's converter writes them
WORDS = 100  # words of a passage
PART_BYTES = 4 * 768 * 12_500  # below the default, so that parts are equally large at both sizes


def write_files(folder: Path, rows: int, dim: int, files: int) -> None:
    """Write Parquet files of ids, texts of 100 words, titles and random vectors."""
    generator = np.random.default_rng(0)
    words = [f"w{number}" for number in range(20_000)]
    folder.mkdir()
    for number, ids in enumerate(np.array_split(np.arange(rows), files)):
        schema = pa.schema(
            [("id", pa.string()), ("text", pa.string()), ("title", pa.string()), ("embeddings", pa.list_(pa.float32()))]
        )
        with pq.ParquetWriter(folder / f"train-{number:05d}-of-{files:05d}.parquet", schema) as writer:
            for group_ids in np.array_split(ids, max(1, len(ids) // GROUP)):
                vectors = generator.standard_normal((len(group_ids), dim), dtype=np.float32)
                offsets = np.arange(0, vectors.size + 1, dim, dtype=np.int32)
                word_ids = generator.integers(0, len(words), (len(group_ids), WORDS))
                columns = [
                    pa.array(map(str, group_ids + 1)),
                    pa.array(" ".join(words[word] for word in row) for row in word_ids),
                    pa.array(f"title {row // 7}" for row in group_ids.tolist()),
                    pa.ListArray.from_arrays(offsets, pa.array(vectors.ravel())),
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def copy(folder: Path, out: Path) -> int:
    """Read the files with pyarrow and write the vectors unchanged; return their bytes."""
    size = 0
    with out.open("wb") as file:
        for path in sorted(folder.iterdir()):
            with pq.ParquetFile(path, buffer_size=8 << 20) as source:
                for batch in source.iter_batches(GROUP):
                    size += file.write(batch["embeddings"].flatten().to_numpy().data)
    return size


def import_alone(folder: Path, store: Path) -> int:
    """Import all parts in this process; return the number of passages."""
    target = Store.open(str(store), create=True)
    tasks = plan_import(target, f"{folder}/*.parquet", inspect_vectors([folder]), part_bytes=PART_BYTES)
    reports = [import_part(task, target) for task in tasks]
    return sum(part.rows for part in collect_parts(target, "", reports, "float32").passages)


def import_with_workers(folder: Path, store: Path) -> float:
    """Import all parts with two workers; return the seconds."""
    target, start = Store.open(str(store), create=True), time.perf_counter()
    tasks = plan_import(target, f"{folder}/*.parquet", inspect_vectors([folder]), part_bytes=PART_BYTES)
    run_job("import", import_part, tasks, JobSettings.new(str(store), ["--direct_num_workers=2"]))
    return time.perf_counter() - start


def main() -> None:
    """Measure both sides; print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="folder of all files; a slow disk limits the rate of the job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        tempfile.tempdir = os.environ["TMPDIR"] = name  # also for the work folders of workers
        work = Path(name)
        write_files(work / "all", options.rows, options.dim, 4)
        write_files(work / "quarter", options.rows // 4, options.dim, 4)
        peer = run_alone(copy, work / "all", work / "copy.bin")
        (work / "copy.bin").unlink()  # so that a million vectors fit into 8 GB of disk
        quarter = run_alone(import_alone, work / "quarter", work / "quarter-store")
        ours = run_alone(import_alone, work / "all", work / "store")
        shutil.rmtree(work / "store")
        seconds = import_with_workers(work / "all", work / "second-store")
        megabytes = peer.value / 1e6
        line = {
            "rows": options.rows,
            "dim": options.dim,
            "vectors_mb": round(megabytes),
            "ratio": round(peer.cpu_seconds / ours.cpu_seconds, 3),
            "vectors_mb_per_second": round(megabytes / seconds),
            "vectors_mb_per_cpu_second": round(megabytes / ours.cpu_seconds),
            "cpu_seconds": round(ours.cpu_seconds, 2),
            "pyarrow_cpu_seconds": round(peer.cpu_seconds, 2),
            "pyarrow_mb_per_second": round(megabytes / peer.seconds),
            "peak_mb": round(ours.anonymous_mb),
            "pyarrow_peak_mb": round(peer.anonymous_mb),
            "memory_growth": round(ours.anonymous_mb / quarter.anonymous_mb, 3),
        }
        if ours.value != options.rows:
            sys.exit(f"only {ours.value} of {options.rows} passages were imported")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
