"""An edition: one snapshot, its indexes, the encoder that asks it and the model that reads it, opened together.

It flips as one and is freed as one, so whoever answers from an edition never mixes two snapshots. What did not change
from the one before, encoder or model, is shared with it: a monthly rebuild keeps both.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rag_model.errors import RefusedError, UsageError
from rag_model.generate.reader import Answer
from rag_model.index.files.engine import Vectors
from rag_model.index.search import SearchIndex
from rag_model.retrieve.dense import DenseRetriever, index_of
from rag_model.retrieve.retriever import Hit
from rag_model.serving.asking import Asker, ReadingModel
from rag_model.serving.settings import ServiceSettings
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

_WARMING = 3  # questions that a new edition is asked before anybody else asks it
_WARM_K = 5
_MOST_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Named:
    """How a snapshot came to be served: the ref that names it, and by which of its moves."""

    ref: str
    number: int
    snapshot: str  # full id
    created_at: str  # of the move: ISO 8601, UTC


class Edition:
    """Answers questions from one snapshot. Safe among threads; `Desk` says when it may be closed."""

    def __init__(
        self,
        named: Named,
        snapshot: Snapshot,
        asker: Asker,
        indexes: Mapping[str, SearchIndex],
        model: ReadingModel | None = None,
    ) -> None:
        """Hold what `open` opened.

        Raises:
            RefusedError: the model's questions, or the encoder's, ask into another space than the snapshot's.
        """
        self.named = named  # replaced, whole, where the ref moves and names the same snapshot
        self.snapshot, self.asker, self.model = snapshot, asker, model
        self._retrievers = {name: DenseRetriever(snapshot, asker, index) for name, index in indexes.items()}
        self._reader = None if model is None else model.reader(snapshot, next(iter(indexes.values())))

    @classmethod
    def open(
        cls,
        folder: Path,
        named: Named,
        settings: ServiceSettings,
        model: ReadingModel | None = None,
        before: Self | None = None,
    ) -> Self:
        """Open a pulled snapshot's folder.

        Args:
            folder: the snapshot's own, as `pull` reports it.
            named: what it is served as.
            settings: which indexes, and whether they are loaded or mapped.
            model: reads what is found; without one only passages are served.
            before: the edition that serves now: its encoder is kept where the new snapshot carries the same files.

        Raises:
            MissingExtraError: the model extra is not installed.
            StoreError: a file is missing or damaged.
            UsageError: the snapshot has no such index.
            RefusedError: the model's questions ask into another space than the snapshot's.
        """
        snapshot = Snapshot.from_folder(folder)
        try:
            _require_passages(snapshot)
            mapped = settings.swap == "low-memory"
            indexes = {name: index_of(snapshot, name, mmap=mapped) for name in settings.indexes}
            return cls(named, snapshot, _asker(snapshot, settings, before), indexes, model)
        except BaseException:
            snapshot.close()
            raise

    @property
    def id(self) -> str:
        """The snapshot's full id."""
        return self.snapshot.id

    @property
    def indexes(self) -> tuple[str, ...]:
        """The indexes that can be searched; the first is searched where none is named."""
        return tuple(self._retrievers)

    def encode(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of questions, as `search` takes them."""
        return self.asker.encode_questions(questions)

    def search(self, vectors: Vectors, k: int, index: str | None = None) -> list[list[Hit]]:
        """Return the best `k` passages of each vector, best first.

        Raises:
            UsageError: this edition has no such index open, or holds fewer passages.
        """
        name = self.indexes[0] if index is None else index
        if name not in self._retrievers:
            raise UsageError(f"index {name!r} is not served here: choose one of {', '.join(self.indexes)}")
        return self._retrievers[name].search_vectors(vectors, k)

    def answer(self, questions: Sequence[str], k: int | None) -> list[Answer]:
        """Return each question's answer, from its best `k` passages; None: as many as in training.

        Raises:
            UsageError: there is no model here, or the snapshot holds fewer passages.
        """
        if self._reader is None:
            raise UsageError("no model is served here, so there are passages and no answers: ask /search")
        return self._reader.answer(questions, k)

    def warm(self) -> None:
        """Ask a few questions, so that the first who asks waits for no file and no kernel to be loaded.

        Raises:
            RefusedError: an index finds nothing, or a vector or an answer can't be made.
        """
        rows = [self.snapshot.n * place // _WARMING for place in range(_WARMING)]
        questions = [passage.title or passage.text[:100] or "?" for passage in self.snapshot.passages(rows)]
        vectors = self.encode(questions)
        for name in self.indexes:
            found = self.search(vectors, min(_WARM_K, self.snapshot.n), name)
            if not all(found):
                raise RefusedError(f"index {name} of snapshot {self.id[:12]} finds nothing: build it again")
        if self._reader is not None:
            self.answer(questions[:1], None)

    def close(self) -> None:
        """Let go of files, maps and memory; nobody may ask it any more."""
        self._retrievers.clear()
        self._reader = None
        self.snapshot.close()


def _require_passages(snapshot: Snapshot) -> None:
    if not snapshot.n:
        raise RefusedError(f"snapshot {snapshot.id[:12]} holds no passage: build one that does")


def _asker(snapshot: Snapshot, settings: ServiceSettings, before: Edition | None) -> Asker:
    if before is not None and _encoder_files(before.snapshot) == _encoder_files(snapshot):
        return before.asker
    return Asker.load(snapshot.folder(QUESTION_ENCODER), threads_of(settings))


def _encoder_files(snapshot: Snapshot) -> list[tuple[str, str]]:
    files = snapshot.manifest.content.files
    return sorted((file, ref.id) for file, ref in files.items() if file.startswith(f"{QUESTION_ENCODER}/"))


def workers_of(settings: ServiceSettings) -> int:
    """Return how many batches are worked on at once."""
    return settings.workers or min(_cores(), _MOST_WORKERS)


def threads_of(settings: ServiceSettings) -> int:
    """Return how many threads encode and search a batch."""
    return settings.threads or max(1, _cores() // workers_of(settings))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
