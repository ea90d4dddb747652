"""Batch concurrent requests: they wait in a bounded queue, from which worker threads take batches.

Clients take turns (round robin). If the queue is full, a request of a client with few queued
questions evicts the newest request of the client with the most queued questions.

While the workers are busy, requests accumulate in the queue. A worker that has just answered
several requests waits briefly for its share of the next requests, because clients that were
answered together tend to send their next requests together, and batches of equal size waste the
least time. A single client never waits.

Only one sleeping worker is woken at a time: the first worker for which enough requests wait. So a
client that is alone is always served by the same thread, and no other thread is woken without work.

`AnswerProgress` passes partial answers from a worker thread to the event loop that streams them.
Pieces of text that wait to be sent are joined, so that a slow client takes no more memory than its
answers.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from rag_model.errors import BookwheelError
from rag_model.retrieve.hits import Hit
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot
from rag_model.serving.monitoring.tracing import CURRENT_TRACE, RequestTrace
from rag_model.serving.runtime import SupervisedThread

_LOG = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True)
class RetrievedPassages:
    """The passages of the answers; they invalidate all text that was sent before."""

    snapshot: str
    model: str
    hits: Sequence[Sequence[Hit]]  # hits of each question, best first


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text to append to one answer."""

    position: int  # position of the question in its request, from 0
    text: str


class AnswerProgress:
    """The partial answers of one request.

    Create it and read it in one event loop; write to it from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._change_event = asyncio.Event()
        self._passages: RetrievedPassages | None = None
        self._texts: dict[int, str] = {}  # new text by position of the question
        self._is_finished = False

    def set_passages(self, passages: RetrievedPassages) -> None:
        """Record the passages, and drop text that a failed batch may have left."""
        self._call_in_loop(self._store_passages, passages)

    def append_delta(self, delta: AnswerDelta) -> None:
        """Append text to an answer."""
        self._call_in_loop(self._store_delta, delta)

    def finish(self) -> None:
        """Mark the end of the updates; call it from the event loop's thread."""
        self._is_finished = True
        self._change_event.set()

    async def wait_for_updates(self) -> Sequence[RetrievedPassages | AnswerDelta]:
        """Wait for updates and return them in order; [] after `finish`."""
        await self._change_event.wait()
        updates: list[RetrievedPassages | AnswerDelta] = [] if self._passages is None else [self._passages]
        updates += [AnswerDelta(position, text) for position, text in self._texts.items()]
        self._passages, self._texts = None, {}
        if not self._is_finished:
            self._change_event.clear()
        return updates

    def _store_passages(self, passages: RetrievedPassages) -> None:
        self._passages, self._texts = passages, {}
        self._change_event.set()

    def _store_delta(self, delta: AnswerDelta) -> None:
        self._texts[delta.position] = self._texts.get(delta.position, "") + delta.text
        self._change_event.set()

    def _call_in_loop(self, method: Callable[[Any], None], argument: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and so have its callers
            self._loop.call_soon_threadsafe(method, argument)


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[_Reply]):
    """A request in the queue, with the future that receives its reply."""

    questions: Sequence[str]
    k: int | None
    retriever: str | None  # canonical expression; None means the default retriever
    loop: asyncio.AbstractEventLoop
    reply: "asyncio.Future[_Reply]"
    client: str = ""  # requests with the same `client` share a turn
    # receives passages and text before the reply is complete; None: only the whole reply is sent
    progress: AnswerProgress | None = None
    # the snapshot to search, which the caller holds open; None means the current one
    loaded_snapshot: LoadedSnapshot | None = None
    trace: RequestTrace | None = field(default_factory=CURRENT_TRACE.get)
    queued_at: int = field(default_factory=time.time_ns)  # nanoseconds since the epoch

    @property
    def is_abandoned(self) -> bool:
        """Whether the caller has stopped waiting. Thread-safe."""
        return self.reply.done()


class RequestQueue(Generic[_Reply]):
    """A fair queue: FIFO within a client, round robin between clients. Not thread-safe."""

    def __init__(self) -> None:
        self.question_count = 0  # number of questions in all requests
        self._request_count = 0
        # clients in the order of their turns
        self._requests_by_client: dict[str, deque[QueuedRequest[_Reply]]] = {}

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._request_count

    def add(self, request: QueuedRequest[_Reply]) -> None:
        """Append a request after all other requests of the same client."""
        self._requests_by_client.setdefault(request.client, deque()).append(request)
        self._change_counts(request, 1)

    def peek(self) -> QueuedRequest[_Reply]:
        """Return the next request without removing it."""
        return next(iter(self._requests_by_client.values()))[0]

    def pop(self) -> QueuedRequest[_Reply]:
        """Remove and return the next request; its client moves to the end of the line."""
        client = next(iter(self._requests_by_client))
        client_requests = self._requests_by_client.pop(client)
        request = client_requests.popleft()
        if client_requests:
            self._requests_by_client[client] = client_requests
        self._change_counts(request, -1)
        return request

    def remove(self, request: QueuedRequest[_Reply]) -> bool:
        """Remove a request; return False if it is not in the queue."""
        client_requests = self._requests_by_client.get(request.client, ())
        if request not in client_requests:
            return False
        self._requests_by_client[request.client].remove(request)
        if not self._requests_by_client[request.client]:
            del self._requests_by_client[request.client]
        self._change_counts(request, -1)
        return True

    def count_questions(self, client: str) -> int:
        """Return the number of queued questions of a client."""
        return sum(len(request.questions) for request in self._requests_by_client.get(client, ()))

    def peek_newest_of_busiest_client(self) -> QueuedRequest[_Reply]:
        """Return the newest request of the client with the most queued questions."""
        return self._requests_by_client[max(self._requests_by_client, key=self.count_questions)][-1]

    def _change_counts(self, request: QueuedRequest[_Reply], sign: int) -> None:
        self._request_count += sign
        self.question_count += sign * len(request.questions)


class QueueFullError(BookwheelError):
    """The queue is full; the client may try again in a moment."""


class DeadlineError(BookwheelError):
    """The answer was not ready within the time limit."""


class ShuttingDownError(BookwheelError):
    """The service is shutting down and accepts no more questions."""


class LibraryCrashError(BookwheelError):
    """A native library crashed (for example a Rust panic) while it worked on a request."""


class ClientGoneError(BookwheelError):
    """All callers have disconnected, so the work was abandoned."""


@dataclass(frozen=True, slots=True)
class _Sleeper:
    """A sleeping worker."""

    min_requests: int  # the worker is woken only if at least this many requests wait
    condition: threading.Condition


class Batcher(Generic[_Reply]):
    """Answers requests in batches, in worker threads.

    Call `submit` from an event loop, and the other methods from any thread.
    """

    def __init__(
        self,
        name: str,
        run_batch: Callable[[Sequence[QueuedRequest[_Reply]]], Sequence[_Reply | BookwheelError]],
        *,
        queue_limit: int,
        batch_limit: int,
        max_wait_ms: float = 0.0,
        workers: int = 1,
        init_thread: Callable[[], None] = lambda: None,
        lone_request_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_thread_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Start the threads.

        Args:
            name: Name of the threads.
            run_batch: Returns a reply or an error for each request of a batch, in order. If a whole
                batch fails, its requests are run again one by one, so that no request fails because
                of the question of another client.
            queue_limit: Maximum number of queued questions.
            batch_limit: Maximum number of questions in a batch; a single request may have more.
            max_wait_ms: Maximum time that a batch waits for further requests.
            workers: Number of threads; each works on one batch at a time.
            init_thread: Called once in each thread before its first batch.
            lone_request_context: Context for a request that runs while the batcher is otherwise
                idle; entered in the first thread only.
            on_thread_death: Called with a thread's name when the thread dies; the thread is
                restarted.
        """
        self._run_batch, self._queue_limit = run_batch, queue_limit
        self._batch_limit, self._max_wait_seconds = batch_limit, max_wait_ms / 1000
        self._lock = threading.RLock()
        self._queue: RequestQueue[_Reply] = RequestQueue()
        self._lone_request_context = lone_request_context
        self._active_requests = 0  # requests that workers are processing
        self._worker_count = workers
        self._idle_workers = 0  # workers that wait for a batch; they share the queue evenly
        self._sleepers: dict[int, _Sleeper] = {}  # sleeping workers by id
        self._waking_workers = 0  # workers that were woken but do not run yet
        self._is_closing = False
        self.threads = [
            SupervisedThread(name, partial(self._run, worker_id, init_thread), on_thread_death)
            for worker_id in range(workers)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def queued_questions(self) -> int:
        """The number of questions in the queue."""
        return self._queue.question_count

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or being processed."""
        return not (self._queue or self._active_requests)

    async def submit(
        self,
        questions: Sequence[str],
        k: int | None,
        retriever: str | None,
        seconds: float,
        on_queued: Callable[[int, int], None] = lambda questions, waiting: None,
        client: str = "",
        progress: AnswerProgress | None = None,
        loaded_snapshot: LoadedSnapshot | None = None,
    ) -> _Reply:
        """Queue a request and return its reply, within `seconds`.

        Args:
            questions: The questions of the request.
            k: Passages per question; None means the default of the search or of the reader.
            retriever: Canonical retriever expression; None means the default retriever.
            seconds: Time limit.
            on_queued: Called with the number of questions in the request, and in the whole queue.
            client: Identity of the client; clients take turns.
            progress: Receives partial results from `run_batch`.
            loaded_snapshot: The snapshot to search, held open by the caller; None means the current one.

        Raises:
            QueueFullError: The queue is full, or clients with fewer questions evicted this request.
            DeadlineError: The time limit passed.
            ShuttingDownError: `close` was called.
            BookwheelError: `run_batch` returned this error for the request.
        """
        loop = asyncio.get_running_loop()
        request: QueuedRequest[_Reply] = QueuedRequest(
            questions, k, retriever, loop, loop.create_future(), client, progress, loaded_snapshot
        )
        self._enqueue(request)
        on_queued(len(questions), self._queue.question_count)
        timer = loop.call_later(seconds, self._expire, request, seconds)
        try:
            return await request.reply
        except asyncio.CancelledError:
            self._dequeue(request)
            raise
        finally:
            timer.cancel()
            del request  # breaks the cycle of this frame, the request and its error

    def close(self) -> None:
        """Refuse new requests; return when all queued requests are answered."""
        with self._lock:
            self._is_closing = True
            for sleeper in self._sleepers.values():
                sleeper.condition.notify()
        for thread in self.threads:
            thread.join()

    def _enqueue(self, request: QueuedRequest[_Reply]) -> None:
        with self._lock:
            if self._is_closing:
                raise ShuttingDownError("the service is shutting down: ask another instance")
            if self._queue and self._queue.question_count + len(request.questions) > self._queue_limit:
                self._evict_for(request)
            self._queue.add(request)
            self._wake_worker()

    def _evict_for(self, request: QueuedRequest[_Reply]) -> None:
        """Evict the newest requests of the busiest client until `request` fits.

        Raises:
            QueueFullError: With `request`, its own client would be the busiest client.
        """
        error = QueueFullError(f"{self._queue.question_count} questions are waiting already: ask again in a moment")
        n_client_questions = self._queue.count_questions(request.client) + len(request.questions)
        while self._queue and self._queue.question_count + len(request.questions) > self._queue_limit:
            newest_request = self._queue.peek_newest_of_busiest_client()
            if self._queue.count_questions(newest_request.client) <= n_client_questions:
                raise error
            self._queue.remove(newest_request)
            _deliver_replies([newest_request], [error])

    def _expire(self, request: QueuedRequest[_Reply], seconds: float) -> None:
        self._dequeue(request)
        if not request.is_abandoned:
            error = DeadlineError(f"no answer within {seconds:g} s: ask fewer questions, or ask again later")
            request.reply.set_exception(error)

    def _dequeue(self, request: QueuedRequest[_Reply]) -> None:
        """Remove the request of a disconnected caller, unless a worker has already taken it."""
        with self._lock:
            self._queue.remove(request)

    def _run(self, worker_id: int, init_thread: Callable[[], None]) -> None:
        init_thread()
        last_batch_size = 0  # requests in this thread's last batch
        while requests := self._wait_for_batch(worker_id, last_batch_size):
            last_batch_size = len(requests)
            try:
                is_lone = worker_id == 0 and self._is_lone_request(requests)
                with self._lone_request_context() if is_lone else nullcontext():
                    replies = self._compute_replies(requests)
                _deliver_replies(requests, replies)
            # This is a bug of the batcher. Before the thread dies, the callers get an error.
            except BaseException as failure:
                with self._lock:
                    self._active_requests -= last_batch_size
                _deliver_replies(requests, [_create_crash_error(failure)] * last_batch_size)
                raise
            del requests, replies

    def _is_lone_request(self, requests: Sequence[QueuedRequest[_Reply]]) -> bool:
        """Return whether no other request is queued or being processed."""
        return len(requests) == self._active_requests == 1 and not self._queue

    def _wait_for_batch(self, worker_id: int, last_batch_size: int) -> list[QueuedRequest[_Reply]]:
        """Wait for requests and return a batch; [] once the batcher is closed and empty.

        This worker has just answered `last_batch_size` requests, whose clients are expected to send
        their next requests.
        """
        with self._lock:
            self._active_requests -= last_batch_size
            self._idle_workers += 1
            try:
                requests = self._collect_batch(worker_id, last_batch_size)
                self._active_requests += len(requests)
            finally:
                self._idle_workers -= 1
            self._wake_worker()  # let another worker take the remaining requests
            return requests

    def _collect_batch(self, worker_id: int, last_batch_size: int) -> list[QueuedRequest[_Reply]]:
        requests: list[QueuedRequest[_Reply]] = []
        # Another worker may have taken the requests in the meantime.
        while not requests and (self._queue or not self._is_closing):
            while not self._has_enough(1):
                self._sleep(worker_id, 1)
            # If every worker waits for an equal share, the batches stay equally large.
            min_requests = -(-(self._active_requests + last_batch_size) // self._worker_count)
            deadline = time.monotonic() + self._max_wait_seconds
            while not self._has_enough(min_requests) and (remaining_seconds := deadline - time.monotonic()) > 0:
                self._sleep(worker_id, min_requests, remaining_seconds)
            requests = self._pop_batch(min(self._batch_limit, -(-self._queue.question_count // self._idle_workers)))
        return requests

    def _sleep(self, worker_id: int, min_requests: int, seconds: float | None = None) -> None:
        self._wake_worker()  # enough requests may wait for another worker
        self._sleepers[worker_id] = sleeper = _Sleeper(min_requests, threading.Condition(self._lock))
        try:
            sleeper.condition.wait(seconds)
        finally:
            if self._sleepers.pop(worker_id, None) is None:
                self._waking_workers -= 1

    def _wake_worker(self) -> None:
        """Wake only the first sleeping worker for which enough requests wait."""
        worker_ids = [
            worker_id for worker_id, sleeper in self._sleepers.items() if self._has_enough(sleeper.min_requests)
        ]
        if len(self._queue) > self._waking_workers and worker_ids:
            self._sleepers.pop(min(worker_ids)).condition.notify()
            self._waking_workers += 1

    def _pop_batch(self, max_questions: int) -> list[QueuedRequest[_Reply]]:
        """Pop requests of at most `max_questions` questions in total, but at least one request."""
        requests: list[QueuedRequest[_Reply]] = []
        n_questions = 0
        while self._queue and (not requests or n_questions + len(self._queue.peek().questions) <= max_questions):
            requests.append(self._queue.pop())
            n_questions += len(requests[-1].questions)
        return requests

    def _has_enough(self, min_requests: int) -> bool:
        return len(self._queue) >= min_requests or self._queue.question_count >= self._batch_limit or self._is_closing

    def _compute_replies(self, requests: Sequence[QueuedRequest[_Reply]]) -> Sequence[_Reply | Exception]:
        if all(request.is_abandoned for request in requests):
            return [ClientGoneError("the client has disconnected")] * len(requests)
        try:
            return self._run_batch(requests)
        except BaseException as failure:  # a panic of a native library is not an Exception
            if len(requests) == 1:
                if not isinstance(failure, BookwheelError):
                    _LOG.exception("%s failed", threading.current_thread().name)
                return [failure if isinstance(failure, Exception) else _create_crash_error(failure)]
        return [reply for request in requests for reply in self._compute_replies([request])]


def _create_crash_error(failure: BaseException) -> LibraryCrashError:
    return LibraryCrashError(f"a library failed on this request ({type(failure).__name__}): ask in other words")


def _deliver_replies(requests: Sequence[QueuedRequest[_Reply]], replies: Sequence[_Reply | Exception]) -> None:
    for reply in replies:
        # The frames of a traceback refer to the requests and the snapshot, and the requests to
        # their replies. This cycle would keep a replaced snapshot in memory.
        if isinstance(reply, Exception):
            reply.with_traceback(None)
    for loop in {request.loop for request in requests}:
        scheduled_replies = [
            (request, reply) for request, reply in zip(requests, replies, strict=True) if request.loop is loop
        ]
        with suppress(RuntimeError):  # the event loop has ended, and so have its callers
            loop.call_soon_threadsafe(_resolve_futures, scheduled_replies)


def _resolve_futures(scheduled_replies: Sequence[tuple[QueuedRequest[_Reply], _Reply | Exception]]) -> None:
    for request, reply in scheduled_replies:
        if request.reply.done():
            continue  # the caller does not wait any more
        if isinstance(reply, Exception):
            request.reply.set_exception(reply)
        else:
            request.reply.set_result(reply)
