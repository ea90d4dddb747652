"""Load the model of a reader, and open readers over snapshots."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import UsageError
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag
from rag_model.generate.rag_folder import get_rag_folder, is_rag_folder, load_rag_by_id, resolve_rag_id
from rag_model.reading.concat import CONCAT_K, ConcatReader
from rag_model.reading.confidence import AbstainingReader
from rag_model.reading.extractive import ExtractiveReader, SpanModel
from rag_model.reading.marginal import LabelReader, MarginalReader
from rag_model.reading.reader import Reader, ReaderName
from rag_model.reading.routing import AutoReader, Route
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.local import BATCH_SIZE, LocalWriter
from rag_model.reading.writers.writer import Writer
from rag_model.retrieve.factory import open_retriever, plan_retriever
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class ReadingModel:
    """A model in memory or behind an endpoint, which readers over several snapshots can share."""

    id: str  # id in the store, path of a folder, or `openai:MODEL` for an endpoint
    rag: Rag | None = None  # None: the model has no question encoder
    generator: Any = None  # None: the model is behind an endpoint, or is extractive
    span_model: SpanModel | None = None  # model of the reader `extractive`; None: another reader

    @property
    def question_encoder(self) -> Any:
        """The question encoder of the model; None: use the snapshot's encoder."""
        return None if self.rag is None else self.rag.question

    @property
    def k(self) -> int:
        """The number of passages per question: that of a RAG model's training, or the default."""
        return CONCAT_K if self.rag is None else self.rag.settings.k

    def open_reader(
        self, retriever: SnapshotRetriever | None, settings: ReaderSettings, writer: Writer | None = None
    ) -> Reader:
        """Return a reader over the passages of a retriever.

        `writer` is used by the reader `concat`; None: create one from the settings.

        Raises:
            UsageError: the settings do not apply to this model.
        """
        reader = self._open_passage_reader(retriever, settings, writer)
        if settings.reader == "auto":
            reader = AutoReader(reader, settings.route or Route())
        return reader if settings.threshold is None else AbstainingReader(reader, settings.threshold)

    def _open_passage_reader(
        self, retriever: SnapshotRetriever | None, settings: ReaderSettings, writer: Writer | None
    ) -> Reader:
        max_passages = None if retriever is None else retriever.most
        if settings.reader_for(self.id) == "extractive":
            if self.span_model is None:
                raise UsageError(
                    f"model {self.id} was loaded to generate answers: use --reader extractive for "
                    "all readers of the run"
                )
            return ExtractiveReader(retriever, self.span_model, self.k, max_passages)
        if settings.reader_for(self.id) == "concat":
            writer = self.open_writer(settings) if writer is None else writer
            return ConcatReader(retriever, writer, settings.concat, self.k, max_passages)
        if self.rag is None:
            raise UsageError(f"model {self.id} is a generator without p(z|x): give --reader concat")
        if settings.labels:
            return LabelReader(retriever, self.rag, settings.labels, max_passages=max_passages)
        return MarginalReader(retriever, self.rag, settings.decoding, max_passages=max_passages)

    def open_writer(self, settings: ReaderSettings, batch_size: int = BATCH_SIZE) -> Writer:
        """Return the writer of answers; a generator in memory completes `batch_size` prompts at a time.

        Raises:
            UsageError: the settings do not apply to this model, or the endpoint in the
                environment is invalid.
            InputError: the tokenizer of the endpoint cannot be read.
        """
        if self.generator is not None:
            return LocalWriter(self.generator, self.id, settings.decoding, batch_size)
        return _open_endpoint_writer(self.id, settings)


def resolve_model_id(store: Store, model: str) -> str:
    """Return the id of a model as `resolve_rag_id` does; for an endpoint, return the model's name.

    Raises:
        StoreError: the store has no such model.
        UsageError: the model has no generator.
    """
    return model if model.startswith(ENDPOINT_PREFIX) else resolve_rag_id(store, model)


def load_reading_model(
    store: Store | None, model_id: str, reader: ReaderName, passage_encoder: str | None = None
) -> ReadingModel:
    """Load a model by the id that `resolve_model_id` returned; for a folder, `store` may be None.

    `reader` names the reader that will use the model. For `concat` the model may be only a
    generator; for `extractive` it is the folder of an extractive model. For `passage_encoder`, see
    `load_rag_by_id`.

    Raises:
        StoreError: a file of the model is missing or damaged.
        InputError: the model is incomplete or corrupt.
        RefusedError: the passage space that the model records differs from the space of
            `passage_encoder`.
        UsageError: `passage_encoder` is given, but the model has no question encoder.
    """
    folder = find_model_folder(store, model_id)
    if folder is not None and reader != "extractive" and (reader == "marginal" or is_rag_folder(folder)):
        rag = load_rag_by_id(store, model_id, passage_encoder)
        return ReadingModel(model_id, rag, rag.generator)
    if passage_encoder is not None:
        raise UsageError(f"model {model_id} has no question encoder: omit --asks")
    if folder is not None and reader == "extractive":
        return ReadingModel(model_id, span_model=SpanModel.load(folder))
    return ReadingModel(model_id, generator=None if folder is None else load_generator(folder))


def find_model_folder(store: Store | None, model_id: str) -> Path | None:
    """Return the folder of a model by the id that `resolve_model_id` returned; None for an
    endpoint.

    Raises:
        StoreError: a file of the model is missing or damaged.
    """
    return None if model_id.startswith(ENDPOINT_PREFIX) else get_rag_folder(store, model_id)


def _open_endpoint_writer(model_id: str, settings: ReaderSettings) -> Writer:
    from rag_model.reading.writers.chat_settings import ChatSettings  # noqa: PLC0415 - imports HTTP
    from rag_model.reading.writers.endpoint import EndpointWriter  # noqa: PLC0415

    decoding_settings = settings.decoding
    if decoding_settings.beams > 1:
        raise UsageError(f"{model_id} is behind an endpoint without beam search: omit --beams")
    sampling = decoding_settings.sampling
    chat_settings: dict[str, Any] = {"max_new_tokens": decoding_settings.max_new_tokens}
    if sampling is not None:
        chat_settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    if settings.required_signal == "likelihood" or settings.reader == "auto":
        chat_settings["logprobs"] = True
    return EndpointWriter(model_id.removeprefix(ENDPOINT_PREFIX), ChatSettings.from_environment(**chat_settings))


def open_reader(
    snapshot: Snapshot,
    store: str,
    model: str,
    retriever: str | None = None,
    settings: ReaderSettings | None = None,
    passage_encoder: str | None = None,
) -> tuple[str, Reader]:
    """Open a reader over a snapshot; return (id of the model, reader).

    Args:
        snapshot: the snapshot to search.
        store: URL or folder of the store.
        model: the name of a RAG model in the store, or its folder. For `concat` also the folder of
            a generator, or `openai:MODEL` for the endpoint in the environment; these use the
            snapshot's question encoder.
        retriever: an expression as for `open_retriever`; None: the snapshot's default.
        settings: settings of the reader.
        passage_encoder: the name of the passage encoder with which the question encoder was
            trained, if the model does not record it.

    Raises:
        UsageError: the reader cannot use the model, or the retriever is invalid.
        RefusedError: the vector space of the model's question encoder differs from the snapshot's.
        StoreError: the store has no such model.
        InputError: the model is incomplete or corrupt, or the passage encoder is neither recorded
            in the model nor given by `passage_encoder`.
    """
    settings = settings or ReaderSettings()
    opened_store = Store.open(store)
    # report an invalid expression before the model is looked up
    plan_retriever(snapshot, retriever)
    model_id = resolve_model_id(opened_store, model)
    check_route(settings, model_id)
    readers = [settings.reader_for(model_id)]
    reading_model, opened_retriever = open_reading_model(
        snapshot, opened_store, model_id, retriever, readers, passage_encoder
    )
    return model_id, reading_model.open_reader(opened_retriever, settings)


def check_route(settings: ReaderSettings, model_id: str) -> None:
    """Check that the route of the reader `auto` was chosen for this model and its reader.

    Raises:
        UsageError: the route was chosen for a different model or reader.
    """
    route = settings.route
    if route is not None and (route_mismatch := route.explain_mismatch(model_id, settings.reader_for(model_id))):
        raise UsageError(route_mismatch)


def open_reading_model(
    snapshot: Snapshot,
    store: Store,
    model_id: str,
    retriever: str | None,
    readers: Sequence[ReaderName],
    passage_encoder: str | None = None,
) -> tuple[ReadingModel, SnapshotRetriever]:
    """Load a model by its id from `resolve_model_id`; open the retriever that `readers` need.

    Raises:
        BookwheelError: as for `open_reader`.
    """
    plan_retriever(snapshot, retriever)  # report an invalid expression before the model is loaded
    needs_inner_products = "marginal" in readers
    reading_model = load_reading_model(
        store, model_id, "marginal" if needs_inner_products else readers[0], passage_encoder
    )
    return reading_model, open_retriever(
        snapshot,
        retriever,
        embeddings_encoder=reading_model.question_encoder,
        store=store,
        products=needs_inner_products,
    )
