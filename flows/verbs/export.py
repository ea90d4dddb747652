"""`bookwheel export`: write a snapshot in a layout of other tools, or a model as a folder."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from flows.command.console import show_progress
from flows.command.reply import AnyVersion, Common, Reply, StoreUrl
from rag_model.errors import UsageError, format_count
from rag_model.store.pulling.export import (
    Destination,
    ExportReport,
    Layout,
    export_snapshot,
    export_store,
    parse_destination,
)
from rag_model.store.store import EVALUATION_PREFIX, MODEL_PREFIX, Store
from rag_model.store.versions.evaluations import export_evaluation
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
            raise UsageError("the layout `store` contains the whole snapshot: leave out --no-embeddings")
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
