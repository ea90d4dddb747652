"""`bookwheel pull`: a snapshot in a folder of one's own."""

from dataclasses import asdict
from pathlib import Path

from flows.reply import Common, Reply, StoreUrl
from rag_model.store.pull import pull as pull_snapshot
from rag_model.store.store import Store


def pull(ref: str, dest: Path, /, *, store: StoreUrl, common: Common | None = None) -> Reply:
    """Copy a snapshot to DEST: only what is missing there, verified, and put in place in one step.

    Parameters
    ----------
    ref
        A ref, ref@number, an id, or a unique prefix of one.
    dest
        A folder; `DEST/current` names the snapshot that was pulled last.
    """
    opened = Store.open(store)
    report = pull_snapshot(opened, opened.snapshots.resolve(ref), dest)
    document = {**asdict(report), "path": str(report.path)}
    text = (
        f"snapshot {report.snapshot[:12]} is in {report.path}: "
        f"{report.fetched_bytes:,} bytes fetched, {report.reused_bytes:,} there already"
    )
    return Reply(document, text)
