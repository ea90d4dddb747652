"""`bookwheel pull`: a snapshot in a folder of one's own."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.console import shown
from flows.reply import Common, Reply, StoreUrl
from rag_model.store.kinds import chosen
from rag_model.store.pull import pull as pull_snapshot
from rag_model.store.store import Store


def pull(
    ref: str,
    dest: Path,
    /,
    *,
    store: StoreUrl,
    index: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Of the indexes this one alone, or `exact`; give it again for one more."),
    ] = (),
    no_embeddings: Annotated[
        bool, Parameter(negative="", help="Leave the vectors out; only `exact` needs them.")
    ] = False,
    passages_only: Annotated[bool, Parameter(negative="", help="Leave out all but the passages.")] = False,
    no_mapped: Annotated[
        bool,
        Parameter(negative="", help="Derive no memory-mapped copy of the passages, three times their size."),
    ] = False,
    keep: Annotated[
        int | None,
        Parameter(help="Delete all but so many snapshots in DEST, those pulled last and those being read; else none."),
    ] = None,
    common: Common | None = None,
) -> Reply:
    """Copy a snapshot to DEST: only what is missing there, verified, and put in place in one step.

    What was left out is added by pulling again without leaving it out.

    Parameters
    ----------
    ref
        A ref, ref@number, an id, or a unique prefix of one.
    dest
        A folder; `DEST/current` names the snapshot that was pulled last.
    """
    opened = Store.open(store)
    manifest = opened.snapshots.get(opened.snapshots.resolve(ref))
    select = chosen(manifest.content, indexes=index, embeddings=not no_embeddings, passages_only=passages_only)
    with shown("pull", as_bytes=True) as tell:
        report = pull_snapshot(
            opened, manifest.id, dest, select=select, mapped=not no_mapped, keep=keep, on_progress=tell
        )
    document = {**asdict(report), "path": str(report.path)}
    text = (
        f"snapshot {report.snapshot[:12]} is in {report.path}: "
        f"{report.fetched_bytes:,} bytes fetched, {report.reused_bytes:,} there already"
        + (f"; {len(report.pruned)} earlier snapshots deleted" if report.pruned else "")
    )
    return Reply(document, text)
