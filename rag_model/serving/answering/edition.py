"""An edition: one snapshot, its retrievers, its question encoder and its RAG model, opened together.

It is replaced as a whole and freed as a whole, so a reply never mixes two snapshots. An encoder or a model that did not
change since the edition before is shared with it: a monthly rebuild keeps both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from rag_model.cores import cores
from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.reading.answer import Answer
from rag_model.reading.reader import Reader, Stop, Tell, found_by
from rag_model.reading.stages import SEARCH, Marks, timed
from rag_model.reading.writers.writer import ENDPOINT
from rag_model.retrieve.composer import Composer
from rag_model.retrieve.dense import DenseRetriever
from rag_model.retrieve.expression import parse
from rag_model.retrieve.factory import Opened
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.lexical import TextRetriever
from rag_model.retrieve.products import with_products
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.retriever import Hit
from rag_model.retrieve.scorers import Scorers
from rag_model.serving.answering.asking import Asker, ServedModel
from rag_model.serving.answering.offer import Composable, Offer
from rag_model.serving.free_memory import page_in
from rag_model.serving.service_settings import ServiceSettings
from rag_model.store.versions.paths import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

_WARMING = 3  # questions that a new edition is asked before it serves
_WARM_K = 5
_MOST_WORKERS = 4
_LONE_THREADS = 2  # a question has too few tokens for more
_AT_ENDPOINT = 8  # batches that wait for an endpoint: no question waits for another one's words


@dataclass(frozen=True, slots=True)
class ServedRef:
    """The ref that names a served snapshot, and the move of the ref that chose it."""

    ref: str
    number: int
    snapshot: str  # full id
    created_at: str  # of the move: ISO 8601, UTC


class Edition:
    """Answers questions from one snapshot. Safe among threads; `Desk` says when it may be closed."""

    def __init__(
        self,
        named: ServedRef,
        offer: Offer,
        opened: Opened,
        settings: ServiceSettings,
        model: ServedModel | None = None,
    ) -> None:
        """Compose what `open` opened.

        Raises:
            RefusedError: the model's questions, or the encoder's, ask into another space than the snapshot's.
            StoreError: a file is missing or damaged.
        """
        self.named = named  # replaced, whole, where the ref moves and names the same snapshot
        self.snapshot, self.model = opened.snapshot, model
        self._opened, self._most_depth = opened, settings.max_depth
        self._retrievers = {str(parse(text)): opened.retriever(text) for text in offer.retrievers}
        self._default = next(iter(self._retrievers))
        self._asked_by_model = _asked_by(opened, model)
        self._readers: dict[str, Reader] = {}
        if self._asked_by_model is not None:
            for text in self._retrievers:
                self._readers[text] = self._reader(self._asked_by_model.retriever(text, products=self._weighs))

    @classmethod
    def open(
        cls,
        folder: Path,
        named: ServedRef,
        settings: ServiceSettings,
        model: ServedModel | None = None,
        before: Self | None = None,
        scorers: Scorers | None = None,
    ) -> Self:
        """Open a pulled snapshot's folder.

        Args:
            folder: the snapshot's own, as `pull` reports it.
            named: what it is served as.
            settings: which retrievers, and whether indexes are loaded or mapped.
            model: reads what is found; without one only passages are served.
            before: the edition that serves now: its encoder is kept where the new snapshot carries the same files.
            scorers: the models that rerank, which editions share.

        Raises:
            MissingExtraError: the model extra is not installed.
            StoreError: a file is missing or damaged.
            UsageError: a retriever is wrong, or the snapshot has no such index.
            RefusedError: the model's questions ask into another space than the snapshot's.
        """
        snapshot = Snapshot.from_folder(folder)
        try:
            _require_passages(snapshot)
            offer = Offer.of(snapshot, settings, weighs=model is not None and model.weighs)
            asker = partial(_asker, snapshot, settings, _kept(snapshot, before))
            if not settings.loaded:
                serving = _index_files(before.snapshot, before.indexes) if before else {}
                page_in(map(snapshot.path, _index_files(snapshot, offer.indexes)), sum(serving.values()))
            opened = Opened(snapshot, asker, scorers or Scorers(), mmap=not settings.loaded)
            return cls(named, offer, opened, settings, model)
        except BaseException:
            snapshot.close()
            raise

    @property
    def id(self) -> str:
        """The snapshot's full id."""
        return self.snapshot.id

    @property
    def asker(self) -> Asker | None:
        """The question encoder of /search; None: no retriever needs vectors."""
        encoder = self._opened.known_encoder
        return encoder if isinstance(encoder, Asker) else None

    @property
    def indexes(self) -> tuple[str, ...]:
        """The indexes that are open: requests may ask for any retriever that is made of them."""
        return self._opened.indexes

    @property
    def retrievers(self) -> tuple[str, ...]:
        """The retrievers that the service was started with, in one spelling; the first answers where none is named."""
        return tuple(self._retrievers)

    @property
    def watched(self) -> tuple[str, Mapping[str, float]] | None:
        """The first retriever's index and search parameters, if it is an index of vectors or of text alone."""
        default = self._retrievers[self._default]
        return (default.index, default.parameters) if isinstance(default, DenseRetriever | TextRetriever) else None

    def search(self, asked: Questions, k: int, retriever: str | None = None) -> list[list[Hit]]:
        """Return the best `k` passages of each question, best first.

        `retriever` is an expression in one spelling: one of `retrievers`, or another one made of `indexes`.

        Raises:
            UsageError: it is wrong, names what is not served here, or gives fewer passages.
        """
        known = self._retrievers.get(self._default if retriever is None else retriever)
        return (known or self._composed(self._opened, retriever or "")).ask(asked, k)

    def answer(
        self,
        questions: Sequence[str],
        k: int | None,
        retriever: str | None = None,
        stop: Stop | None = None,
        found: Callable[[list[list[Hit]]], None] | None = None,
        tell: Tell | None = None,
    ) -> list[Answer]:
        """Return each question's answer, from its best `k` passages; None: as many as the reader takes by itself.

        `found` is called with the passages before they are read, and `tell` as `Reader.answer` says.

        Raises:
            UsageError: there is no model here, or the retriever is refused as by `search`.
            StoppedError: `stop`, which is called before each token, was true.
        """
        marks = Marks()
        reader = self._reader_of(retriever)
        hits = found_by(reader.retriever, questions, reader.k if k is None else k)
        if found is not None:
            found(hits)
        marks.end(SEARCH)
        return timed(reader.answer_from(questions, hits, stop, tell), marks)

    def _reader_of(self, retriever: str | None) -> Reader:
        """Return what reads the hits of a retriever."""
        if self._asked_by_model is None:
            raise UsageError("this service has no model, so it gives no answers: ask /search")
        reader = self._readers.get(self._default if retriever is None else retriever)
        if reader is None:
            found = self._composed(self._asked_by_model, retriever or "")
            try:
                reader = self._reader(with_products(found, self._asked_by_model.encoder) if self._weighs else found)
            except StoreError as missing:
                raise UsageError(
                    f"the retriever {found.name} cannot be answered from, since the service was started without the "
                    "passages' vectors: ask for another one"
                ) from missing
        return reader

    def warm(self) -> None:
        """Ask a few questions, so that files and kernels are loaded before the first request.

        Raises:
            RefusedError: a retriever finds nothing, or a vector or an answer can't be made.
        """
        rows = [self.snapshot.n * place // _WARMING for place in range(_WARMING)]
        asked = Questions([one.title or one.text[:100] or "?" for one in self.snapshot.passages(rows)])
        for name, retriever in self._retrievers.items():
            if not any(retriever.ask(asked, min(_WARM_K, retriever.most))):  # by words, a title of signs finds nothing
                raise RefusedError(f"index {name} of snapshot {self.id[:12]} finds nothing: build it again")
        if self._readers and self.model is not None and self.model.is_here:
            self.answer(asked.texts[:1], None)

    def close(self) -> None:
        """Free files, maps and memory; the edition must not be asked afterwards."""
        self._retrievers.clear()
        self._readers.clear()
        self._opened.close()
        self._asked_by_model = None
        self.snapshot.close()

    def _composed(self, opened: Opened, expression: str) -> SnapshotRetriever:
        return Composer(Composable(opened), self._most_depth).retriever(parse(expression))

    def _reader(self, retriever: SnapshotRetriever) -> Reader:
        assert self.model is not None
        return self.model.reader(retriever)

    @property
    def _weighs(self) -> bool:
        return self.model is not None and self.model.weighs


def _asked_by(opened: Opened, model: ServedModel | None) -> Opened | None:
    """Return what is open, asked by the model's own encoder where it has one; None: there is no model."""
    if model is None:
        return None
    return opened if model.asker is None else opened.asked_by(model.asker)


def _require_passages(snapshot: Snapshot) -> None:
    if not snapshot.n:
        raise RefusedError(f"snapshot {snapshot.id[:12]} holds no passages: build one that has some")


def _index_files(snapshot: Snapshot, names: Sequence[str]) -> dict[str, int]:
    """Return the files of these indexes, and their bytes; `exact` has none."""
    content = snapshot.manifest.content
    paths = [content.index_file(name) for name in names if name in content.indexes]
    return {path: content.files[path].size for path in paths}


def _kept(snapshot: Snapshot, before: Edition | None) -> Asker | None:
    """Return the encoder of the edition before, if the snapshot carries the same."""
    if before is None or _encoder_files(before.snapshot) != _encoder_files(snapshot):
        return None
    return before.asker


def _asker(snapshot: Snapshot, settings: ServiceSettings, kept: Asker | None) -> Asker:
    return kept or Asker.load(snapshot.folder(QUESTION_ENCODER), threads_of(settings))


def _encoder_files(snapshot: Snapshot) -> list[tuple[str, str]]:
    files = snapshot.manifest.content.files
    return sorted((file, ref.id) for file, ref in files.items() if file.startswith(f"{QUESTION_ENCODER}/"))


def workers_of(settings: ServiceSettings) -> int:
    """Return how many batches are worked on at once."""
    return settings.workers or min(cores(), _MOST_WORKERS)


def answer_workers_of(settings: ServiceSettings, model: str | None) -> int:
    """Return how many batches are answered at once: a model in memory takes all cores for one."""
    return settings.answer_workers or (_AT_ENDPOINT if model is not None and model.startswith(ENDPOINT) else 1)


def answer_threads_of(settings: ServiceSettings, model: str | None) -> int:
    """Return how many threads compute a batch of answers: all, since the first word waits for the whole prompt."""
    return settings.threads or max(1, cores() // answer_workers_of(settings, model))


def threads_of(settings: ServiceSettings) -> int:
    """Return how many threads encode and search a batch."""
    return settings.threads or max(1, cores() // workers_of(settings))


def lone_threads_of(settings: ServiceSettings) -> int:
    """Return how many threads encode and search a request that has the service to itself."""
    return settings.threads or max(threads_of(settings), min(cores(), _LONE_THREADS))
