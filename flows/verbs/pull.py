"""`bookwheel pull`: copy a snapshot, or a model, to a local folder."""

from pathlib import Path
from typing import Any

from flows.command.console import show_progress
from flows.command.reply import AnyName, Common, Reply, StoreUrl
from rag_model.errors import UsageError
from rag_model.retrieve.indexes import derive_index_file
from rag_model.store.pulling.pull import PullReport
from rag_model.store.pulling.pull import pull as pull_version
from rag_model.store.store import Store
from rag_model.store.versions.manifest import select_files


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
        no_embeddings: Leave out the vectors, and the indexes that rank by them.
        passages_only: Pull only the passages.
        no_mapped: Make no memory-mapped copy of the passages, which is three times their size.
        keep: Number of versions pulled last to keep in DEST, besides those being read; by
            default all. With it, versions that were taken down are deleted.
    """
    opened_store = Store.open(store)
    catalog, name = opened_store.find_catalog(ref)
    options: dict[str, Any] = {"keep": keep}
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
        options["mapped"], options["derive"] = not no_mapped, derive_index_file
    with show_progress("pull", as_bytes=True) as report_progress:
        report = pull_version(opened_store, version, dest, **options, on_progress=report_progress)
    return _build_reply(report, catalog.noun)


def _build_reply(report: PullReport, noun: str) -> Reply:
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
