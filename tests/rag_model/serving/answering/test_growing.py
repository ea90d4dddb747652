"""What grows in a thread is taken in a loop: in order, joined where nobody took it, void where it begins again."""

import asyncio
import threading

from rag_model.serving.answering.growing import Growing, Piece, Sources

FOUND = Sources("snapshot", "model", [[]])


def in_a_thread(growing: Growing, *given: Sources | Piece) -> None:
    def put() -> None:
        for one in given:
            growing.found(one) if isinstance(one, Sources) else growing.grew(one)

    thread = threading.Thread(target=put)
    thread.start()
    thread.join()


def test_pieces_that_wait_are_joined_and_come_in_order() -> None:
    async def taken() -> list[object]:
        growing = Growing()
        in_a_thread(growing, FOUND, Piece(0, "a"), Piece(1, "x"), Piece(0, "b"))
        first = await growing.next()
        in_a_thread(growing, Piece(0, "c"))
        second = await growing.next()
        growing.end()
        return [first, second, await growing.next(), await growing.next()]

    assert asyncio.run(taken()) == [[FOUND, Piece(0, "ab"), Piece(1, "x")], [Piece(0, "c")], [], []]


def test_what_begins_again_makes_what_was_there_void() -> None:
    async def taken() -> object:
        growing = Growing()
        in_a_thread(growing, FOUND, Piece(0, "half"), FOUND, Piece(0, "whole"))
        return await growing.next()

    assert asyncio.run(taken()) == [FOUND, Piece(0, "whole")]


def test_a_loop_that_has_ended_is_told_nothing() -> None:
    async def made() -> Growing:
        return Growing()

    in_a_thread(asyncio.run(made()), FOUND)
