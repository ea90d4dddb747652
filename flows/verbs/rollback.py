"""`bookwheel rollback`: move a ref back to an earlier snapshot."""

from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl
from flows.verbs.tag import build_move_reply
from rag_model.store.store import Store
from rag_model.store.versions.moves import rollback as roll_back


def rollback(
    ref: str,
    /,
    *,
    store: StoreUrl,
    to: Annotated[
        int | None, Parameter(help="A number of the ref's log; by default that of the snapshot before.")
    ] = None,
    common: Common | None = None,
) -> Reply:
    """Move REF back to a snapshot that it named before; exit 3 if its files are missing.

    Parameters
    ----------
    ref
        The ref to move, `model:NAME` for a ref of models; `bookwheel log --ref REF` lists its
        numbers.
    """
    opened_store = Store.open(store)
    return build_move_reply(ref, roll_back(opened_store, ref, to), opened_store.find_catalog(ref)[0].noun)
