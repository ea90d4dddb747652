"""Load a snapshot with its retrievers, its question encoder and its reading model.

A `LoadedSnapshot` is replaced and freed as a whole, so a reply never mixes two snapshots. A loaded
snapshot shares the encoder and the model of the previous snapshot if they are the same, for example
after a monthly rebuild.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rag_model.encoders.encoder import Encoder, load_any_encoder
from rag_model.encoders.space import Space
from rag_model.encoders.spec import is_endpoint_encoder
from rag_model.errors import (
    EndpointError,
    GoneError,
    NotReadyError,
    RefusedError,
    StoreError,
    UsageError,
)
from rag_model.index.files.engine import Vectors
from rag_model.process import get_free_bytes
from rag_model.reading.answer import Answer
from rag_model.reading.concat import ConcatReader
from rag_model.reading.confidence import LikelihoodReader
from rag_model.reading.model import ReadingModel, load_reading_model
from rag_model.reading.reader import NO_CALLBACKS, AnswerCallbacks, Reader
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.writer import Writer
from rag_model.retrieve.context import RetrieverContext
from rag_model.retrieve.dense import IndexRetriever
from rag_model.retrieve.expression import parse
from rag_model.retrieve.factory import (
    RequestLimits,
    build_retriever,
    plan_retriever,
)
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.models import PairScorerCache
from rag_model.retrieve.retriever import Queries, QuestionEncoder, SnapshotRetriever
from rag_model.serving.answering.available_retrievers import (
    AvailableRetrievers,
    can_search_by_ranges,
    get_file_sizes,
)
from rag_model.serving.runtime import count_search_threads
from rag_model.serving.settings import ServiceSettings
from rag_model.store.store import Store
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 20
_WARM_UP_QUERIES = 3  # queries that are searched before the snapshot is served
_WARM_UP_K = 5


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


@dataclass(frozen=True, slots=True)
class ServedRef:
    """The ref of a served snapshot, and the entry of the ref's log that names the snapshot."""

    ref: str
    number: int  # number of the entry; 0: no entry is known
    snapshot: str  # full id
    created_at: str  # time of the move, ISO 8601 in UTC; empty: unknown


class LoadedSnapshot:
    """An open snapshot that answers queries. Thread-safe; `SnapshotSlot` closes it."""

    def __init__(
        self,
        served_ref: ServedRef,
        available: AvailableRetrievers,
        context: RetrieverContext,
        settings: ServiceSettings,
        model: ServedModel | None = None,
    ) -> None:
        """Build the retrievers and readers over open files; `open` also opens the files.

        Raises:
            RefusedError: The question encoder's vector space differs from the snapshot's.
            StoreError: A file is missing or damaged.
        """
        # replaced when the ref moves but names the same snapshot
        self.served_ref = served_ref
        self.snapshot, self.model = context.snapshot, model
        self._context, self._will_be_pulled = context, settings.pull
        self.retrievers = tuple(dict.fromkeys(str(parse(expression)) for expression in available.retrievers))
        self.indexes, self.notes = available.indexes, available.notes
        self._request_limits = RequestLimits(self.indexes, settings.max_depth)
        self._default_retriever = self.retrievers[0]
        # If the settings name no retrievers, only the default is opened now, to start sooner.
        self._retrievers: dict[str, SnapshotRetriever] = {}
        self._lock = threading.Lock()
        for expression in self.retrievers if settings.retrievers else self.retrievers[:1]:
            self._open_served(expression)
        self._model_context = _open_for_model(context, model)
        self._readers: dict[str, Reader] = {}
        if self._model_context is not None:
            for expression in self._retrievers:
                retriever = _open_retriever(self._model_context, expression, products=self._uses_inner_products)
                self._readers[expression] = self._create_reader(retriever)

    @classmethod
    def open(
        cls,
        folder: Path,
        served_ref: ServedRef,
        settings: ServiceSettings,
        model: ServedModel | None = None,
        previous: Self | None = None,
        scorers: PairScorerCache | None = None,
    ) -> Self:
        """Open a pulled snapshot.

        Args:
            folder: The snapshot's folder, as `pull` reports it.
            served_ref: The ref that names the snapshot.
            settings: They name the retrievers, and say whether indexes are loaded or memory-mapped.
            model: The reading model; without one the service only returns passages.
            previous: The snapshot in use; its encoder is shared if the files are the same.
            scorers: The models that rerank passages; all snapshots share them.

        Raises:
            MissingExtraError: The model extra is not installed.
            StoreError: A file is missing or damaged.
            UsageError: A retriever expression is invalid, or names an index that the snapshot does
                not have.
            RefusedError: The vector space of the model's question encoder is not the snapshot's.
        """
        snapshot = Snapshot.from_folder(folder)
        try:
            _check_not_empty(snapshot)
            available = AvailableRetrievers.plan(
                snapshot,
                settings,
                uses_inner_products=model is not None and model.uses_inner_products,
            )
            load_encoder = _create_encoder_loader(snapshot, settings, previous)
            if not settings.in_memory:
                mapped_files = get_file_sizes(previous.snapshot, previous.indexes) if previous else {}
                first_indexes = plan_retriever(snapshot, available.retrievers[0]).index_names
                opened_files = get_file_sizes(snapshot, available.indexes if settings.retrievers else first_indexes)
                fill_page_cache(map(snapshot.path, opened_files), sum(mapped_files.values()))
            context = RetrieverContext(snapshot, load_encoder, scorers, mmap=not settings.in_memory)
            return cls(served_ref, available, context, settings, model)
        except BaseException:
            snapshot.close()
            raise

    @classmethod
    def open_ranged(
        cls,
        store: Store,
        served_ref: ServedRef,
        settings: ServiceSettings,
        previous: Self | None = None,
        scorers: PairScorerCache | None = None,
    ) -> Self:
        """Open a snapshot whose files are read from the store by byte ranges; it has no model.

        Raises:
            UsageError: The store is a local folder, or no retriever can be searched by ranges.
            StoreError: A file cannot be read.
        """
        manifest = store.snapshots.get(served_ref.snapshot)
        snapshot = Snapshot.from_manifest(store, manifest, by_ranges=True, cache_bytes=settings.cache_bytes)
        if snapshot.ranges is None:
            snapshot.close()
            raise UsageError(f"{store.url} is a local folder, which is not read by ranges: leave out --from-store")
        try:
            _check_not_empty(snapshot)
            available = AvailableRetrievers.plan_ranged(snapshot, settings)
            load_encoder = _create_encoder_loader(snapshot, settings, previous)
            return cls(served_ref, available, RetrieverContext(snapshot, load_encoder, scorers), settings)
        except BaseException:
            snapshot.close()
            raise

    @property
    def is_ranged(self) -> bool:
        """Whether the snapshot's files are read from the store by byte ranges."""
        return self.snapshot.ranges is not None

    @property
    def id(self) -> str:
        """The snapshot's full id."""
        return self.snapshot.id

    @property
    def question_encoder(self) -> SharedQuestionEncoder | None:
        """The question encoder of /search; None if no retriever needs vectors."""
        encoder = self._context.loaded_encoder
        return encoder if isinstance(encoder, SharedQuestionEncoder) else None

    @property
    def monitored_index(self) -> tuple[str, Mapping[str, float]] | None:
        """The default retriever's index and search parameters; None if it combines several indexes.

        Also None if files are read by byte ranges, because exact search would read all vectors.
        """
        if self.is_ranged:
            return None
        default_retriever = self._retrievers[self._default_retriever]
        if isinstance(default_retriever, IndexRetriever) and default_retriever.query_type in ("vectors", "text"):
            return default_retriever.index, default_retriever.parameters
        return None

    def choose_depth(self, k: int | None) -> int:
        """Return `k`; if it is None, return the number of passages that the default retriever is searched for."""
        return self._retrievers[self._default_retriever].choose_depth(k)

    def search(self, queries: Queries, k: int | None, retriever: str | None = None) -> list[list[Hit]]:
        """Return the best `k` passages for each query, best first.

        With `k` None, 5 are returned, or all of a smaller snapshot. `retriever` is a canonical
        expression: one of `retrievers`, or a combination of `indexes`.

        Raises:
            UsageError: The retriever is invalid, needs an index that is not served, or returns
                fewer than `k` passages.
        """
        try:
            expression = self._default_retriever if retriever is None else retriever
            if expression in self.retrievers:
                served_retriever = self._retrievers.get(expression) or self._open_served(expression)
            else:
                self._check_searchable(expression)
                served_retriever = _open_retriever(self._context, expression, limits=self._request_limits)
            return served_retriever.search_queries(queries, served_retriever.choose_depth(k))
        except StoreError as error:
            self._check_exists(error)
            raise

    def _check_searchable(self, expression: str) -> None:
        """Check that a retriever can be searched without files that are not pulled.

        Raises:
            NotReadyError: The retriever needs files that are not pulled yet.
            UsageError: The retriever needs files that are not pulled, and the service pulls none.
        """
        if self.is_ranged and not can_search_by_ranges(self.snapshot, expression):
            choices = ", ".join(self.retrievers)
            if self._will_be_pulled:
                raise NotReadyError(f"{expression} needs files that are not pulled yet: search {choices} meanwhile")
            raise UsageError(
                f"{expression} cannot be searched by ranges, and this service pulls nothing: search {choices}"
            )

    def _check_exists(self, error: StoreError) -> None:
        """After a failed read, check that the store still has the snapshot.

        Raises:
            GoneError: The snapshot has expired or was taken down.
        """
        if self.is_ranged and not isinstance(error.__cause__, TimeoutError):
            with suppress(StoreError):
                store = self.snapshot.store
                if store.files.get_size(store.snapshots.manifest_path(self.id)) is None:
                    raise GoneError(
                        f"snapshot {self.id[:12]} expired or was taken down: repeat the request, without naming it"
                    ) from error

    def answer(
        self,
        questions: Sequence[str],
        k: int | None,
        retriever: str | None = None,
        callbacks: AnswerCallbacks = NO_CALLBACKS,
    ) -> list[Answer]:
        """Answer each question from its best `k` passages.

        Args:
            questions: The questions.
            k: Passages per question; None means the reader's default.
            retriever: Canonical expression, as for `search`.
            callbacks: Called while the answers are generated.

        Raises:
            UsageError: There is no model, or `search` would refuse the retriever.
            StoppedError: `callbacks.should_stop` returned True.
        """
        return self._get_reader(retriever).answer(questions, k, callbacks)

    def _get_reader(self, retriever: str | None) -> Reader:
        """Return the `Reader` for a retriever expression; None means the default retriever."""
        if self._model_context is None:
            raise UsageError("this service has no model, so it gives no answers: ask /search")
        reader = self._readers.get(self._default_retriever if retriever is None else retriever)
        if reader is None:
            built = build_retriever(
                self._model_context,
                retriever or "",
                products=self._uses_inner_products,
                limits=self._request_limits,
            )
            try:
                self._model_context.open(built.needs)
            except StoreError as error:
                if not built.needs.vectors:
                    raise
                raise UsageError(
                    f"the retriever {built.retriever.name} cannot be used for answers, since the "
                    "service was started without the passages' vectors: choose another one"
                ) from error
            reader = self._create_reader(built.retriever)
        return reader

    def warm_up(self) -> Self:
        """Run a few queries, so that files and compute kernels are loaded before the first request.

        Returns this snapshot. If a query fails, the snapshot is closed.

        Raises:
            RefusedError: A retriever returns nothing, or a vector or an answer cannot be computed.
        """
        try:
            self._run_warm_up_queries()
        except BaseException:
            self.close()
            raise
        return self

    def _run_warm_up_queries(self) -> None:
        rows = [self.snapshot.n * i // _WARM_UP_QUERIES for i in range(_WARM_UP_QUERIES)]
        queries = Queries([passage.title or passage.text[:100] or "?" for passage in self.snapshot.passages(rows)])
        for expression, retriever in list(self._retrievers.items()):
            try:
                hits = retriever.search_queries(queries, min(_WARM_UP_K, retriever.most))
            # An encoder's endpoint may be down, but other retrievers can answer.
            except EndpointError as error:
                _LOG.warning("%s cannot answer yet: %s", expression, error)
                continue
            # Single queries may return nothing: BM25 has no terms for a title of punctuation.
            if not any(hits):
                raise RefusedError(f"index {expression} of snapshot {self.id[:12]} finds nothing: build it again")
        if self._readers and self.model is not None and self.model.is_local:
            self.answer(queries.texts[:1], None)

    def close(self) -> None:
        """Close files and mappings, and free memory; do not use the object afterwards."""
        self._retrievers.clear()
        self._readers.clear()
        self._context.close()
        self._model_context = None
        self.snapshot.close()

    def _open_served(self, expression: str) -> SnapshotRetriever:
        """Return the retriever of an expression in `retrievers`; the first call opens it."""
        with self._lock:
            if expression not in self._retrievers:
                self._retrievers[expression] = _open_retriever(self._context, expression)
            return self._retrievers[expression]

    def _create_reader(self, retriever: SnapshotRetriever) -> Reader:
        assert self.model is not None
        return self.model.create_reader(retriever)

    @property
    def _uses_inner_products(self) -> bool:
        return self.model is not None and self.model.uses_inner_products


def _open_retriever(
    context: RetrieverContext, expression: str, *, products: bool = False, limits: RequestLimits | None = None
) -> SnapshotRetriever:
    built_retriever = build_retriever(context, expression, products=products, limits=limits)
    context.open(built_retriever.needs)
    return built_retriever.retriever


def _open_for_model(context: RetrieverContext, model: ServedModel | None) -> RetrieverContext | None:
    """Return `context` with the model's question encoder if it has one; None without a model."""
    if model is None:
        return None
    return context if model.question_encoder is None else context.with_encoder(model.question_encoder)


def _check_not_empty(snapshot: Snapshot) -> None:
    if not snapshot.n:
        raise RefusedError(f"snapshot {snapshot.id[:12]} has no passages: build another one")


def fill_page_cache(files: Iterable[Path], mapped_bytes: int = 0) -> None:
    """Read files that will be memory-mapped, in order, so that they are in the page cache.

    Otherwise the first searches would read them from the disk page by page. Stop when the free
    memory is used up; `mapped_bytes` of it are reserved for files that are mapped already.
    """
    remaining_bytes = (get_free_bytes() or 0) - mapped_bytes  # free memory includes the page cache
    for file in files:
        remaining_bytes -= file.stat().st_size
        if remaining_bytes < 0:
            return
        with file.open("rb", buffering=0) as index_file:
            while index_file.read(_READ_BYTES):
                pass


def _create_encoder_loader(
    snapshot: Snapshot, settings: ServiceSettings, previous: LoadedSnapshot | None
) -> Callable[[], SharedQuestionEncoder]:
    """Return a function that loads the question encoder, to call when a retriever needs it.

    The function returns the previous snapshot's encoder if its files are the same.
    """
    is_reusable = previous is not None and _list_encoder_files(previous.snapshot) == _list_encoder_files(snapshot)
    reusable_encoder = previous.question_encoder if previous is not None and is_reusable else None

    def load_encoder() -> SharedQuestionEncoder:
        return reusable_encoder or SharedQuestionEncoder.load(
            snapshot.folder(QUESTION_ENCODER), count_search_threads(settings)
        )

    return load_encoder


def _list_encoder_files(snapshot: Snapshot) -> list[tuple[str, str]]:
    files = snapshot.manifest.content.files
    return sorted((path, blob.id) for path, blob in files.items() if path.startswith(f"{QUESTION_ENCODER}/"))
