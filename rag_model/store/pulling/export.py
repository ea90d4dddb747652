"""Export a snapshot in the layouts that other tools read.

| layout | files | for |
| --- | --- | --- |
| `dpr` | `psgs_w100.tsv`; `wikipedia_passages_0.npy`, row i for id i of `wikipedia_passages_0.ids.npy` | DPR |
| `jsonl` | `corpus.jsonl` of `{"id", "contents"}`: title, line break, text | Pyserini, FlashRAG |
| `datasets` | `data/*.parquet` of `id, text, title, page_id, revised, embeddings` | `load_dataset(folder)` |
| `store` | a store with only this snapshot, under the ref `latest` | bookwheel |

`revised` is the time at which the article's revision was saved; if it is known, the lines of
`corpus.jsonl` also have it. DPR pickles its vectors as `(id, vector)` pairs; here the same content is two plain
arrays. Parts are streamed, so memory does not grow with the snapshot. A README, which is also the
card of a repository on the Hugging Face Hub, names the corpus and its licence.
"""

import csv
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rag_model.atomic_write import TEMPORARY_PREFIX, describe_write_error, fsync
from rag_model.corpus.passages import DATE, PASSAGE_SCHEMA, to_seconds
from rag_model.corpus.records import format_iso
from rag_model.errors import StoreError, UsageError, format_count
from rag_model.extras import require
from rag_model.process import lock_folder, remove_unlocked_folders
from rag_model.secrets import refuse_secret, refuse_url_as_path
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest, file_kind
from rag_model.store.versions.snapshot import Snapshot

Destination = Path | str  # a folder, hf://datasets/USER/NAME/FOLDER, or hf://USER/NAME for a model
_HUB_SCHEME = "hf://"
Layout = Literal["dpr", "jsonl", "datasets", "store"]
_REF = "latest"  # name of the ref in an exported store
_LICENCES = {"CC BY-SA 4.0": "cc-by-sa-4.0"}  # identifiers of licences on the Hub, by name


def parse_destination(text: str) -> Destination:
    """Parse the destination of an export: an `hf://` URL or a local path.

    Raises:
        UsageError: the text is another URL, or a URL that may contain a secret.
    """
    if text.startswith(_HUB_SCHEME):
        refuse_secret(text)
        return text
    refuse_url_as_path(Path(text))
    return Path(text)


def export_files(
    store: Store,
    files: Mapping[str, BlobRef],
    out: Destination,
    kind: Literal["dataset", "model"] = "dataset",
) -> int:
    """Write and verify a version's files in the new folder `out`; return the number of bytes.

    `kind` is the kind of repository, if `out` is on the Hub.

    Raises:
        StoreError: a file is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already.
    """
    with open_destination(out, kind) as folder:
        for path, ref in files.items():
            store.blobs.fetch(ref, folder / path)
    return sum(ref.size for ref in files.values())


@contextmanager
def open_destination(out: Destination, kind: Literal["dataset", "model"] = "dataset") -> Iterator[Path]:
    """Yield a temporary folder; rename it to `out` when the block succeeds, delete it on failure.

    Raises:
        StoreError: the folder cannot be written.
        UsageError: `out` exists already, or is in a repository of another kind.
    """
    try:
        if isinstance(out, Path):
            with _open_local_folder(out) as folder:
                yield folder
        else:
            require("huggingface_hub", "hub")
            open_commit = require("rag_model.store.objects.hub", "hub").open_commit
            with open_commit(out, kind, "Export by bookwheel") as folder:
                yield folder
    except OSError as error:
        raise StoreError(describe_write_error(out, error)) from error


@contextmanager
def _open_local_folder(out: Path) -> Iterator[Path]:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already: give a new folder")
    temporary_prefix = f"{TEMPORARY_PREFIX}{out.name}-"
    remove_unlocked_folders(out.absolute().parent, temporary_prefix)
    staging_folder = out.absolute().with_name(f"{temporary_prefix}{secrets.token_hex(8)}")
    staging_folder.mkdir(parents=True)
    with lock_folder(staging_folder):
        try:
            yield staging_folder
            for path in staging_folder.rglob("*"):
                fsync(path)
            staging_folder.rename(out)
        finally:
            shutil.rmtree(staging_folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export."""

    snapshot: str  # full id
    path: Destination
    layout: Layout
    passages: int
    bytes: int


def export_snapshot(snapshot: Snapshot, out: Destination, layout: Layout, *, embeddings: bool = True) -> ExportReport:
    """Write all passages of a snapshot, in row order, to the new folder `out`.

    The folder appears complete or not at all. It may be in a dataset repository of the Hugging Face
    Hub (`hf://datasets/USER/NAME/FOLDER`). Vectors are included if `embeddings` is
    set, the layout supports them, and the snapshot has vectors. `export_store` writes the layout
    `store`.

    Raises:
        StoreError: a file of the snapshot is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already, or there is no such layout.
    """
    if layout not in _WRITERS:
        raise UsageError(f"there is no layout {layout!r}: choose from {', '.join(_WRITERS)}")
    with_vectors = embeddings and any(file_kind(file) == "embeddings" for file in snapshot.manifest.content.files)
    with open_destination(out) as folder:
        _WRITERS[layout](snapshot, folder, with_vectors)
        return _finish_export(snapshot.manifest, folder, out, layout, with_vectors)


def export_store(store: Store, name: str, out: Destination) -> ExportReport:
    """Write a complete snapshot to the new folder `out` as a store with the ref `latest`.

    `name` is an id, a prefix of an id, a ref or ref@number. The manifest and the move are signed if
    the environment has a key and the manifest has a trusted signature
    (`Catalog.has_trusted_signature`).

    Raises:
        StoreError: there is no such snapshot, one of its files is missing or damaged, or `out`
            cannot be written.
        UsageError: `out` exists already.
    """
    identity = store.snapshots.resolve_trusted(name)
    manifest = store.snapshots.get(identity)
    is_signed = store.snapshots.has_trusted_signature(identity)
    with open_destination(out) as folder:
        exported_store = Store.open(str(folder), create=True)
        for ref in {*manifest.content.files.values()}:
            store.blobs.fetch(ref, folder / ref.path)
        exported_store.snapshots.publish(manifest, sign=is_signed)
        exported_store.refs.move(_REF, identity, 0, sign=is_signed)
        return _finish_export(manifest, folder, out, "store", with_vectors=True)


def _finish_export(
    manifest: Manifest, folder: Path, out: Destination, layout: Layout, with_vectors: bool
) -> ExportReport:
    """Write the README, and return the report."""
    (folder / "README.md").write_text(_render_readme(manifest, out, layout, with_vectors), encoding="utf-8")
    export_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return ExportReport(manifest.id, out, layout, manifest.content.n, export_bytes)


def _write_dpr(snapshot: Snapshot, folder: Path, with_vectors: bool) -> None:
    with (folder / "psgs_w100.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        # In Python 3.11 and 3.12, `writer` does not quote a carriage return, where readers end a row.
        quoting_writer = csv.writer(file, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerow(["id", "text", "title"])
        for part_number, part in enumerate(snapshot.parts):
            passage_ids: list[str] = []
            for batch in snapshot.batches(part.name, ["id", "title", "text"]):
                batch_ids, titles, texts = (column.to_pylist() for column in batch.columns)
                for row in zip(batch_ids, texts, titles, strict=True):
                    (quoting_writer if any("\r" in field for field in row) else writer).writerow(row)
                passage_ids += batch_ids if with_vectors else []
            if with_vectors:
                path_stem = folder / f"wikipedia_passages_{part_number}"
                np.save(path_stem.with_suffix(".ids.npy"), np.array(passage_ids, dtype=np.str_), allow_pickle=False)
                np.save(path_stem.with_suffix(".npy"), snapshot.embeddings(part.name), allow_pickle=False)


def _write_jsonl(snapshot: Snapshot, folder: Path, with_vectors: bool) -> None:
    del with_vectors  # this layout has no vectors
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for part in snapshot.parts:
            for batch in snapshot.batches(part.name, ["id", "title", "text", DATE]):
                *texts, dates = batch.columns
                columns = [*texts, to_seconds(dates)]
                for passage_id, title, text, revised_at in zip(*map(pa.Array.to_pylist, columns), strict=True):
                    date_field = {} if revised_at is None else {DATE: format_iso(revised_at)}
                    json_line = json.dumps(
                        {"id": passage_id, "contents": f"{title}\n{text}", **date_field},
                        ensure_ascii=False,
                    )
                    file.write(json_line + "\n")


def _write_datasets(snapshot: Snapshot, folder: Path, with_vectors: bool) -> None:
    (folder / "data").mkdir()
    fields = [
        *(pa.field(name, pa.string()) for name in ("id", "text", "title", "page_id")),
        PASSAGE_SCHEMA.field(DATE),
    ]
    schema = pa.schema([*fields, pa.field("embeddings", pa.list_(pa.float32()))] if with_vectors else fields)
    for part_number, part in enumerate(snapshot.parts):
        path = folder / "data" / f"train-{part_number:05d}-of-{len(snapshot.parts):05d}.parquet"
        embeddings = snapshot.embeddings(part.name) if with_vectors else None
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            first_row = 0
            for batch in snapshot.batches(part.name, [field.name for field in fields]):
                columns = [batch[field.name] for field in fields]
                if embeddings is not None:
                    vectors = embeddings[first_row : first_row + batch.num_rows].astype(np.float32)
                    offsets = np.arange(0, vectors.size + 1, vectors.shape[1], dtype=np.int32)
                    columns.append(pa.ListArray.from_arrays(offsets, vectors.ravel()))
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                first_row += batch.num_rows


_WRITERS: dict[Layout, Callable[[Snapshot, Path, bool], None]] = {
    "dpr": _write_dpr,
    "jsonl": _write_jsonl,
    "datasets": _write_datasets,
}


def _render_readme(manifest: Manifest, out: Destination, layout: Layout, with_vectors: bool) -> str:
    """Render a dataset card: metadata for the Hub, followed by a description."""
    content, corpus = manifest.content, manifest.content.corpus
    licence_name = str(corpus.get("licence") or "")
    described_licence = "licence unknown" if licence_name == "unknown" else licence_name
    metadata = [
        "tags:",
        "- bookwheel",
        *([f"license: {_LICENCES[licence_name]}"] if licence_name in _LICENCES else []),
    ]
    licence_clause = f", {described_licence}, by its authors; excerpts, markup removed" if licence_name else ""
    space_line = f"Vectors: {content.space.get('name')}.\n" if with_vectors and content.space else ""
    corpus_name = corpus.get("base") or corpus.get("dbname") or corpus.get("kind") or "unknown"
    command_lines = f"\n    bookwheel search 'A question?' --store {out}\n" if layout == "store" else ""
    return "\n".join(
        [
            *("---", *metadata, "---"),
            f"{format_count(content.n, 'passage')} of bookwheel snapshot {manifest.id}.",
            f"Text: {corpus_name}{licence_clause}.\n{space_line}{command_lines}",
        ]
    )
