"""The question encoder and the reading model of a service, which several loaded snapshots share."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rag_model.encoders.encoder import Encoder, load_any_encoder
from rag_model.encoders.space import Space
from rag_model.encoders.spec import is_endpoint_encoder
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.reading.concat import ConcatReader
from rag_model.reading.confidence import LikelihoodReader
from rag_model.reading.model import ReadingModel, load_reading_model
from rag_model.reading.reader import Reader
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.writer import Writer
from rag_model.retrieve.retriever import QuestionEncoder, SnapshotRetriever
from rag_model.store.store import Store

_LOG = logging.getLogger(__name__)


class SharedQuestionEncoder:
    """A loaded `QuestionEncoder` that does not need its folder any more.

    Snapshots whose encoder files are equal share it. The description of the vector space is read at
    the beginning, because the folder may be deleted while the weights are still in use. float32
    weights stay mapped from the file in that folder, even after the snapshot is deleted or taken
    down; weights of other dtypes are copied. The file contains no text of a page, and takes no
    additional disk space, because the current snapshot links to it.
    """

    def __init__(self, encoder: QuestionEncoder) -> None:
        """Read the vector space of `encoder`.

        Raises:
            InputError: The encoder's folder is damaged, or does not name its passage encoder.
        """
        self._encoder, self._space = encoder, encoder.space()

    @classmethod
    def load(cls, folder: Path, threads: int) -> Self:
        """Load the question encoder in `folder`, and let torch use `threads` threads."""
        if is_endpoint_encoder(folder):
            return cls(load_any_encoder(folder))
        return cls(Encoder.load(folder, "question", threads=threads))

    def space(self) -> Space:
        """Return the space of the question vectors."""
        return self._space

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of the questions, in order."""
        return self._encoder.encode_questions(questions)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A reading model, local or remote, and its reader settings."""

    model: ReadingModel
    settings: ReaderSettings
    question_encoder: SharedQuestionEncoder | None  # None means the snapshot's encoder
    # for readers that put all passages into one prompt; None if the reader reads each one alone
    writer: Writer | None

    @classmethod
    def load(
        cls,
        store: Store | None,
        model_id: str,
        settings: ReaderSettings,
        passage_encoder: str | None = None,
        batch_size: int = 8,
    ) -> Self:
        """Load a model.

        Args:
            store: The store of the model; None for a folder or an endpoint.
            model_id: Id in the store, folder or `openai:MODEL`.
            settings: The reader settings.
            passage_encoder: The passage encoder that belongs to the model's question encoder, if
                the model does not record it.
            batch_size: Number of questions that are decoded together, so that no answer waits for
                another answer.
        """
        if settings.route is not None:
            mismatch = settings.route.explain_mismatch(model_id, settings.reader_for(model_id))
            if mismatch:
                # This is only a warning, so that a new version of the model does not end the
                # service.
                _LOG.warning("%s; until then the memory with the likelier answer is chosen", mismatch)
                settings = replace(settings, route=None)
        model = load_reading_model(store, model_id, settings.reader_for(model_id), passage_encoder)
        question_encoder = None if model.question_encoder is None else SharedQuestionEncoder(model.question_encoder)
        return cls(
            model,
            settings,
            question_encoder,
            model.open_writer(settings, batch_size) if settings.reader_for(model_id) == "concat" else None,
        )

    @property
    def id(self) -> str:
        """The id in the store, the path of a folder, or the name of an endpoint's model."""
        return self.model.id

    @property
    def uses_inner_products(self) -> bool:
        """Whether the reader weights passages by inner products that the retriever returns."""
        return self.settings.reader_for(self.id) == "marginal"

    @property
    def is_local(self) -> bool:
        """Whether the model is in this process's memory; calling a remote model may cost money."""
        return self.model.generator is not None or self.model.span_model is not None

    def create_reader(self, retriever: SnapshotRetriever) -> Reader:
        """Create a reader of a retriever's passages."""
        return self.model.open_reader(retriever, self.settings, self.writer)

    @property
    def has_likelihoods(self) -> bool:
        """Whether the model can compute the likelihood of a given answer.

        Remote, extractive and label models cannot.
        """
        return self.model.generator is not None and not self.settings.labels

    def create_likelihood_reader(self) -> LikelihoodReader:
        """Create a reader that computes the likelihood of given answers, without citations.

        Raises:
            UsageError: The model cannot compute likelihoods.
        """
        if not self.has_likelihoods:
            raise UsageError(f"model {self.id} cannot compute the likelihood of a given answer")
        if self.writer is not None:
            return self.create_uncited_reader()
        reader: Any = self.model.open_reader(None, replace(self.settings, threshold=None, reader="marginal"))
        likelihood_reader: LikelihoodReader = reader
        return likelihood_reader

    def create_uncited_reader(self) -> ConcatReader:
        """Create a reader that puts given passages, or none, into one prompt without citations.

        Raises:
            UsageError: The model reads each passage separately.
        """
        if self.writer is None:
            raise UsageError(f"model {self.id} reads passages separately: choose the reader concat")
        return ConcatReader(None, self.writer, replace(self.settings.concat, cite=False), self.model.k)

    def close(self) -> None:
        """Close the connections to a remote model."""
        if not self.is_local and self.writer is not None:
            remote_writer: Any = self.writer
            remote_writer.close()
