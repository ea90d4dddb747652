"""`bookwheel export`, `pull` and `convert-weights`: write copies of versions and of models."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.command.console import show_progress
from flows.command.reply import AnyName, AnyVersion, Common, Reply, StoreUrl
from rag_model.encoders.convert import convert_weights as convert_folder
from rag_model.encoders.convert import fetch_pickles
from rag_model.errors import UsageError, format_count
from rag_model.retrieve.indexes import derive_index_file
from rag_model.store.pulling.export import (
    Destination,
    ExportReport,
    Layout,
    export_snapshot,
    export_store,
    open_destination,
    parse_destination,
)
from rag_model.store.pulling.pull import PullReport
from rag_model.store.pulling.pull import pull as pull_version
from rag_model.store.store import EVALUATION_PREFIX, MODEL_PREFIX, Store
from rag_model.store.versions.evaluations import export_evaluation
from rag_model.store.versions.manifest import select_files
from rag_model.store.versions.models import export_model
from rag_model.store.versions.snapshot import Snapshot


def export(
    snapshot: AnyVersion,
    out: str,
    /,
    *,
    store: StoreUrl,
    layout: Layout | None = None,
    no_embeddings: bool = False,
    common: Common | None = None,
) -> Reply:
    """Write all passages of a snapshot, and their vectors, to a new folder for other tools.

    `model:NAME` writes the model's files unchanged: `from_pretrained` opens the folder, or the
    folders in it. `evaluation:ID` writes the report, rows and predictions of an evaluation.

    Args:
        out: A folder that does not exist yet; or hf://datasets/USER/NAME, for a model
            hf://USER/NAME: a repository of the Hugging Face Hub, or a folder in one, which gets
            all files in one commit. A new repository is private.
        layout: dpr: psgs_w100.tsv and .npy; jsonl: Pyserini, FlashRAG; store: a store of this
            snapshot alone; by default datasets: Parquet.
        no_embeddings: Leave the vectors out.
    """
    destination = parse_destination(out)
    with nullcontext() if isinstance(destination, Path) else show_progress("export"):
        return _export_any(store, snapshot, destination, layout, no_embeddings=no_embeddings)


def _export_any(
    store: str, snapshot: str, destination: Destination, layout: Layout | None, *, no_embeddings: bool
) -> Reply:
    if snapshot.startswith((MODEL_PREFIX, EVALUATION_PREFIX)):
        noun = "a model" if snapshot.startswith(MODEL_PREFIX) else "an evaluation"
        if layout or no_embeddings:
            raise UsageError(f"{snapshot} is {noun}, which has only one layout and no vectors: leave out the options")
        return (_export_model if snapshot.startswith(MODEL_PREFIX) else _export_evaluation)(
            store, snapshot.partition(":")[2], destination
        )
    report = _export_snapshot(store, snapshot, destination, layout or "datasets", embeddings=not no_embeddings)
    document = {**asdict(report), "path": str(report.path)}
    passages_text = f"{format_count(report.passages, 'passage')} of {report.snapshot[:12]}"
    text = f"wrote {passages_text} to {report.path}: {report.bytes:,} bytes"
    return Reply(document, text)


def _export_snapshot(store: str, name: str, out: Destination, layout: Layout, *, embeddings: bool) -> ExportReport:
    if layout == "store":
        if not embeddings:
            raise UsageError("layout `store` holds the whole snapshot: leave out --no-embeddings")
        return export_store(Store.open(store), name, out)
    with Snapshot.open(store, name) as opened_snapshot:
        return export_snapshot(opened_snapshot, out, layout, embeddings=embeddings)


def _export_model(store: str, name: str, out: Destination) -> Reply:
    report = export_model(Store.open(store), name, out)
    text = f"{report.kind} model {report.model[:12]} is in {report.path}: {report.bytes:,} bytes"
    return Reply({**asdict(report), "path": str(report.path)}, text)


def _export_evaluation(store: str, name: str, out: Destination) -> Reply:
    report = export_evaluation(Store.open(store), name, out)
    text = f"evaluation {report.evaluation[:12]} is in {report.path}: {report.bytes:,} bytes"
    return Reply({**asdict(report), "path": str(report.path)}, text)


def pull(
    ref: AnyName,
    dest: Path,
    /,
    *,
    store: StoreUrl,
    index: tuple[str, ...] = (),
    no_embeddings: bool = False,
    passages_only: bool = False,
    no_mapped: bool = False,
    keep: int | None = None,
    common: Common | None = None,
) -> Reply:
    """Fetch the files of a snapshot that DEST lacks, verify them, and switch DEST to it atomically.

    If an earlier snapshot is in DEST, only vectors of new passages are fetched, and an inverted
    index is derived from the earlier one. Files that were left out are added by another pull that
    includes them. `model:NAME` pulls a model in the same way, to another folder; `answer --model
    DEST/current` uses it.

    Args:
        dest: A folder; `DEST/current` is a link to the version that was pulled last.
        index: Pull only this index, or `exact`; repeat it for more.
        no_embeddings: Leave out the vectors, and the indexes that rerank by them.
        passages_only: Pull only the passages.
        no_mapped: Write no memory-mapped copy of the passages, which takes three times their size.
        keep: Number of versions to keep in DEST: those that were pulled last. Versions being read
            are kept as well. By default all are kept. With a number, versions that were taken down
            are deleted.
    """
    opened_store = Store.open(store)
    catalog, name = opened_store.find_catalog(ref)
    options: dict[str, Any] = {"keep_snapshots": keep}
    if catalog is not opened_store.snapshots:
        if index or no_embeddings or passages_only or no_mapped:
            raise UsageError(
                f"{ref} is {catalog.noun_phrase}, of which all files are pulled: leave out the "
                "options that select files"
            )
        version = f"{catalog.noun}:{catalog.resolve_trusted(name)}"
    else:
        version = catalog.resolve_trusted(name)
        options["select"] = select_files(
            catalog.get(version).content, indexes=index, embeddings=not no_embeddings, passages_only=passages_only
        )
        options["with_mapped_copies"], options["derive_index"] = not no_mapped, derive_index_file
    with show_progress("pull", as_bytes=True) as report_progress:
        report = pull_version(opened_store, version, dest, **options, on_progress=report_progress)
    return _build_pull_reply(report, catalog.noun)


def _build_pull_reply(report: PullReport, noun: str) -> Reply:
    document = {
        noun: report.snapshot,
        "path": str(report.path),
        "fetched_bytes": report.fetched_bytes,
        "reused_bytes": report.reused_bytes,
        "pruned": list(report.pruned),
        "taken_down": list(report.taken_down),
    }
    text = (
        f"{noun} {report.snapshot[:12]} is in {report.path}: "
        f"{report.fetched_bytes:,} bytes fetched, {report.reused_bytes:,} there already"
        + (f"; {len(report.pruned)} earlier {noun}s deleted" if report.pruned else "")
    )
    if report.taken_down:
        short_ids = ", ".join(snapshot_id[:12] for snapshot_id in report.taken_down)
        text += f"\ntaken down since, and still in {report.path.parent}: {short_ids}; pull with --keep to delete them"
    return Reply(document, text)


def convert_weights(source: str, out: str, /, *, common: Common | None = None) -> Reply:
    """Write a copy of a model whose pickled weights become safetensors, bit for bit.

    A pickle can run code when it is read. The pickle is read in a process of its own, with bounded
    time and memory and without a network, and refused if it holds anything but tensors.

    Args:
        source: A folder, or NAME or NAME@REVISION of the Hugging Face Hub, with pytorch_model.bin.
        out: A folder that does not exist yet; or hf://USER/NAME, a repository of the Hub.
    """
    destination = parse_destination(out)
    folder = fetch_pickles(source)
    with open_destination(destination, "model") as staging_folder:
        conversion = convert_folder(folder, staging_folder, source)
    document = {**asdict(conversion), "path": str(destination)}
    sizes_text = f"{format_count(conversion.tensors, 'tensor')}, {conversion.bytes:,} bytes"
    return Reply(document, f"converted {conversion.source} to {destination}: {sizes_text}")
