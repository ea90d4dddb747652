"""The queue: batches gather while one is worked on, the bound holds, and nobody suffers for another."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rag_model.errors import UsageError
from rag_model.serving.answering.batcher import Batcher, DeadlineError, QueuedRequest, QueueFullError, ShuttingDownError
from tests.fixtures.serving import PATIENCE


class Worker:
    """Echoes questions, a batch at a time, when it is let."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.at_work = threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, asks: Sequence[QueuedRequest[Any]]) -> list[Any]:
        questions = [question for ask in asks for question in ask.questions]
        self.batches.append(questions)
        self.at_work.set()
        assert self.go.wait(PATIENCE)
        if "unheard of" in questions:
            raise ValueError("unheard of")
        return [UsageError("never") if "never" in ask.questions else list(ask.questions) for ask in asks]


@contextmanager
def batching(worker: Worker, waiting: int = 100, batch: int = 10, wait_ms: float = 0) -> Iterator[Batcher[Any]]:
    batcher: Batcher[Any] = Batcher("test", worker, queue_limit=waiting, batch_limit=batch, max_wait_ms=wait_ms)
    try:
        yield batcher
    finally:
        worker.go.set()
        batcher.close()


async def gathered(batcher: Batcher[Any], worker: Worker, asked: Sequence[Sequence[str]]) -> list[Any]:
    """Ask the first; when it is worked on all others; then let the worker go."""
    first = asyncio.create_task(batcher.submit(asked[0], 1, None, PATIENCE))
    await asyncio.to_thread(worker.at_work.wait, PATIENCE)
    others = [asyncio.create_task(batcher.submit(questions, 1, None, PATIENCE)) for questions in asked[1:]]
    await held(lambda: batcher.queued_questions == sum(map(len, asked[1:])))
    worker.go.set()
    return await asyncio.gather(first, *others, return_exceptions=True)


async def held(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.001)  # between two looks


@pytest.mark.parametrize("wait_ms", [0, 50])
def test_what_gathers_goes_together_up_to_the_size_of_a_batch(wait_ms: float) -> None:
    worker = Worker()
    asked = [["a"], ["b", "c"], ["d"] * 7, ["e", "f"], ["g"] * 12, ["h"]]
    with batching(worker, wait_ms=wait_ms) as batcher:
        replies = asyncio.run(gathered(batcher, worker, asked))
    assert replies == asked
    assert worker.batches == [["a"], ["b", "c", *["d"] * 7], ["e", "f"], ["g"] * 12, ["h"]]


def test_nobody_fails_for_another() -> None:
    worker = Worker()
    with batching(worker) as batcher:
        replies = asyncio.run(gathered(batcher, worker, [["a"], ["b"], ["unheard of"], ["never"], ["c"]]))
    assert [replies[place] for place in (0, 1, 4)] == [["a"], ["b"], ["c"]]
    assert isinstance(replies[2], ValueError)
    assert isinstance(replies[3], UsageError)


def test_a_full_queue_refuses_and_an_empty_one_takes_anything() -> None:
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1, None, PATIENCE))
        await asyncio.to_thread(worker.at_work.wait, PATIENCE)
        large = asyncio.create_task(batcher.submit(["b"] * 9, 1, None, PATIENCE))
        await held(lambda: batcher.queued_questions == 9)
        with pytest.raises(QueueFullError, match="9 questions are waiting"):
            await batcher.submit(["c"], 1, None, PATIENCE)
        worker.go.set()
        assert await asyncio.gather(first, large) == [["a"], ["b"] * 9]

    with batching(worker, waiting=5) as batcher:
        asyncio.run(asked(batcher))


def test_clients_take_turns() -> None:
    """One asks much and first; another asks little and later, and is answered in the next batch."""
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> None:
        def ask(question: str, client: str) -> "asyncio.Task[Any]":
            return asyncio.create_task(batcher.submit([question] * 4, 1, None, PATIENCE, client=client))

        tasks = [ask("first", "greedy")]
        await asyncio.to_thread(worker.at_work.wait, PATIENCE)
        tasks += [ask(f"g{number}", "greedy") for number in range(4)]
        await held(lambda: batcher.queued_questions == 16)
        tasks += [ask(f"m{number}", "modest") for number in range(2)]
        await held(lambda: batcher.queued_questions == 24)
        worker.go.set()
        await asyncio.gather(*tasks)

    with batching(worker, batch=8) as batcher:
        asyncio.run(asked(batcher))
    taken = [batch[::4] for batch in worker.batches]
    assert taken == [["first"], ["g0", "m0"], ["g1", "m1"], ["g2", "g3"]]


def test_a_full_queue_takes_one_who_has_less_there_and_refuses_the_newest_of_who_has_most() -> None:
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> list[Any]:
        first = asyncio.create_task(batcher.submit(["first"], 1, None, PATIENCE))
        await asyncio.to_thread(worker.at_work.wait, PATIENCE)
        greedy = []
        for number in range(3):
            greedy.append(asyncio.create_task(batcher.submit([f"g{number}"] * 3, 1, None, PATIENCE, client="greedy")))
            await held(lambda: batcher.queued_questions == 3 * len(greedy))
        modest = [asyncio.create_task(batcher.submit(["m"] * 4, 1, None, PATIENCE, client="modest"))]
        await asyncio.wait(greedy[1:], return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(QueueFullError):
            await batcher.submit(["g3"] * 3, 1, None, PATIENCE, client="greedy")
        worker.go.set()
        return await asyncio.gather(first, *greedy, *modest, return_exceptions=True)

    with batching(worker, waiting=10) as batcher:
        replies = asyncio.run(asked(batcher))
    assert replies[:3] == [["first"], ["g0"] * 3, ["g1"] * 3]
    assert isinstance(replies[3], QueueFullError)
    assert replies[4] == ["m"] * 4


def test_who_gives_up_or_leaves_frees_the_place() -> None:
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> None:
        first = asyncio.create_task(batcher.submit(["a"], 1, None, PATIENCE))
        await asyncio.to_thread(worker.at_work.wait, PATIENCE)
        with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
            await batcher.submit(["late"], 1, None, 0.01)
        left = asyncio.create_task(batcher.submit(["left"], 1, None, PATIENCE))
        await held(lambda: batcher.queued_questions == 1)
        left.cancel()
        await asyncio.wait([left])
        assert batcher.queued_questions == 0
        worker.go.set()
        assert await first == ["a"]

    with batching(worker) as batcher:
        asyncio.run(asked(batcher))
    assert worker.batches == [["a"]]


def test_a_thread_whose_only_ask_leaves_while_it_waits_for_more_goes_on() -> None:
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> list[Any]:
        await gathered(batcher, worker, [["a"], ["b"], ["c"], ["d"]])  # so that it waits for three at once
        left = asyncio.create_task(batcher.submit(["left"], 1, None, PATIENCE))
        await held(lambda: batcher.queued_questions == 1)
        left.cancel()
        await asyncio.wait([left])
        await asyncio.sleep(0.1)  # longer than it waits
        return await batcher.submit(["e"], 1, None, PATIENCE)

    with batching(worker, wait_ms=50) as batcher:
        assert asyncio.run(asked(batcher)) == ["e"]
    assert worker.batches == [["a"], ["b", "c", "d"], ["e"]]


def test_what_was_taken_is_answered_before_the_end() -> None:
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> None:
        tasks = [asyncio.create_task(batcher.submit([letter], 1, None, PATIENCE)) for letter in "abc"]
        await asyncio.to_thread(worker.at_work.wait, PATIENCE)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await held(lambda: batcher._is_closing)
        try:
            with pytest.raises(ShuttingDownError, match="shutting down"):
                await batcher.submit(["d"], 1, None, PATIENCE)
        finally:
            worker.go.set()  # else a failure would wait for ever
        assert await asyncio.gather(*tasks) == [["a"], ["b"], ["c"]]
        await closing

    with batching(worker) as batcher:
        asyncio.run(asked(batcher))


def test_several_workers_answer_everything_once() -> None:
    worker = Worker()

    async def asked(batcher: Batcher[Any]) -> None:
        tasks = [asyncio.create_task(batcher.submit([letter], 1, None, PATIENCE)) for letter in "ab"]
        await held(lambda: len(worker.batches) == 2)
        tasks += [asyncio.create_task(batcher.submit([letter], 1, None, PATIENCE)) for letter in "cdefghij"]
        await held(lambda: batcher.queued_questions == 8)
        worker.go.set()
        assert await asyncio.gather(*tasks) == [[letter] for letter in "abcdefghij"]

    batcher: Batcher[Any] = Batcher("test", worker, queue_limit=100, batch_limit=10, workers=2)
    try:
        asyncio.run(asked(batcher))
    finally:
        worker.go.set()
        batcher.close()
    assert sorted(question for batch in worker.batches for question in batch) == list("abcdefghij")


def test_a_request_that_is_alone_is_worked_on_by_the_first_thread_which_alone_is_woken() -> None:
    worker, threads, lone = Worker(), set(), []

    def work(asks: Sequence[QueuedRequest[Any]]) -> list[Any]:
        threads.add(threading.get_ident())
        return worker(asks)

    @contextmanager
    def alone() -> Iterator[None]:
        lone.append(threading.get_ident())
        yield

    async def asked(batcher: Batcher[Any]) -> None:
        worker.go.set()
        await held(lambda: len(batcher._sleepers) == 3)
        for letter in "abc":
            await batcher.submit([letter], 1, None, PATIENCE)
            await held(lambda: len(batcher._sleepers) == 3)
        assert lone == [*threads] * 3
        worker.go.clear()
        tasks = [asyncio.create_task(batcher.submit([letter], 1, None, PATIENCE)) for letter in "de"]
        await held(lambda: len(worker.batches) == 5)
        worker.go.set()
        await asyncio.gather(*tasks)
        assert len(threads) == 2
        assert len(set(lone)) == 1

    batcher: Batcher[Any] = Batcher(
        "test", work, queue_limit=100, batch_limit=10, workers=3, lone_request_context=alone
    )
    try:
        asyncio.run(asked(batcher))
    finally:
        worker.go.set()
        batcher.close()


def test_requests_that_go_together_are_not_alone() -> None:
    worker, lone = Worker(), []

    @contextmanager
    def alone() -> Iterator[None]:
        lone.append(len(worker.batches))
        yield

    batcher: Batcher[Any] = Batcher("test", worker, queue_limit=100, batch_limit=10, lone_request_context=alone)
    try:
        asyncio.run(gathered(batcher, worker, [["a"], ["b"], ["c"]]))
    finally:
        worker.go.set()
        batcher.close()
    assert worker.batches == [["a"], ["b", "c"]]
    assert lone == [0]


class Counted(threading.Condition):
    """Counts how often a thread is woken."""

    woken = 0

    def notify(self, n: int = 1) -> None:
        Counted.woken += bool(self._waiters) and n > 0  # type: ignore[attr-defined]
        super().notify(n)


def wanted(batcher: Batcher[Any]) -> list[int]:
    """Return how many requests each sleeping thread is to be woken for."""
    return [sleeper.min_requests for sleeper in [*batcher._sleepers.values()]]


def test_a_thread_sleeps_until_its_batch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Condition", Counted)
    worker = Worker()
    with batching(worker, wait_ms=1e3 * PATIENCE) as batcher:

        async def again() -> tuple[int, int]:
            await gathered(batcher, worker, [["a"], ["b"], ["c"], ["d"], ["e"]])
            await held(lambda: wanted(batcher) == [1])
            tasks = [asyncio.create_task(batcher.submit(["f"], 1, None, PATIENCE))]
            await held(lambda: wanted(batcher) == [4])  # as many as were answered together
            before = Counted.woken
            tasks += [asyncio.create_task(batcher.submit([one], 1, None, PATIENCE)) for one in "gh"]
            await held(lambda: batcher.queued_questions == 3)
            meanwhile = Counted.woken
            await asyncio.gather(*tasks, batcher.submit(["i"], 1, None, PATIENCE))
            return before, meanwhile

        before, meanwhile = asyncio.run(again())
    assert meanwhile == before
    assert worker.batches == [["a"], ["b", "c", "d", "e"], ["f", "g", "h", "i"]]
