"""The queue: requests form batches while another batch runs, the limit holds, and clients are treated fairly."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rag_model.errors import UsageError
from rag_model.serving.answering.batcher import Batcher, DeadlineError, QueuedRequest, QueueFullError, ShuttingDownError
from tests.fixtures.serving import TIMEOUT


class EchoWorker:
    """Echoes the questions of each batch, once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.at_work = threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, requests: Sequence[QueuedRequest[Any]]) -> list[Any]:
        questions = [question for request in requests for question in request.questions]
        self.batches.append(questions)
        self.at_work.set()
        assert self.go.wait(TIMEOUT)
        if "unheard of" in questions:
            raise ValueError("unheard of")
        return [UsageError("never") if "never" in r.questions else list(r.questions) for r in requests]


@contextmanager
def open_batcher(worker: EchoWorker, **options: Any) -> Iterator[Batcher[Any]]:
    batcher: Batcher[Any] = Batcher("test", worker, **{"queue_limit": 100, "batch_limit": 10, **options})
    try:
        yield batcher
    finally:
        worker.go.set()
        batcher.close()


async def submit_while_busy(batcher: Batcher[Any], worker: EchoWorker, requests: Sequence[Sequence[str]]) -> list[Any]:
    """Submit the first request; submit all others while the worker is busy with it; then let the worker go."""
    first = asyncio.create_task(batcher.submit(requests[0], 1, None, TIMEOUT))
    await asyncio.to_thread(worker.at_work.wait, TIMEOUT)
    later_requests = [asyncio.create_task(batcher.submit(questions, 1, None, TIMEOUT)) for questions in requests[1:]]
    await wait_until(lambda: batcher.queued_questions == sum(map(len, requests[1:])))
    worker.go.set()
    return await asyncio.gather(first, *later_requests, return_exceptions=True)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)  # between two polls


@pytest.mark.parametrize("wait_ms", [0, 50])
def test_queued_requests_form_batches_up_to_the_batch_limit(wait_ms: float) -> None:
    worker = EchoWorker()
    questions = [["a"], ["b", "c"], ["d"] * 7, ["e", "f"], ["g"] * 12, ["h"]]
    with open_batcher(worker, max_wait_ms=wait_ms) as batcher:
        replies = asyncio.run(submit_while_busy(batcher, worker, questions))
    assert replies == questions
    assert worker.batches == [["a"], ["b", "c", *["d"] * 7], ["e", "f"], ["g"] * 12, ["h"]]


def test_failed_request_fails_no_other_request() -> None:
    worker = EchoWorker()
    with open_batcher(worker) as batcher:
        replies = asyncio.run(submit_while_busy(batcher, worker, [["a"], ["b"], ["unheard of"], ["never"], ["c"]]))
    assert [replies[position] for position in (0, 1, 4)] == [["a"], ["b"], ["c"]]
    assert isinstance(replies[2], ValueError)
    assert isinstance(replies[3], UsageError)


def test_full_queue_refuses_and_empty_queue_accepts_any_size() -> None:
    worker = EchoWorker()

    async def submit_to_full_queue(batcher: Batcher[Any]) -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1, None, TIMEOUT))
        await asyncio.to_thread(worker.at_work.wait, TIMEOUT)
        large = asyncio.create_task(batcher.submit(["b"] * 9, 1, None, TIMEOUT))
        await wait_until(lambda: batcher.queued_questions == 9)
        with pytest.raises(QueueFullError, match="9 questions are waiting"):
            await batcher.submit(["c"], 1, None, TIMEOUT)
        worker.go.set()
        assert await asyncio.gather(first, large) == [["a"], ["b"] * 9]

    with open_batcher(worker, queue_limit=5) as batcher:
        asyncio.run(submit_to_full_queue(batcher))


def test_clients_take_turns() -> None:
    """A client that asks little is answered in the next batch, although another client asked much before."""
    worker = EchoWorker()

    async def submit_in_turns(batcher: Batcher[Any]) -> None:
        def ask(question: str, client: str) -> "asyncio.Task[Any]":
            return asyncio.create_task(batcher.submit([question] * 4, 1, None, TIMEOUT, client=client))

        tasks = [ask("first", "greedy")]
        await asyncio.to_thread(worker.at_work.wait, TIMEOUT)
        tasks += [ask(f"g{number}", "greedy") for number in range(4)]
        await wait_until(lambda: batcher.queued_questions == 16)
        tasks += [ask(f"m{number}", "modest") for number in range(2)]
        await wait_until(lambda: batcher.queued_questions == 24)
        worker.go.set()
        await asyncio.gather(*tasks)

    with open_batcher(worker, batch_limit=8) as batcher:
        asyncio.run(submit_in_turns(batcher))
    batch_starts = [batch[::4] for batch in worker.batches]
    assert batch_starts == [["first"], ["g0", "m0"], ["g1", "m1"], ["g2", "g3"]]


def test_full_queue_accepts_a_modest_client_and_refuses_the_newest_request_of_the_greediest() -> None:
    worker = EchoWorker()

    async def submit_to_full_queue(batcher: Batcher[Any]) -> list[Any]:
        first = asyncio.create_task(batcher.submit(["first"], 1, None, TIMEOUT))
        await asyncio.to_thread(worker.at_work.wait, TIMEOUT)
        greedy = []
        for number in range(3):
            greedy.append(asyncio.create_task(batcher.submit([f"g{number}"] * 3, 1, None, TIMEOUT, client="greedy")))
            await wait_until(lambda: batcher.queued_questions == 3 * len(greedy))
        modest = [asyncio.create_task(batcher.submit(["m"] * 4, 1, None, TIMEOUT, client="modest"))]
        await asyncio.wait(greedy[1:], return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(QueueFullError):
            await batcher.submit(["g3"] * 3, 1, None, TIMEOUT, client="greedy")
        worker.go.set()
        return await asyncio.gather(first, *greedy, *modest, return_exceptions=True)

    with open_batcher(worker, queue_limit=10) as batcher:
        replies = asyncio.run(submit_to_full_queue(batcher))
    assert replies[:3] == [["first"], ["g0"] * 3, ["g1"] * 3]
    assert isinstance(replies[3], QueueFullError)
    assert replies[4] == ["m"] * 4


def test_cancelled_and_late_requests_leave_the_queue() -> None:
    worker = EchoWorker()

    async def submit_and_leave(batcher: Batcher[Any]) -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1, None, TIMEOUT))
        await asyncio.to_thread(worker.at_work.wait, TIMEOUT)
        with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
            await batcher.submit(["late"], 1, None, 0.01)
        cancelled = asyncio.create_task(batcher.submit(["left"], 1, None, TIMEOUT))
        await wait_until(lambda: batcher.queued_questions == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert batcher.queued_questions == 0
        worker.go.set()
        assert await first == ["a"]

    with open_batcher(worker) as batcher:
        asyncio.run(submit_and_leave(batcher))
    assert worker.batches == [["a"]]


def test_thread_continues_if_its_only_request_is_cancelled() -> None:
    worker = EchoWorker()

    async def submit_and_leave(batcher: Batcher[Any]) -> list[Any]:
        # After a batch of three, the thread waits for three requests.
        await submit_while_busy(batcher, worker, [["a"], ["b"], ["c"], ["d"]])
        cancelled = asyncio.create_task(batcher.submit(["left"], 1, None, TIMEOUT))
        await wait_until(lambda: batcher.queued_questions == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await asyncio.sleep(0.1)  # longer than `max_wait_ms`
        return await batcher.submit(["e"], 1, None, TIMEOUT)

    with open_batcher(worker, max_wait_ms=50) as batcher:
        assert asyncio.run(submit_and_leave(batcher)) == ["e"]
    assert worker.batches == [["a"], ["b", "c", "d"], ["e"]]


def test_accepted_requests_are_answered_before_the_end() -> None:
    worker = EchoWorker()

    async def submit_and_close(batcher: Batcher[Any]) -> None:
        tasks = [asyncio.create_task(batcher.submit([letter], 1, None, TIMEOUT)) for letter in "abc"]
        await asyncio.to_thread(worker.at_work.wait, TIMEOUT)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await wait_until(lambda: batcher._is_closing)
        try:
            with pytest.raises(ShuttingDownError, match="shutting down"):
                await batcher.submit(["d"], 1, None, TIMEOUT)
        finally:
            worker.go.set()  # Otherwise a failure would wait for ever.
        assert await asyncio.gather(*tasks) == [["a"], ["b"], ["c"]]
        await closing

    with open_batcher(worker) as batcher:
        asyncio.run(submit_and_close(batcher))


def test_several_workers_answer_everything_once() -> None:
    worker = EchoWorker()

    async def submit_all(batcher: Batcher[Any]) -> None:
        tasks = [asyncio.create_task(batcher.submit([letter], 1, None, TIMEOUT)) for letter in "ab"]
        await wait_until(lambda: len(worker.batches) == 2)
        tasks += [asyncio.create_task(batcher.submit([letter], 1, None, TIMEOUT)) for letter in "cdefghij"]
        await wait_until(lambda: batcher.queued_questions == 8)
        worker.go.set()
        assert await asyncio.gather(*tasks) == [[letter] for letter in "abcdefghij"]

    with open_batcher(worker, workers=2) as batcher:
        asyncio.run(submit_all(batcher))
    assert sorted(question for batch in worker.batches for question in batch) == list("abcdefghij")


def test_lone_request_wakes_only_the_first_thread() -> None:
    worker, threads, lone_thread_ids = EchoWorker(), set(), []

    def work(requests: Sequence[QueuedRequest[Any]]) -> list[Any]:
        threads.add(threading.get_ident())
        return worker(requests)

    @contextmanager
    def record_thread() -> Iterator[None]:
        lone_thread_ids.append(threading.get_ident())
        yield

    async def submit_all(batcher: Batcher[Any]) -> None:
        worker.go.set()
        await wait_until(lambda: len(batcher._sleepers) == 3)
        for letter in "abc":
            await batcher.submit([letter], 1, None, TIMEOUT)
            await wait_until(lambda: len(batcher._sleepers) == 3)
        assert lone_thread_ids == [*threads] * 3
        worker.go.clear()
        tasks = [asyncio.create_task(batcher.submit([letter], 1, None, TIMEOUT)) for letter in "de"]
        await wait_until(lambda: len(worker.batches) == 5)
        worker.go.set()
        await asyncio.gather(*tasks)
        assert len(threads) == 2
        assert len(set(lone_thread_ids)) == 1

    batcher: Batcher[Any] = Batcher(
        "test", work, queue_limit=100, batch_limit=10, workers=3, lone_request_context=record_thread
    )
    try:
        asyncio.run(submit_all(batcher))
    finally:
        worker.go.set()
        batcher.close()


def test_requests_in_one_batch_are_not_lone_requests() -> None:
    worker, lone_batch_counts = EchoWorker(), []

    @contextmanager
    def record_batches() -> Iterator[None]:
        lone_batch_counts.append(len(worker.batches))
        yield

    with open_batcher(worker, lone_request_context=record_batches) as batcher:
        asyncio.run(submit_while_busy(batcher, worker, [["a"], ["b"], ["c"]]))
    assert worker.batches == [["a"], ["b", "c"]]
    assert lone_batch_counts == [0]


class CountingCondition(threading.Condition):
    """Counts how often a thread is woken."""

    woken = 0

    def notify(self, n: int = 1) -> None:
        CountingCondition.woken += bool(self._waiters) and n > 0  # type: ignore[attr-defined]
        super().notify(n)


def list_min_requests(batcher: Batcher[Any]) -> list[int]:
    """Return the number of requests that wakes each sleeping thread."""
    return [sleeper.min_requests for sleeper in [*batcher._sleepers.values()]]


def test_thread_sleeps_until_its_batch_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Condition", CountingCondition)
    worker = EchoWorker()
    with open_batcher(worker, max_wait_ms=1e3 * TIMEOUT) as batcher:

        async def submit_again() -> tuple[int, int]:
            await submit_while_busy(batcher, worker, [["a"], ["b"], ["c"], ["d"], ["e"]])
            await wait_until(lambda: list_min_requests(batcher) == [1])
            tasks = [asyncio.create_task(batcher.submit(["f"], 1, None, TIMEOUT))]
            await wait_until(lambda: list_min_requests(batcher) == [4])  # the size of the last batch
            wakes_before = CountingCondition.woken
            tasks += [asyncio.create_task(batcher.submit([letter], 1, None, TIMEOUT)) for letter in "gh"]
            await wait_until(lambda: batcher.queued_questions == 3)
            wakes_after = CountingCondition.woken
            await asyncio.gather(*tasks, batcher.submit(["i"], 1, None, TIMEOUT))
            return wakes_before, wakes_after

        wakes_before, wakes_after = asyncio.run(submit_again())
    assert wakes_after == wakes_before
    assert worker.batches == [["a"], ["b", "c", "d", "e"], ["f", "g", "h", "i"]]
