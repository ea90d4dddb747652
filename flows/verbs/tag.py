"""`bookwheel tag`: create, move or delete a ref of a snapshot or a model."""

from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl, Yes
from rag_model.errors import UsageError
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag as tag_snapshot
from rag_model.store.versions.moves import untag
from rag_model.store.versions.refs import RefMove


def tag(
    snapshot: str,
    ref: str | None = None,
    /,
    *,
    store: StoreUrl,
    note: Annotated[str, Parameter(help="A note for the ref's log.")] = "",
    delete: Annotated[
        bool, Parameter(negative="", help="`tag --delete REF`: delete REF; a dry run unless --yes.")
    ] = False,
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Move REF to a snapshot, and create it if necessary; or, with --delete, delete it. Earlier moves stay in its log.

    Parameters
    ----------
    snapshot
        A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a model.
    ref
        Letters, digits, `.`, `_` and `-`.
    """
    opened = Store.open(store)
    if delete:
        if ref is not None:
            raise UsageError(f"tag --delete takes one ref and no snapshot: `tag --delete {ref}`")
        return _deleted(opened, snapshot, yes)
    if ref is None:
        raise UsageError(f"tag takes a snapshot and a ref: `tag {snapshot} REF`")
    return moved(ref, tag_snapshot(opened, snapshot, ref, note), opened.shelf(snapshot)[0].noun)


def _deleted(store: Store, ref: str, yes: bool) -> Reply:
    shelf, name = store.shelf(ref)
    now = untag(store, ref, dry_run=True)
    ended = untag(store, ref) if yes else now
    standing = {other: shelf.refs.current(other) for other in shelf.refs.names() if other != name}
    others = [other for other, its in standing.items() if its is not None and its.snapshot == now.snapshot]
    document = {"dry_run": not yes, "ref": ref, "number": ended.number, shelf.noun: now.snapshot, "others": others}
    kept = f"still named by {', '.join(others)}" if others else "named by no other ref, so that `expire` deletes it"
    return Reply(
        document,
        f"{'deleted' if yes else 'would delete'} ref {ref}; {shelf.noun} {now.snapshot[:12]} is {kept}"
        + ("" if yes else "; nothing was changed: give --yes to do it"),
    )


def moved(ref: str, move: RefMove, noun: str) -> Reply:
    """Return the reply with the current move of a ref."""
    document = {"ref": ref, **move.to_json(noun)}
    del document["nonce"], document["format"]
    before = f", before {move.previous[:12]}" if move.previous else ""
    return Reply(document, f"{ref}@{move.number} is {noun} {move.snapshot[:12]}{before}")
