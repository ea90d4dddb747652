"""Load a snapshot with its retrievers, its question encoder and its reading model.

A `LoadedSnapshot` is replaced and freed as a whole, so a reply never mixes two snapshots. A loaded
snapshot shares the encoder and the model of the previous snapshot if they are the same, for example
after a monthly rebuild.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rag_model.corpus.records import PROSE, STRUCTURES
from rag_model.errors import (
    EndpointError,
    GoneError,
    NotReadyError,
    RefusedError,
    ResourceError,
    StoreError,
    UsageError,
)
from rag_model.index.postings.base_kind import PostingsKind, estimate_decoded_bytes
from rag_model.process import format_bytes
from rag_model.reading.answer import Answer
from rag_model.reading.reader import NO_CALLBACKS, AnswerCallbacks, Reader
from rag_model.retrieve.context import RetrieverContext, RetrieverNeeds
from rag_model.retrieve.dense import IndexRetriever
from rag_model.retrieve.expression import Call, Word, parse
from rag_model.retrieve.factory import (
    RequestLimits,
    build_retriever,
    plan_retriever,
)
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.indexes import can_read_by_ranges, get_representation_type
from rag_model.retrieve.models import PairScorerCache
from rag_model.retrieve.retriever import Queries, SnapshotRetriever
from rag_model.serving.answering.served_model import ServedModel, SharedQuestionEncoder
from rag_model.serving.runtime import count_search_threads
from rag_model.serving.settings import ServiceSettings
from rag_model.store.store import Store
from rag_model.store.versions.manifest import QUESTION_ENCODER, Content, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot

_LOG = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")  # control group (version 2) with the limits of the container
_READ_BYTES = 1 << 20
_LIBRARY_BYTES = 450_000_000  # bytes of a process with torch and faiss, without an encoder
_INDEX_FOLDER = "index/"
_WARM_UP_QUERIES = 3  # queries that are searched before the snapshot is served
_WARM_UP_K = 5
_EXPLANATION_BY_KIND = {
    "exact": "by meaning: compares the question with every passage",
    "hnsw": "by meaning, along a graph of near passages: fast",
    "ivf": "by meaning, in lists of compressed vectors: little memory",
    "bm25": "by the words of the question; rare words count more",
    "impact": "by learned weights of words, also of related ones",
    "tokens": "by meaning, word by word",
}
_EXPLANATION_BY_FUNCTION = {
    "rrf": "joins the rankings of {}",
    "interpolate": "joins the scores of {}",
    "rerank": "a model reads the best passages of {} and orders them again",
    "maxsim": "compares the best passages of {} word by word",
    "where": "only some kinds of passages of {}",
}


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


def get_free_bytes() -> int | None:
    """Return the bytes of free memory, limited by those of the container; None if unknown."""
    limits = [size for size in (_get_machine_bytes(), _get_container_bytes()) if size is not None]
    return min(limits, default=None)


def _get_machine_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    return None


def _get_container_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):  # memory.max is "max" if there is no limit
        limit_bytes, used_bytes = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        reclaimable_bytes = int((_CGROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        return limit_bytes - used_bytes + reclaimable_bytes
    return None


def check_memory(content: Content, indexes: Sequence[str], settings: ServiceSettings) -> None:
    """Check that indexes fit into the free memory; indexes that are only mapped always fit.

    Raises:
        ResourceError: The indexes do not fit.
    """
    free_bytes = get_free_bytes()
    if not settings.in_memory or free_bytes is None:
        return
    index_files = [content.files.get(content.index_file(name)) for name in indexes]
    needed_bytes = sum(index_file.size for index_file in index_files if index_file is not None)
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the indexes need {format_bytes(needed_bytes)} of memory next to the ones in use, and "
            f"{format_bytes(free_bytes)} are free: give the service more memory, or serve without "
            "--in-memory"
        )


@dataclass(frozen=True, slots=True)
class AvailableRetrievers:
    """The retrievers that a service offers over a snapshot, and the indexes that they need."""

    retrievers: tuple[str, ...]  # expressions; the first is the default
    indexes: tuple[str, ...]  # opened indexes; requests may combine them to other retrievers
    needs_embeddings: bool  # whether the vectors of passages must be pulled
    notes: tuple[str, ...] = ()  # retrievers that are not served, and why

    @classmethod
    def plan_ranged(cls, snapshot: Snapshot, settings: ServiceSettings) -> Self:
        """Plan the retrievers that can be searched by byte ranges: those of `plan`, then other indexes.

        If the settings name retrievers, no other indexes are added.

        Raises:
            UsageError: No retriever and no index can be searched by byte ranges.
        """
        plan_with_pull = cls.plan(snapshot, replace(settings, pull_embeddings=True), uses_inner_products=False)
        other_indexes = () if settings.retrievers else snapshot.manifest.content.indexes
        candidates = (*plan_with_pull.retrievers, *other_indexes)
        retrievers = tuple(dict.fromkeys(name for name in candidates if _can_read_by_ranges(snapshot, name)))
        if not retrievers:
            raise UsageError(
                f"none of {', '.join(plan_with_pull.retrievers)} of snapshot {snapshot.id[:12]} "
                "can be searched in the store by ranges: choose an index of the kind bm25 or ivf "
                "with --index, or pull the snapshot"
            )
        retriever_needs = RetrieverNeeds.merge(plan_retriever(snapshot, expression) for expression in retrievers)
        notes = [*plan_with_pull.notes]
        if unsearchable_retrievers := [name for name in plan_with_pull.retrievers if name not in retrievers]:
            consequence = "served once the snapshot is pulled" if settings.pull else "not served without a pull"
            notes.append(
                f"{', '.join(unsearchable_retrievers)} cannot be searched by ranges: {consequence}, and the "
                f"default is {retrievers[0]}; an index of inverted lists (IVF) can be searched by "
                "ranges"
            )
        return cls(retrievers, retriever_needs.index_names, needs_embeddings=False, notes=tuple(notes))

    @classmethod
    def plan(cls, snapshot: Snapshot, settings: ServiceSettings, *, uses_inner_products: bool) -> Self:
        """Plan the retrievers that the settings name, or all retrievers that the snapshot offers.

        If the settings name no retrievers, these are the snapshot's default retriever, its other
        indexes that fit into memory (`_choose_retrievers`), and the fusion of the default with BM25
        if the snapshot has both.

        Args:
            snapshot: The snapshot to serve.
            settings: The service's settings.
            uses_inner_products: Whether a model weighs the hits by inner products.

        Raises:
            UsageError: A retriever expression is invalid, it names an index that the snapshot does
                not have, or the retrievers need more memory than the settings allow.
        """
        content = snapshot.manifest.content
        notes: list[str] = []
        retrievers = settings.retrievers or _choose_retrievers(snapshot, settings, uses_inner_products, notes)
        retriever_needs = RetrieverNeeds.merge(
            plan_retriever(snapshot, expression, products=uses_inner_products) for expression in retrievers
        )
        if settings.retrievers and settings.memory_bytes is not None:
            needed_bytes = _count_bytes(snapshot, _list_resource_files(snapshot, retriever_needs, settings), settings)
            if needed_bytes > settings.memory_bytes:
                raise UsageError(
                    f"{', '.join(retrievers)} of snapshot {snapshot.id[:12]} need "
                    f"{format_bytes(needed_bytes)}, and --memory allows "
                    f"{format_bytes(settings.memory_bytes)}: allow more, or leave the choice of "
                    "retrievers to the service"
                )
        needs_vectors = settings.pull_embeddings or retriever_needs.reads_vectors(content)
        return cls(retrievers, retriever_needs.index_names, needs_vectors, tuple(notes))


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
                mapped_files = _get_file_sizes(previous.snapshot, previous.indexes) if previous else {}
                first_indexes = plan_retriever(snapshot, available.retrievers[0]).index_names
                opened_files = _get_file_sizes(snapshot, available.indexes if settings.retrievers else first_indexes)
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
        if self.is_ranged and not _can_read_by_ranges(self.snapshot, expression):
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


def _choose_retrievers(
    snapshot: Snapshot, settings: ServiceSettings, uses_inner_products: bool, notes: list[str]
) -> tuple[str, ...]:
    """Return the default retriever, other indexes that can be opened, and a fusion with BM25.

    An index cannot be opened if its kind is not installed, if one of its files was not pulled, if
    it needs vectors that the settings do not pull, or if it needs more memory than is free. It
    needs memory for its encoder and, with `in_memory` or a memory limit, for its files.

    If the default does not fit into the memory limit, the first retriever is the index with the
    largest recall among those that fit. `notes` gets a sentence on each index that does not fit.

    Raises:
        UsageError: No index fits into the memory of the settings.
    """
    content = snapshot.manifest.content
    default = content.default_retriever
    default_needs = plan_retriever(snapshot, default, products=uses_inner_products)
    may_read_vectors = settings.pull_embeddings or default_needs.reads_vectors(content)
    opened_files = _list_resource_files(snapshot, default_needs, settings)
    free_bytes = get_free_bytes() if settings.memory_bytes is None else settings.memory_bytes
    index_names, retrievers = [name for name in content.indexes if name != default], [default]
    bytes_by_retriever = {default: _count_bytes(snapshot, opened_files, settings)}
    if settings.memory_bytes is not None and bytes_by_retriever[default] > settings.memory_bytes:
        default_representations = {content.representation_of(name) for name in default_needs.index_names}
        index_names.sort(
            key=lambda name: (
                content.representation_of(name) not in default_representations,
                -(_get_recall(snapshot, name)[1] or 0),
            )
        )
        retrievers, opened_files = [], {}
    for name in index_names:
        try:
            retriever_needs = plan_retriever(snapshot, name, products=uses_inner_products)
            files = _list_resource_files(snapshot, retriever_needs, settings)
        except (StoreError, UsageError):  # for example, the index kind is not installed
            continue
        if retriever_needs.reads_vectors(content) and not may_read_vectors:
            continue
        if isinstance(snapshot.location, Path) and not _are_pulled(
            snapshot, [*retriever_needs.files(snapshot), *files]
        ):
            continue
        bytes_by_retriever[name] = needed_bytes = _count_bytes(snapshot, opened_files | files, settings)
        if free_bytes is not None and needed_bytes > free_bytes and not files.keys() <= opened_files.keys():
            continue
        opened_files |= files
        retrievers.append(name)
    if settings.memory_bytes is not None:
        notes += _describe_unserved_indexes(snapshot, bytes_by_retriever, retrievers, settings.memory_bytes)
    text_index = next(
        (name for name in retrievers if name in content.indexes and _takes_text(snapshot, name)),
        None,
    )
    if retrievers[0] in content.indexes and text_index not in (None, retrievers[0]):
        retrievers.append(str(parse(f"rrf({retrievers[0]}, {text_index})")))
    return tuple(retrievers)


def _count_bytes(snapshot: Snapshot, sizes: Mapping[str, int], settings: ServiceSettings) -> int:
    """Return the bytes of memory that files need; with a memory limit, in all processes together.

    The processes share the index files, but each process has its own libraries, encoders and
    decoded posting lists.
    """
    if settings.memory_bytes is None:
        return sum(sizes.values())
    shared_bytes = sum(n_bytes for path, n_bytes in sizes.items() if path.startswith(_INDEX_FOLDER))
    decoded_bytes = sum(
        estimate_decoded_bytes(snapshot.n, n_bytes)
        for path, n_bytes in sizes.items()
        if path.endswith(f".{PostingsKind.suffix}")
    )
    process_bytes = sum(sizes.values()) - shared_bytes + decoded_bytes + _LIBRARY_BYTES
    return shared_bytes + process_bytes * settings.processes


def _describe_unserved_indexes(
    snapshot: Snapshot, bytes_by_retriever: Mapping[str, int], retrievers: Sequence[str], memory_bytes: int
) -> list[str]:
    """Return a sentence for each index that does not fit into the memory, with its recall if that
    can be compared with the default's.

    Raises:
        UsageError: No index fits.
    """
    if not retrievers:
        name, needed_bytes = min(bytes_by_retriever.items(), key=lambda item: item[1])
        raise UsageError(
            f"the smallest index of snapshot {snapshot.id[:12]} is {name}, which needs "
            f"{format_bytes(needed_bytes)} with the service, and --memory allows "
            f"{format_bytes(memory_bytes)}: allow more, or build a smaller index"
        )
    measure, served_recall = _get_recall(snapshot, retrievers[0])
    notes, indexes = [], snapshot.manifest.content.indexes
    for name, needed_bytes in bytes_by_retriever.items():
        if name in retrievers:
            continue
        note = (
            f"{name} is not served: it needs {format_bytes(needed_bytes)}, and {format_bytes(memory_bytes)} are allowed"
        )
        recall = _get_recall(snapshot, name)[1]
        # Recalls are only comparable within a representation, because each is measured against
        # exhaustive search of the same representation.
        representations = {
            snapshot.manifest.content.representation_of(index) for index in (name, retrievers[0]) if index in indexes
        }
        if served_recall is not None and recall is not None and len(representations) == 1:
            note += f"; {retrievers[0]} has {measure} {served_recall:.3f}, {name} has {recall:.3f}"
        notes.append(note)
    return notes


def _get_recall(snapshot: Snapshot, name: str) -> tuple[str, float | None]:
    """Return the name of the recall metric of an index, and the mean recall, from the manifest."""
    metrics = snapshot.manifest.metrics.get(name)
    for measure, recall in metrics.items() if isinstance(metrics, dict) else ():
        if re.fullmatch(r"recall@\d+", measure) and isinstance(recall, int | float):
            return measure, float(recall)
    return "recall", None


def explain_retriever(snapshot: Snapshot, expression: str) -> str:
    """Return a line for the search page on how a retriever works, with its recall if measured."""
    tree, indexes = parse(expression), snapshot.manifest.content.indexes
    if isinstance(tree, Call) and tree.name in _EXPLANATION_BY_FUNCTION:
        children = [str(child) for child in tree.arguments if isinstance(child, Word | Call)]
        children = children[:1] if tree.name in ("rerank", "maxsim", "where") else children
        return _EXPLANATION_BY_FUNCTION[tree.name].format(" and ".join(children))
    name = tree.name if isinstance(tree, Call) else tree.split_depth()[0]
    index_entry = indexes.get(name, {})
    kind = index_entry.get("kind", name) if isinstance(index_entry, dict) else name
    explanation = _EXPLANATION_BY_KIND.get(kind, f"by an index of the kind {kind}")
    measure, recall = _get_recall(snapshot, name)
    return f"{explanation}; {measure} {recall:.3f}" if recall is not None else explanation


def list_passage_kinds(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the kinds of passages in a snapshot, or () if all passages are prose."""
    chunk_recipe = snapshot.manifest.content.recipe.get("chunk")
    structures = chunk_recipe.get("structures") if isinstance(chunk_recipe, dict) else None
    kinds = [kind for kind, structure in STRUCTURES.items() if structure in (structures or ())]
    return (PROSE, *kinds) if kinds else ()


def _can_read_by_ranges(snapshot: Snapshot, expression: str) -> bool:
    """Return whether a retriever can be searched by reading byte ranges, without pulling files."""
    try:
        retriever_needs = plan_retriever(snapshot, expression)
    except (StoreError, UsageError):
        return False
    if retriever_needs.graphs or not all(can_read_by_ranges(snapshot, name) for name in retriever_needs.index_names):
        return False
    content, range_files = snapshot.manifest.content, snapshot.ranges
    row_paths = [
        content.rows_path(name, part.name) for name in retriever_needs.vectors for part in content.parts if part.rows
    ]
    return range_files is not None and all(map(range_files.covers, row_paths))


def _takes_text(snapshot: Snapshot, name: str) -> bool:
    return get_representation_type(snapshot, name) == "text"


def _list_resource_files(
    snapshot: Snapshot, retriever_needs: RetrieverNeeds, settings: ServiceSettings
) -> dict[str, int]:
    """Return path and size in bytes of each file that a retriever loads into memory."""
    content = snapshot.manifest.content
    indexes = [name for name in retriever_needs.index_names if not _takes_text(snapshot, name)]
    folders = {f"{question_encoder_path(content.representation_of(name))}/" for name in indexes}
    size_by_path = {path: blob.size for path, blob in content.files.items() if path.startswith(tuple(folders))}
    counts_indexes = settings.in_memory or settings.memory_bytes is not None
    return size_by_path | (_get_file_sizes(snapshot, retriever_needs.index_names) if counts_indexes else {})


def _are_pulled(snapshot: Snapshot, paths: Sequence[str]) -> bool:
    try:
        for path in paths:
            snapshot.path(path)
    except StoreError:
        return False
    return True


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


def _get_file_sizes(snapshot: Snapshot, names: Sequence[str]) -> dict[str, int]:
    """Return path and size in bytes of each file of the indexes; `exact` has no file."""
    content = snapshot.manifest.content
    paths = [content.index_file(name) for name in names if name in content.indexes]
    return {path: content.files[path].size for path in paths}


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
