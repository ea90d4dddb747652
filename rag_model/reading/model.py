"""A model that reads passages: loaded once, for every reader that is made of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.encoders.files import CONFIG, optional_object
from rag_model.encoders.spec import RECORD_FILE
from rag_model.errors import UsageError
from rag_model.generate.load import load_generator
from rag_model.generate.named import load_named, rag_folder, rag_id
from rag_model.generate.rag import Rag
from rag_model.reading.concat import ConcatReader, K
from rag_model.reading.confidence import abstaining
from rag_model.reading.extractive import ExtractiveReader, SpanModel
from rag_model.reading.labels import LabelReader
from rag_model.reading.marginal import MarginalReader
from rag_model.reading.reader import Reader, ReaderName
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.local import BATCH, LocalWriter
from rag_model.reading.writers.writer import ENDPOINT, Writer
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class ReadingModel:
    """A model in memory, or behind an endpoint; readers over several snapshots share it."""

    id: str  # in the store; of a folder its path; of an endpoint `openai:MODEL`
    rag: Rag | None = None  # None: it has no question encoder of its own
    generator: Any = None  # None: it lies behind an endpoint, or finds spans
    spans: SpanModel | None = None  # None: it writes answers

    @property
    def question(self) -> Any:
        """The encoder that it asks with; None: the snapshot's own asks."""
        return None if self.rag is None else self.rag.question

    @property
    def k(self) -> int:
        """The passages of a question: as many as in training, where it was trained to read passages."""
        return K if self.rag is None else self.rag.settings.k

    def reader(self, retriever: SnapshotRetriever | None, settings: ReaderSettings) -> Reader:
        """Return a reader over what a retriever finds.

        Raises:
            UsageError: the settings do not apply to this model.
        """
        most = None if retriever is None else retriever.most
        if settings.of(self.id) == "extractive":
            if self.spans is None:
                raise UsageError(f"model {self.id} was loaded to write answers: give --reader extractive alone")
            return abstaining(ExtractiveReader(retriever, self.spans, self.k, most), settings.threshold)
        if settings.of(self.id) == "concat":
            concat = ConcatReader(retriever, self.writer(settings), settings.concat, self.k, most)
            return abstaining(concat, settings.threshold)
        if self.rag is None:
            raise UsageError(f"model {self.id} is a generator alone, which has no p(z|x): give --reader concat")
        if settings.labels:
            return abstaining(LabelReader(retriever, self.rag, settings.labels, passages=most), settings.threshold)
        return abstaining(MarginalReader(retriever, self.rag, settings.decoding, passages=most), settings.threshold)

    def writer(self, settings: ReaderSettings, batch: int = BATCH) -> Writer:
        """Return what writes the answers of one prompt; a generator in memory continues `batch` prompts at once.

        Raises:
            UsageError: the settings do not apply to this model, or the environment names no usable endpoint.
            InputError: the tokenizer of the endpoint cannot be read.
        """
        if self.generator is not None:
            return LocalWriter(self.generator, self.id, settings.decoding, batch)
        return _endpoint(self.id, settings)


def model_id(store: Store, model: str) -> str:
    """Return the id of a model that reads: as `rag_id`, and an endpoint's own name.

    Raises:
        StoreError: the store has no such model.
        UsageError: the model has no generator.
    """
    return model if model.startswith(ENDPOINT) else rag_id(store, model)


def load_model(store: Store | None, identity: str, reader: ReaderName, asks: str | None = None) -> ReadingModel:
    """Load the model that `model_id` found; a folder needs no store.

    `reader` is one that will be made of it: for `concat` it may be a generator alone, for `extractive` it is a folder
    of a model of spans. For `asks` see `load_named`.

    Raises:
        StoreError: a file of the model is missing or damaged.
        InputError: the model is incomplete or corrupt.
        RefusedError: the model records another passage space than `asks`.
        UsageError: `asks` is given, and the model asks nothing.
    """
    folder = model_folder_of(store, identity)
    if folder is not None and reader == "extractive":
        if asks is not None:
            raise UsageError(f"model {identity} has no question encoder, so --asks says nothing of it: leave it out")
        return ReadingModel(identity, spans=SpanModel.load(folder))
    if folder is not None and (reader == "marginal" or holds_rag(folder)):
        rag = load_named(store, identity, asks)
        return ReadingModel(identity, rag, rag.generator)
    if asks is not None:
        raise UsageError(f"model {identity} has no question encoder, so --asks says nothing of it: leave it out")
    return ReadingModel(identity, generator=None if folder is None else load_generator(folder))


def model_folder_of(store: Store | None, identity: str) -> Path | None:
    """Return the folder of the model that `model_id` found; None: it lies behind an endpoint.

    Raises:
        StoreError: a file of the model is missing or damaged.
    """
    return None if identity.startswith(ENDPOINT) else rag_folder(store, identity)


def holds_rag(folder: Path) -> bool:
    """Return whether a folder holds a RAG model, and not a generator alone."""
    recorded = "settings" in optional_object(folder / RECORD_FILE)
    return recorded or optional_object(folder / CONFIG).get("model_type") == "rag"


def _endpoint(identity: str, settings: ReaderSettings) -> Writer:
    from rag_model.reading.writers.chat.settings import ChatSettings  # noqa: PLC0415 - HTTP for an endpoint alone
    from rag_model.reading.writers.endpoint import EndpointWriter  # noqa: PLC0415

    decoding = settings.decoding
    if decoding.beams > 1:
        raise UsageError(f"{identity} is behind an endpoint, which has no beams: leave them out")
    drawn = decoding.sampling
    given: dict[str, Any] = {"max_new_tokens": decoding.max_new_tokens}
    if drawn is not None:
        given |= {"temperature": drawn.temperature, "top_p": drawn.top_p, "seed": drawn.seed}
    if settings.scored_by == "likelihood":
        given["logprobs"] = True
    return EndpointWriter(identity.removeprefix(ENDPOINT), ChatSettings.of(**given))
