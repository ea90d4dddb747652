"""`bookwheel log`: the history of a ref."""

from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl
from rag_model.store.store import Store


def log(
    *,
    store: StoreUrl,
    ref: Annotated[str, Parameter(help="The ref whose moves to list; `model:NAME` for a ref of models.")] = "latest",
    common: Common | None = None,
) -> Reply:
    """List the moves of a ref, newest first: number, snapshot (or model), time and note; also of a deleted ref.

    A snapshot that a takedown replaced is shown as its replacement.
    """
    shelf, name = Store.open(store).shelf(ref)
    moves = shelf.refs.history(name)[::-1]
    document = [
        {"number": move.number, shelf.noun: move.snapshot or None, "created_at": move.created_at, "note": move.note}
        for move in moves
    ]
    lines = [f"{ref}@{m.number}  {m.snapshot[:12] or 'nothing':<12}  {m.created_at}  {m.note}".rstrip() for m in moves]
    return Reply(document, "\n".join(lines) or f"ref {ref} has never been moved in {store}")
