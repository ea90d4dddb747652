"""What grows in a thread is taken in a loop: in order, joined where nobody took it, void where it begins again."""

import asyncio
import threading

from rag_model.serving.answering.batcher import AnswerDelta, AnswerProgress, RetrievedPassages

FOUND = RetrievedPassages("snapshot", "model", [[]])


def in_a_thread(growing: AnswerProgress, *given: RetrievedPassages | AnswerDelta) -> None:
    def put() -> None:
        for one in given:
            growing.set_passages(one) if isinstance(one, RetrievedPassages) else growing.append_delta(one)

    thread = threading.Thread(target=put)
    thread.start()
    thread.join()


def test_pieces_that_wait_are_joined_and_come_in_order() -> None:
    async def taken() -> list[object]:
        growing = AnswerProgress()
        in_a_thread(growing, FOUND, AnswerDelta(0, "a"), AnswerDelta(1, "x"), AnswerDelta(0, "b"))
        first = await growing.wait_for_updates()
        in_a_thread(growing, AnswerDelta(0, "c"))
        second = await growing.wait_for_updates()
        growing.finish()
        return [first, second, await growing.wait_for_updates(), await growing.wait_for_updates()]

    assert asyncio.run(taken()) == [[FOUND, AnswerDelta(0, "ab"), AnswerDelta(1, "x")], [AnswerDelta(0, "c")], [], []]


def test_what_begins_again_makes_what_was_there_void() -> None:
    async def taken() -> object:
        growing = AnswerProgress()
        in_a_thread(growing, FOUND, AnswerDelta(0, "half"), FOUND, AnswerDelta(0, "whole"))
        return await growing.wait_for_updates()

    assert asyncio.run(taken()) == [FOUND, AnswerDelta(0, "whole")]


def test_a_loop_that_has_ended_is_told_nothing() -> None:
    async def made() -> AnswerProgress:
        return AnswerProgress()

    in_a_thread(asyncio.run(made()), FOUND)
