"""Open a reader over a snapshot, by name."""

from collections.abc import Sequence

from rag_model.reading.model import ReadingModel, load_model, model_id
from rag_model.reading.reader import Reader, ReaderName
from rag_model.reading.settings import ReaderSettings
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.survey import survey
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot


def open_reader(
    snapshot: Snapshot,
    store: str,
    model: str,
    retriever: str | None = None,
    settings: ReaderSettings | None = None,
    asks: str | None = None,
) -> tuple[str, Reader]:
    """Open a model over a snapshot; return the model's id or folder, and the reader.

    Args:
        snapshot: that is searched.
        store: its URL or folder.
        model: a RAG model of the store, or a folder of one; for `concat` also a folder of a generator, or
            `openai:MODEL` behind the endpoint that the environment names. These ask with the snapshot's own encoder.
        retriever: an expression, as `open_retriever` takes it; None: the snapshot's default.
        settings: how passages are read.
        asks: the passage encoder that the model's questions ask, where it does not say so.

    Raises:
        UsageError: the model is of another kind, or the retriever is wrong.
        RefusedError: its question encoder belongs to another vector space than the snapshot.
        StoreError: the store has no such model.
        InputError: the model is incomplete or corrupt, or neither it nor `asks` names the passage encoder.
    """
    settings = settings or ReaderSettings()
    opened = Store.open(store)
    survey(snapshot, retriever)  # before a model is looked for
    named = model_id(opened, model)
    loaded, found = open_model(snapshot, opened, named, retriever, [settings.of(named)], asks)
    return named, loaded.reader(found, settings)


def open_model(
    snapshot: Snapshot,
    store: Store,
    identity: str,
    retriever: str | None,
    readers: Sequence[ReaderName],
    asks: str | None = None,
) -> tuple[ReadingModel, SnapshotRetriever]:
    """Load the model that `model_id` found, and open the retriever that all of `readers` need.

    Raises:
        BookwheelError: what `open_reader` raises.
    """
    survey(snapshot, retriever)  # before a model is loaded
    marginal = "marginal" in readers
    loaded = load_model(store, identity, "marginal" if marginal else readers[0], asks)
    return loaded, open_retriever(snapshot, retriever, encoder=loaded.question, store=store, products=marginal)
