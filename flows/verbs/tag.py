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
    """Move REF to a snapshot, and create it if necessary; with --delete, delete it.

    Earlier moves stay in its log.

    Parameters
    ----------
    snapshot
        A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a
        model.
    ref
        Letters, digits, `.`, `_` and `-`.
    """
    opened_store = Store.open(store)
    if delete:
        if ref is not None:
            raise UsageError(f"tag --delete takes one ref and no snapshot: `tag --delete {ref}`")
        return _delete_ref(opened_store, snapshot, yes)
    if ref is None:
        raise UsageError(f"tag takes a snapshot and a ref: `tag {snapshot} REF`")
    return build_move_reply(
        ref, tag_snapshot(opened_store, snapshot, ref, note), opened_store.find_catalog(snapshot)[0].noun
    )


def _delete_ref(store: Store, ref: str, yes: bool) -> Reply:
    catalog, name = store.find_catalog(ref)
    current_move = untag(store, ref, dry_run=True)
    deletion = untag(store, ref) if yes else current_move
    moves_by_ref = {
        other_ref: catalog.refs.find_current(other_ref) for other_ref in catalog.refs.list_names() if other_ref != name
    }
    other_refs = [
        other_ref
        for other_ref, move in moves_by_ref.items()
        if move is not None and move.snapshot == current_move.snapshot
    ]
    document = {
        "dry_run": not yes,
        "ref": ref,
        "number": deletion.number,
        catalog.noun: current_move.snapshot,
        "others": other_refs,
    }
    consequence = (
        f"still named by {', '.join(other_refs)}"
        if other_refs
        else "named by no other ref, so that `expire` deletes it"
    )
    return Reply(
        document,
        f"{'deleted' if yes else 'would delete'} ref {ref}; "
        f"{catalog.noun} {current_move.snapshot[:12]} is {consequence}"
        + ("" if yes else "; nothing was changed: give --yes to do it"),
    )


def build_move_reply(ref: str, move: RefMove, noun: str) -> Reply:
    """Build the reply that shows a move of a ref."""
    document = {"ref": ref, **move.to_json(noun)}
    del document["nonce"], document["format"]
    previous_text = f", before {move.previous[:12]}" if move.previous else ""
    return Reply(document, f"{ref}@{move.number} is {noun} {move.snapshot[:12]}{previous_text}")
