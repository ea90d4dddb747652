"""`bookwheel pull`: materialise a snapshot, or a model, in a local folder."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.console import shown
from flows.command.reply import AnyName, Common, Reply, StoreUrl
from rag_model.errors import UsageError
from rag_model.retrieve.derived import derive
from rag_model.store.pulling.kinds import chosen
from rag_model.store.pulling.pull import PullReport
from rag_model.store.pulling.pull import pull as pull_version
from rag_model.store.store import Store


def pull(
    ref: AnyName,
    dest: Path,
    /,
    *,
    store: StoreUrl,
    index: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Pull only this index, or `exact`; repeat it for more."),
    ] = (),
    no_embeddings: Annotated[
        bool, Parameter(negative="", help="Leave out the vectors, and the indexes that rank by them.")
    ] = False,
    passages_only: Annotated[bool, Parameter(negative="", help="Pull only the passages.")] = False,
    no_mapped: Annotated[
        bool,
        Parameter(negative="", help="Make no memory-mapped copy of the passages, which is three times their size."),
    ] = False,
    keep: Annotated[
        int | None,
        Parameter(
            help="Number of versions pulled last to keep in DEST, besides those being read; by default all. With it, "
            "versions that were taken down are deleted."
        ),
    ] = None,
    common: Common | None = None,
) -> Reply:
    """Copy a snapshot to DEST: only what is missing there, verified, and put in place in one step.

    If an earlier snapshot is in DEST, only vectors of new passages are fetched, and an index of words is made of the
    earlier one. Files that were left out are added by another pull that includes them. `model:NAME` pulls a model in
    the same way, to another folder; `answer --model DEST/current` uses it.

    Parameters
    ----------
    dest
        A folder; `DEST/current` is a link to the version that was pulled last.
    """
    opened = Store.open(store)
    shelf, name = opened.shelf(ref)
    taken: dict[str, Any] = {"keep": keep}
    if shelf is not opened.snapshots:
        if index or no_embeddings or passages_only or no_mapped:
            raise UsageError(
                f"{ref} is {shelf.called}, which is pulled whole: leave out the options that select a snapshot's files"
            )
        named = f"{shelf.noun}:{shelf.trusted(name)}"
    else:
        named = shelf.trusted(name)
        taken["select"] = chosen(
            shelf.get(named).content, indexes=index, embeddings=not no_embeddings, passages_only=passages_only
        )
        taken["mapped"], taken["derive"] = not no_mapped, derive
    with shown("pull", as_bytes=True) as tell:
        report = pull_version(opened, named, dest, **taken, on_progress=tell)
    return _told(report, shelf.noun)


def _told(report: PullReport, noun: str) -> Reply:
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
        named = ", ".join(one[:12] for one in report.taken_down)
        text += f"\ntaken down since, and still in {report.path.parent}: {named}; pull with --keep to delete them"
    return Reply(document, text)
