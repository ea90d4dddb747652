"""The service without a transport: it follows a ref, and answers requests in batches."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

from rag_model.errors import BookwheelError, UsageError
from rag_model.retrieve.hits import Hit
from rag_model.serving.answering import execution
from rag_model.serving.answering.available_retrievers import explain_retriever, list_passage_kinds
from rag_model.serving.answering.batcher import AnswerProgress, Batcher, QueueFullError
from rag_model.serving.answering.execution import AnswerResult, SearchResult
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot
from rag_model.serving.following.follower import (
    FolderFollower,
    FollowedRef,
    PulledFolder,
    RefFollower,
)
from rag_model.serving.following.group import LeaderSlot, WorkerFollower, WorkerSlot
from rag_model.serving.following.pins import PinnedSnapshots, SnapshotOpeningError
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.monitoring.observer import Observer, notify
from rag_model.serving.monitoring.tracing import RequestTracer
from rag_model.serving.runtime import (
    LoneRequestThreads,
    count_answer_threads,
    count_answer_workers,
    count_lone_threads,
    count_search_threads,
    count_search_workers,
    limit_compute_threads,
    set_lowest_priority,
)
from rag_model.serving.settings import ServiceSettings
from rag_model.serving.workers import EXCHANGE_SECONDS, WorkerLink

# A large request is cut into chunks of a quarter of a full batch, so that other clients wait less
# for their turn. The time per query on a CPU is the same for 16 queries as for 64.
_CHUNKS_IN_BATCH = 4
# For this time after a small request, large requests use one worker fewer, because the client may
# send another small request.
_RESERVE_SECONDS = 1.0
_RESERVE_CHECK_SECONDS = 0.05
_FULL_QUEUE_SECONDS = 0.05  # seconds between two attempts to enter a full queue
# How long a request waits for a snapshot that is being opened. If another worker has to look up the
# name, this takes four exchanges of messages; the rest is time for the look-up.
_OPENING_SECONDS = 10 * EXCHANGE_SECONDS
_OPENING_CHECK_SECONDS = 0.02


class Service:
    """Answers requests from the snapshot that a ref names at the time of the request."""

    def __init__(
        self,
        target: FollowedRef | PulledFolder,
        settings: ServiceSettings | None = None,
        observer: Observer | None = None,
        on_fatal: Callable[[BookwheelError], None] = lambda error: None,
        tracer: RequestTracer | None = None,
        link: WorkerLink | None = None,
    ) -> None:
        """Create the service; `start` begins to follow `target`.

        Args:
            target: The ref or the folder to serve.
            settings: Limits, batch sizes and polling.
            observer: Receives the service's events.
            on_fatal: Called with the error if no snapshot can be served.
            tracer: Records a trace of each request; None: no traces.
            link: The link of this worker to the other workers; None for a single process.
        """
        self.target, self.settings = target, settings or ServiceSettings()
        self.observer = observer or Observer()
        self.tracer = tracer
        self.slot = self._create_slot(link)
        self.pins = PinnedSnapshots(self.slot, self.settings)
        self.follower = self._create_follower(on_fatal, link)
        # Chunks of large requests are searched by threads of the lowest priority, so that they do
        # not delay small requests.
        self._chunk_batcher = self._create_search_batcher("retrieve", set_lowest_priority)
        threads = count_search_threads(self.settings)
        self._lone_threads = LoneRequestThreads(threads, count_lone_threads(self.settings))
        self._search_batcher = self._create_search_batcher("search", lone_request_context=self._use_lone_threads)
        self._answer_batcher = self._create_answer_batcher()
        self._last_small_request_time = -_RESERVE_SECONDS
        self.is_draining = False

    def start(self) -> None:
        """Start to follow the ref."""
        self.follower.start()

    async def search(
        self, questions: Sequence[str], k: int | None = None, retriever: str | None = None, client: str = ""
    ) -> SearchResult:
        """Return the best `k` passages for each question, by default 5; clients take turns.

        Raises:
            QueueFullError, DeadlineError, ShuttingDownError: See `Batcher.submit`.
            NotReadyError: No snapshot is loaded yet.
            UsageError: The retriever is invalid or not served, or returns fewer than `k` passages.
        """
        seconds = self.settings.request_seconds
        on_queued = partial(notify, self.observer.on_queued, "search")
        with self._reserve_core():
            return await self._search_batcher.submit(questions, k, retriever, seconds, on_queued, client)

    async def retrieve(
        self, queries: Sequence[str], k: int | None, retriever: str | None, client: str, loaded_snapshot: LoadedSnapshot
    ) -> list[list[Hit]]:
        """Return the best `k` passages for each query, from a snapshot that the caller holds open.

        A large request is cut into chunks, which wait in a separate queue and are searched by
        threads of the lowest priority. These threads leave a core free while other clients send
        small requests. If the queue is full, chunks wait until there is space. The time limit
        applies to each chunk, so a large request may take longer if it makes progress.

        Raises:
            BookwheelError: See `search`.
        """
        chunk_size = max(1, self.settings.batch_questions // _CHUNKS_IN_BATCH)
        if len(queries) <= chunk_size:
            with self._reserve_core():
                return await self._search_when_queue_has_room(
                    self._search_batcher, queries, k, retriever, client, loaded_snapshot
                )
        query_chunks = [queries[i : i + chunk_size] for i in range(0, len(queries), chunk_size)]
        chunk_hits: list[list[list[Hit]]] = [[] for _ in query_chunks]
        remaining_chunks = deque(range(len(query_chunks)))

        async def search_chunks(*, leaves_core_free: bool) -> None:
            while remaining_chunks:
                if leaves_core_free and self._is_core_reserved():
                    await asyncio.sleep(_RESERVE_CHECK_SECONDS)
                    continue
                chunk_number = remaining_chunks.popleft()
                chunk_hits[chunk_number] = await self._search_when_queue_has_room(
                    self._chunk_batcher, query_chunks[chunk_number], k, retriever, client, loaded_snapshot
                )

        # Two tasks per worker, so that the next chunk waits in the queue while one is searched.
        n_workers = count_search_workers(self.settings)
        search_tasks = [
            asyncio.ensure_future(search_chunks(leaves_core_free=i >= max(1, n_workers - 1)))
            for i in range(2 * n_workers)
        ]
        try:
            await asyncio.gather(*search_tasks)
            return [hits for hits_in_chunk in chunk_hits for hits in hits_in_chunk]
        finally:
            for search_task in search_tasks:
                search_task.cancel()

    @contextmanager
    def _reserve_core(self) -> Iterator[None]:
        """Let large requests leave a core free during a small request and shortly after it."""
        self._last_small_request_time = time.monotonic()
        try:
            yield
        finally:
            self._last_small_request_time = time.monotonic()

    def _is_core_reserved(self) -> bool:
        return time.monotonic() - self._last_small_request_time < _RESERVE_SECONDS

    async def _search_when_queue_has_room(
        self,
        batcher: Batcher[SearchResult],
        queries: Sequence[str],
        k: int | None,
        retriever: str | None,
        client: str,
        loaded_snapshot: LoadedSnapshot,
    ) -> list[list[Hit]]:
        seconds = self.settings.request_seconds
        on_queued, deadline = partial(notify, self.observer.on_queued, "search"), time.monotonic() + seconds
        while True:
            try:
                search_result = await batcher.submit(
                    queries, k, retriever, seconds, on_queued, client, loaded_snapshot=loaded_snapshot
                )
            except QueueFullError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_FULL_QUEUE_SECONDS)
            else:
                return search_result.hits

    @asynccontextmanager
    async def hold(self, name: str | None) -> AsyncIterator[LoadedSnapshot]:
        """Hold a snapshot open, by its id or as `ref@number`; None means the current one.

        If the snapshot is being opened, wait only a moment, because it may not even exist.

        Raises:
            BookwheelError: See `PinnedSnapshots.hold`.
        """
        deadline = time.monotonic() + min(_OPENING_SECONDS, self.settings.request_seconds)
        while True:
            try:
                loaded_snapshot = self.pins.hold(name)
                break
            except SnapshotOpeningError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_OPENING_CHECK_SECONDS)
        try:
            yield loaded_snapshot
        finally:
            # The snapshot's files are closed in another thread, because this takes too long for the
            # event loop.
            self.slot.release(loaded_snapshot, partial(asyncio.get_running_loop().run_in_executor, None))

    async def answer(
        self,
        questions: Sequence[str],
        k: int | None = None,
        retriever: str | None = None,
        client: str = "",
        progress: AnswerProgress | None = None,
    ) -> AnswerResult:
        """Answer questions from their best `k` passages; `progress` receives partial results.

        Raises:
            UsageError: There is no model, or `search` would refuse the retriever or `k`.
            BookwheelError: See `search`.
        """
        if self.target.model is None:
            raise UsageError("this service has no model, so it gives no answers: ask /search")
        seconds = self.settings.request_seconds
        on_queued = partial(notify, self.observer.on_queued, "answer")
        return await self._answer_batcher.submit(questions, k, retriever, seconds, on_queued, client, progress)

    def close(self) -> None:
        """Answer the requests in progress, then free everything."""
        self.is_draining = True
        # The follower stops after the batchers, because it interrupts all reads from the store.
        for batcher in self._batchers:
            batcher.close()
        self.follower.stop()
        current = self.slot.current
        self.pins.close()
        self.slot.close()
        if self.tracer is not None:
            notify(self.tracer.close)
        # The model is closed last, because an override check of the observer may still call it.
        notify(self.observer.close)
        if current is not None and current.model is not None:
            current.model.close()

    @property
    def is_ready(self) -> bool:
        """Whether a snapshot is loaded, all threads run and the service is not shutting down."""
        return self.slot.served_ref is not None and not self.is_draining and not self.thread_problem

    @property
    def thread_problem(self) -> str:
        """Which thread does not run, and why, in one sentence; empty if all threads run."""
        batcher_threads = (thread for batcher in self._batchers for thread in batcher.threads)
        threads = (*batcher_threads, self.follower.thread, *self.observer.threads)
        return next((thread.problem for thread in threads if thread.problem), "")

    def describe(self) -> dict[str, Any]:
        """Return the JSON of /snapshot: the served snapshot, and a refused version if any.

        Raises:
            NotReadyError: No snapshot is loaded yet.
        """
        refusal = self.follower.refusal
        with self.slot.acquire() as loaded_snapshot:
            snapshot, served_ref = loaded_snapshot.snapshot, loaded_snapshot.served_ref
            return {
                "snapshot": served_ref.snapshot,
                "ref": served_ref.ref,
                "number": served_ref.number or None,
                "created_at": served_ref.created_at or None,
                "passages": snapshot.n,
                "indexes": list(loaded_snapshot.indexes),
                "retrievers": list(loaded_snapshot.retrievers),
                "model": loaded_snapshot.model.id if loaded_snapshot.model else None,
                "refused": None if refusal is None else refusal.to_json(),
                "store_problem": self.follower.problem or None,
                "explanations": [explain_retriever(snapshot, expression) for expression in loaded_snapshot.retrievers],
                "kinds": list(list_passage_kinds(snapshot)),
                "notes": list(loaded_snapshot.notes),
            }

    def explain_unready(self) -> str:
        """Explain in one sentence why the service cannot answer now."""
        if self.is_draining:
            return "the service is shutting down"
        if self.slot.served_ref is not None and self.thread_problem:
            return self.thread_problem
        refusal = self.follower.refusal
        reason = self.follower.problem or self.thread_problem or (refusal.reason if refusal else "it is being loaded")
        return f"no snapshot is open: {reason}"

    def _create_slot(self, link: WorkerLink | None) -> SnapshotSlot:
        on_freed, on_loaded = partial(notify, self.observer.on_freed), partial(notify, self.observer.on_loaded)
        if link is None:
            return SnapshotSlot(on_freed, on_loaded)
        return (LeaderSlot if link.is_leader else WorkerSlot)(on_freed, link, on_loaded)

    def _create_follower(
        self, on_fatal: Callable[[BookwheelError], None], link: WorkerLink | None
    ) -> RefFollower | FolderFollower | WorkerFollower:
        if link is not None and not link.is_leader:
            assert isinstance(self.slot, WorkerSlot)
            return WorkerFollower(self.target, self.slot, self.settings, self.observer, self.pins, link)
        if isinstance(self.target, PulledFolder):
            return FolderFollower(self.target, self.slot, self.settings, self.observer, on_fatal, self.pins)
        return RefFollower(self.target, self.slot, self.settings, self.observer, on_fatal, self.pins)

    @property
    def _batchers(self) -> tuple[Batcher[Any], ...]:
        return self._search_batcher, self._chunk_batcher, self._answer_batcher

    def _use_lone_threads(self) -> AbstractContextManager[None]:
        return self._lone_threads.apply() if self._chunk_batcher.is_idle else nullcontext()

    def _create_search_batcher(
        self,
        name: str,
        prepare_thread: Callable[[], None] = lambda: None,
        lone_request_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Batcher[SearchResult]:
        def init_thread() -> None:
            prepare_thread()
            limit_compute_threads(count_search_threads(self.settings))

        return Batcher(
            name,
            partial(execution.search_batch, self.slot, self.observer),
            queue_limit=self.settings.queue_questions,
            batch_limit=self.settings.batch_questions,
            max_wait_ms=self.settings.batch_wait_ms,
            workers=count_search_workers(self.settings),
            init_thread=init_thread,
            lone_request_context=lone_request_context,
            on_thread_death=partial(notify, self.observer.on_thread_death),
        )

    def _create_answer_batcher(self) -> Batcher[AnswerResult]:
        return Batcher(
            "answer",
            partial(execution.answer_batch, self.slot, self.observer),
            queue_limit=self.settings.queue_answers,
            batch_limit=self.settings.batch_answers,
            workers=count_answer_workers(self.settings, self.target.model),
            init_thread=partial(limit_compute_threads, count_answer_threads(self.settings, self.target.model)),
            on_thread_death=partial(notify, self.observer.on_thread_death),
        )
