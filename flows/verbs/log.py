"""`bookwheel log`: the history of a ref."""

from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl
from rag_model.store.store import Store
from rag_model.store.versions.refs import RefMove
from rag_model.store.versions.signatures import TrustedKeys


def log(
    *,
    store: StoreUrl,
    ref: Annotated[str, Parameter(help="The ref whose moves to list; `model:NAME` for a ref of models.")] = "latest",
    common: Common | None = None,
) -> Reply:
    """List the moves of a ref, newest first, with number, snapshot (or model), time and note.

    A deleted ref keeps its log.

    A snapshot that a takedown replaced is shown as its replacement. With `--trust` it says who
    signed each move; `show` says who signed the snapshot.
    """
    catalog, name = Store.open(store).find_catalog(ref)
    moves, trust = catalog.refs.read_history(name)[::-1], TrustedKeys.from_environment()
    signatures = {
        move.number: _describe_signer(catalog.refs.find_signer(trust, name, move.number)) for move in moves if trust
    }
    document = [
        {"number": move.number, catalog.noun: move.snapshot or None, "created_at": move.created_at, "note": move.note}
        | ({"signed": signatures[move.number]} if trust else {})
        for move in moves
    ]
    lines = ["  ".join(_iter_fields(ref, move, signatures.get(move.number))).rstrip() for move in moves]
    return Reply(document, "\n".join(lines) or f"ref {ref} has never been moved in {store}")


def _describe_signer(signer: str | None) -> str:
    return f"signed by {signer}" if signer else "not signed by a trusted key"


def _iter_fields(ref: str, move: RefMove, signature: str | None) -> Iterator[str]:
    yield from (f"{ref}@{move.number}", f"{move.snapshot[:12] or 'nothing':<12}", move.created_at)
    if signature:
        yield signature
    yield move.note
