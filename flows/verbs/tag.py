"""`bookwheel tag`: a name for a snapshot or a model."""

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
        A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, of a model.
    ref
        Letters, digits, `.`, `_` and `-`.
    """
    opened = Store.open(store)
    return moved(ref, tag_snapshot(opened, snapshot, ref, note), opened.shelf(snapshot)[0].noun)


def moved(ref: str, move: RefMove, noun: str) -> Reply:
    """Say where a ref, of a snapshot or a model, stands now."""
    document = {"ref": ref, **move.to_json(noun)}
    del document["nonce"], document["format"]
    before = f", before {move.previous[:12]}" if move.previous else ""
    return Reply(document, f"{ref}@{move.number} is {noun} {move.snapshot[:12]}{before}")
