"""`bookwheel tag`, `rollback` and `log`: create, move or delete a ref, and list its moves."""

from collections.abc import Iterator

from flows.command.reply import Common, Reply, StoreUrl, Yes
from rag_model.errors import UsageError
from rag_model.store.store import Store
from rag_model.store.versions.moves import rollback as roll_back
from rag_model.store.versions.moves import tag as tag_snapshot
from rag_model.store.versions.moves import untag
from rag_model.store.versions.refs import RefMove
from rag_model.store.versions.signatures import TrustedKeys


def tag(
    snapshot: str,
    ref: str | None = None,
    /,
    *,
    store: StoreUrl,
    note: str = "",
    delete: bool = False,
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Move REF to a snapshot, and create it if necessary; with --delete, delete it.

    Earlier moves stay in its log.

    Args:
        snapshot: A ref, ref@number, an id, or a unique prefix of one; with `model:` before it,
            that of a model.
        ref: Name of the ref: letters, digits, `.`, `_` and `-`.
        note: A note for the ref's log.
        delete: `tag --delete REF`: delete REF; a dry run unless --yes.
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
    deleted_move = untag(store, ref) if yes else current_move
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
        "number": deleted_move.number,
        catalog.noun: current_move.snapshot,
        "others": other_refs,
    }
    remaining_refs_text = (
        f"still named by {', '.join(other_refs)}"
        if other_refs
        else "named by no other ref, so that `expire` deletes it"
    )
    return Reply(
        document,
        f"{'deleted' if yes else 'would delete'} ref {ref}; "
        f"{catalog.noun} {current_move.snapshot[:12]} is {remaining_refs_text}"
        + ("" if yes else "; nothing was changed: give --yes to do it"),
    )


def build_move_reply(ref: str, move: RefMove, noun: str) -> Reply:
    """Build the reply that shows a move of a ref."""
    document = {"ref": ref, **move.to_json(noun)}
    del document["nonce"], document["format"]
    previous_text = f", before {move.previous[:12]}" if move.previous else ""
    return Reply(document, f"{ref}@{move.number} is {noun} {move.snapshot[:12]}{previous_text}")


def rollback(
    ref: str,
    /,
    *,
    store: StoreUrl,
    to: int | None = None,
    common: Common | None = None,
) -> Reply:
    """Move REF back to a snapshot that it named before; exit 3 if its files are missing.

    Args:
        ref: The ref to move, `model:NAME` for a ref of models; `bookwheel log --ref REF` lists
            its numbers, and REF@NUMBER is the same as REF --to NUMBER.
        to: A number in the ref's log; by default the one that names the previous snapshot.
    """
    opened_store = Store.open(store)
    name, _, move_number = ref.partition("@")
    if to is None and move_number.isdecimal():
        ref, to = name, int(move_number)
    return build_move_reply(ref, roll_back(opened_store, ref, to), opened_store.find_catalog(ref)[0].noun)


def log(*, store: StoreUrl, ref: str = "latest", common: Common | None = None) -> Reply:
    """List the moves of a ref, newest first, with number, snapshot (or model), time and note.

    A deleted ref keeps its log.

    A snapshot that a takedown replaced is shown as its replacement. With `--trust` the list says
    who signed each move; `show` says who signed the snapshot.

    Args:
        ref: The ref whose moves to list; `model:NAME` for a ref of models.
    """
    catalog, name = Store.open(store).find_catalog(ref)
    moves, trusted_keys = catalog.refs.read_history(name)[::-1], TrustedKeys.from_environment()
    signer_by_number = {
        move.number: _describe_signer(catalog.refs.find_signer(trusted_keys, name, move.number))
        for move in moves
        if trusted_keys
    }
    document = [
        {"number": move.number, catalog.noun: move.snapshot or None, "created_at": move.created_at, "note": move.note}
        | ({"signed": signer_by_number[move.number]} if trusted_keys else {})
        for move in moves
    ]
    lines = ["  ".join(_iter_columns(ref, move, signer_by_number.get(move.number))).rstrip() for move in moves]
    return Reply(document, "\n".join(lines) or f"ref {ref} has never been moved in {store}")


def _describe_signer(signer: str | None) -> str:
    return f"signed by {signer}" if signer else "not signed by a trusted key"


def _iter_columns(ref: str, move: RefMove, signer_text: str | None) -> Iterator[str]:
    yield from (f"{ref}@{move.number}", f"{move.snapshot[:12] or 'nothing':<12}", move.created_at)
    if signer_text:
        yield signer_text
    yield move.note
