"""Export a snapshot to layouts that other tools read.

| layout | files | for |
| --- | --- | --- |
| `dpr` | `psgs_w100.tsv`; `wikipedia_passages_0.npy`, row i for id i of `wikipedia_passages_0.ids.npy` | DPR |
| `jsonl` | `corpus.jsonl` of `{"id", "contents"}`: title, line break, text | Pyserini, FlashRAG |
| `datasets` | `data/train-00000-of-00008.parquet` of `id, text, title, revised, embeddings` | `load_dataset(folder)` |

`revised` is when the article's revision was saved; a line of `corpus.jsonl` has it too where it is known.
DPR pickles its vectors as `(id, vector)` pairs; here the same content is two plain arrays. Parts stream, so
memory does not grow with the snapshot. A README names the corpus and its licence.
"""

import csv
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.corpus.moments import iso_of
from rag_model.corpus.passages import DATE, PASSAGE_SCHEMA, in_seconds
from rag_model.errors import StoreError, UsageError
from rag_model.landing import TEMPORARY, sync
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.pulling.kinds import kind_of
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

Layout = Literal["dpr", "jsonl", "datasets"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    snapshot: str  # full id
    path: Path
    layout: Layout
    passages: int
    bytes: int


def export(snapshot: Snapshot, out: Path, layout: Layout, *, embeddings: bool = True) -> ExportReport:
    """Write all passages of a snapshot, in row order, to the new folder `out`, which appears complete or not at all.

    Vectors are included if `embeddings`, if the layout has a place for them, and if the snapshot has vectors.

    Raises:
        StoreError: a file of the snapshot is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already, or there is no such layout.
    """
    if layout not in get_args(Layout):
        raise UsageError(f"there is no layout {layout!r}: choose from {', '.join(get_args(Layout))}")
    vectors = embeddings and any(kind_of(file) == "embeddings" for file in snapshot.manifest.content.files)
    try:
        with new_folder(out) as building:
            _WRITERS[layout](snapshot, building, vectors)
            (building / "README.md").write_text(_readme(snapshot, vectors), encoding="utf-8")
            size = sum(path.stat().st_size for path in building.rglob("*") if path.is_file())
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
    return ExportReport(snapshot.id, out, layout, snapshot.n, size)


def write_files(store: Store, files: Mapping[str, BlobRef], out: Path) -> int:
    """Write a version's files, each verified, to the new folder `out`; return their bytes.

    Raises:
        StoreError: a file is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already.
    """
    try:
        with new_folder(out) as building:
            for path, ref in files.items():
                store.blobs.fetch(ref, building / path)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
    return sum(ref.size for ref in files.values())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `out` when the block succeeds and deleted when it fails.

    Raises:
        UsageError: `out` exists already.
        OSError: the folder cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"there is something at {out} already: give a new folder")
    building = out.absolute().with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    building.mkdir(parents=True)
    try:
        yield building
        for path in building.rglob("*"):
            sync(path)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_dpr(snapshot: Snapshot, folder: Path, vectors: bool) -> None:
    with (folder / "psgs_w100.tsv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="\t", lineterminator="\n")
        rows.writerow(["id", "text", "title"])
        for number, part in enumerate(snapshot.parts):
            ids: list[str] = []
            for batch in snapshot.batches(part.name, ["id", "title", "text"]):
                own, titles, texts = (column.to_pylist() for column in batch.columns)
                rows.writerows(zip(own, texts, titles, strict=True))
                ids += own if vectors else []
            if vectors:
                stem = folder / f"wikipedia_passages_{number}"
                np.save(stem.with_suffix(".ids.npy"), np.array(ids, dtype=np.str_), allow_pickle=False)
                np.save(stem.with_suffix(".npy"), snapshot.embeddings(part.name), allow_pickle=False)


def _write_jsonl(snapshot: Snapshot, folder: Path, vectors: bool) -> None:
    del vectors  # the layout has no place for them
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for part in snapshot.parts:
            for batch in snapshot.batches(part.name, ["id", "title", "text", DATE]):
                *texts, dates = batch.columns
                columns = [*texts, in_seconds(dates)]
                for own, title, text, revised in zip(*map(pa.Array.to_pylist, columns), strict=True):
                    date = {} if revised is None else {DATE: iso_of(revised)}
                    line = json.dumps({"id": own, "contents": f"{title}\n{text}", **date}, ensure_ascii=False)
                    file.write(line + "\n")


def _write_datasets(snapshot: Snapshot, folder: Path, vectors: bool) -> None:
    (folder / "data").mkdir()
    fields = [*(pa.field(name, pa.string()) for name in ("id", "text", "title")), PASSAGE_SCHEMA.field(DATE)]
    schema = pa.schema([*fields, pa.field("embeddings", pa.list_(pa.float32()))] if vectors else fields)
    for number, part in enumerate(snapshot.parts):
        path = folder / "data" / f"train-{number:05d}-of-{len(snapshot.parts):05d}.parquet"
        found = snapshot.embeddings(part.name) if vectors else None
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            start = 0
            for batch in snapshot.batches(part.name, ["id", "title", "text", DATE]):
                columns = [batch[field.name] for field in fields]
                if found is not None:
                    rows = found[start : start + batch.num_rows].astype(np.float32)
                    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
                    columns.append(pa.ListArray.from_arrays(offsets, rows.ravel()))
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                start += batch.num_rows


_WRITERS: dict[Layout, Callable[[Snapshot, Path, bool], None]] = {
    "dpr": _write_dpr,
    "jsonl": _write_jsonl,
    "datasets": _write_datasets,
}


def _readme(snapshot: Snapshot, vectors: bool) -> str:
    corpus = snapshot.manifest.content.corpus
    licence = f", {corpus['licence']}, by its authors; excerpts, markup removed" if corpus.get("licence") else ""
    space = f"Vectors: {snapshot.space.get('name')}.\n" if vectors and snapshot.space else ""
    return (
        f"{snapshot.n:,} passages of bookwheel snapshot {snapshot.id}.\n"
        f"Text: {corpus.get('base') or corpus.get('dbname') or corpus.get('kind') or 'unknown'}{licence}.\n{space}"
    )
