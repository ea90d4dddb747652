"""The question encoder and the reading model of a service, which editions of several snapshots share.

An encoder's space is read from its folder, which may be pruned while its weights still serve; so it is read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import Space
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.reading.concat import ConcatReader
from rag_model.reading.confidence import Scores, abstaining
from rag_model.reading.model import ReadingModel, load_model
from rag_model.reading.reader import Reader
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.writer import Writer
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.questions import QuestionEncoder
from rag_model.store.store import Store


class Asker:
    """A `QuestionEncoder` that no longer needs its folder; editions share it where their encoders' files are equal.

    Its weights may stay mapped from the file of the snapshot that it was loaded from, also when that snapshot is pruned
    or taken down: float32 weights are mapped, others are copied. That file holds no text of a page, and needs no
    further disk space, because the snapshot that serves links to the same file.
    """

    def __init__(self, encoder: QuestionEncoder) -> None:
        """Read the space of `encoder`.

        Raises:
            InputError: its folder is damaged, or does not name the passage encoder that it belongs to.
        """
        self._encoder, self._space = encoder, encoder.space()

    @classmethod
    def load(cls, folder: Path, threads: int) -> Self:
        """Load the question encoder in `folder`; `threads` are torch's, for the whole process."""
        return cls(Encoder.load(folder, "question", threads=threads))

    def space(self) -> Space:
        """Return the space of its question vectors."""
        return self._space

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors, in order."""
        return self._encoder.encode_questions(questions)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in memory or behind an endpoint, and how it reads."""

    model: ReadingModel
    settings: ReaderSettings
    asker: Asker | None  # its own question encoder; None: the snapshot's asks
    writer: Writer | None  # of all its readers of one prompt; None: passages are read apart

    @classmethod
    def load(
        cls, store: Store | None, identity: str, settings: ReaderSettings, asks: str | None = None, batch: int = 8
    ) -> Self:
        """Load the model that `model_id` found; for `asks` see `load_named`; a folder needs no store.

        `batch` is how many questions are answered at once: a batch is written at once, so that no first word waits for
        another text.
        """
        model = load_model(store, identity, settings.of(identity), asks)
        asker = None if model.question is None else Asker(model.question)
        return cls(model, settings, asker, model.writer(settings, batch) if settings.of(identity) == "concat" else None)

    @property
    def id(self) -> str:
        """The model's id in the store; of a folder its path; of an endpoint its name."""
        return self.model.id

    @property
    def weighs(self) -> bool:
        """Whether passages are weighed by inner products, which retrievers must give."""
        return self.settings.of(self.id) == "marginal"

    @property
    def is_here(self) -> bool:
        """Whether it is in this process's memory, and not behind an endpoint, whose answers may cost money."""
        return self.model.generator is not None or self.model.spans is not None

    def reader(self, retriever: SnapshotRetriever) -> Reader:
        """Return a reader over what a retriever finds."""
        if self.writer is None:
            return self.model.reader(retriever, self.settings)
        concat = ConcatReader(retriever, self.writer, self.settings.concat, self.model.k, retriever.most)
        return abstaining(concat, self.settings.threshold)

    @property
    def tells_likelihoods(self) -> bool:
        """Whether it tells how likely a given answer is; one behind an endpoint, of spans or of labels does not."""
        return self.model.generator is not None and not self.settings.labels

    def scores(self) -> Scores:
        """Return what tells how likely given answers are, by prompts that ask for no citations.

        Raises:
            UsageError: the model does not tell it.
        """
        if not self.tells_likelihoods:
            raise UsageError(f"model {self.id} does not tell the likelihood of a given answer")
        if self.writer is not None:
            return self.uncited()
        told: Any = self.model.reader(None, replace(self.settings, threshold=None))
        scores: Scores = told
        return scores

    def uncited(self) -> ConcatReader:
        """Return what reads given passages in one prompt, or answers closed book, and is not asked for citations.

        Raises:
            UsageError: the model reads passages apart.
        """
        if self.writer is None:
            raise UsageError(f"model {self.id} reads passages apart: choose the reader concat")
        return ConcatReader(None, self.writer, replace(self.settings.concat, cite=False), self.model.k)

    def close(self) -> None:
        """Close the connections to an endpoint."""
        if not self.is_here and self.writer is not None:
            behind: Any = self.writer
            behind.close()
