"""`bookwheel export`: a snapshot in a layout that other tools read."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.reply import Common, Reply, StoreUrl
from rag_model.store.export import Layout
from rag_model.store.export import export as export_snapshot
from rag_model.store.snapshot import Snapshot


def export(
    snapshot: str,
    out: Path,
    /,
    *,
    store: StoreUrl,
    layout: Annotated[
        Layout, Parameter(help="dpr: psgs_w100.tsv and .npy; jsonl: Pyserini, FlashRAG; datasets: Parquet.")
    ] = "datasets",
    no_embeddings: Annotated[bool, Parameter(negative="", help="Leave the vectors out.")] = False,
    common: Common | None = None,
) -> Reply:
    """Write all passages of a snapshot, and their vectors, to a new folder for other tools.

    Parameters
    ----------
    snapshot
        A ref, ref@number, an id, or a unique prefix of one.
    out
        A folder that is not there yet.
    """
    with Snapshot.open(store, snapshot) as opened:
        report = export_snapshot(opened, out, layout, embeddings=not no_embeddings)
    document = {**asdict(report), "path": str(report.path)}
    text = f"{report.passages:,} passages of {report.snapshot[:12]} are in {report.path}: {report.bytes:,} bytes"
    return Reply(document, text)
