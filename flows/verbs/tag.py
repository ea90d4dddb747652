"""`bookwheel tag`: a name for a snapshot."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from flows.reply import Common, Reply, StoreUrl
from rag_model.store.moves import tag as tag_snapshot
from rag_model.store.refs import RefMove
from rag_model.store.store import Store


def tag(
    snapshot: str,
    ref: str,
    /,
    *,
    store: StoreUrl,
    note: Annotated[str, Parameter(help="Why, for the ref's log.")] = "",
    common: Common | None = None,
) -> Reply:
    """Create REF, or move it, to name a snapshot. Its earlier moves stay in its log.

    Parameters
    ----------
    snapshot
        A ref, ref@number, an id, or a unique prefix of one.
    ref
        Letters, digits, `.`, `_` and `-`.
    """
    return moved(ref, tag_snapshot(Store.open(store), snapshot, ref, note))


def moved(ref: str, move: RefMove) -> Reply:
    """Say where a ref stands now."""
    document = {"ref": ref, **asdict(move)}
    del document["nonce"]
    before = f", before {move.previous[:12]}" if move.previous else ""
    return Reply(document, f"{ref}@{move.number} is snapshot {move.snapshot[:12]}{before}")
