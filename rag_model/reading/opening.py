"""Open a reader over a snapshot, by name."""

from typing import Any

from rag_model.generate.decoding import Decoding
from rag_model.generate.named import load_named, rag_id
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.survey import survey
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot


def open_reader(
    snapshot: Snapshot,
    store: str,
    model: str,
    retriever: str | None = None,
    decoding: Decoding | None = None,
    asks: str | None = None,
) -> tuple[str, MarginalReader]:
    """Open a RAG model over a snapshot; return the model's id or folder, and the reader.

    `retriever` is an expression, as `open_retriever` takes it; None: the snapshot's default.

    Raises:
        UsageError: the model is of another kind, or the retriever is wrong.
        RefusedError: its question encoder belongs to another vector space than the snapshot.
        StoreError: the store has no such model.
        InputError: the model is incomplete or corrupt, or neither it nor `asks` names the passage encoder.
    """
    survey(snapshot, retriever)  # before a model is loaded
    opened = Store.open(store)
    named = rag_id(opened, model)
    rag = load_named(opened, named, asks)
    encoder: Any = rag.question
    found = open_retriever(snapshot, retriever, encoder=encoder, store=opened, products=True)
    return named, MarginalReader(found, rag, decoding, passages=found.most)
