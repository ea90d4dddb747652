"""An answer that grows in a thread is read in an event loop: in order, with unread pieces joined."""

import asyncio
import threading

from rag_model.serving.answering.batcher import AnswerDelta, AnswerProgress, RetrievedPassages

PASSAGES = RetrievedPassages("snapshot", "model", [[]])


def update_in_thread(progress: AnswerProgress, *updates: RetrievedPassages | AnswerDelta) -> None:
    def apply_updates() -> None:
        for update in updates:
            progress.set_passages(update) if isinstance(update, RetrievedPassages) else progress.append_delta(update)

    thread = threading.Thread(target=apply_updates)
    thread.start()
    thread.join()


def test_waiting_pieces_are_joined_in_order() -> None:
    async def collect_updates() -> list[object]:
        progress = AnswerProgress()
        update_in_thread(progress, PASSAGES, AnswerDelta(0, "a"), AnswerDelta(1, "x"), AnswerDelta(0, "b"))
        first = await progress.wait_for_updates()
        update_in_thread(progress, AnswerDelta(0, "c"))
        second = await progress.wait_for_updates()
        progress.finish()
        return [first, second, await progress.wait_for_updates(), await progress.wait_for_updates()]

    first = [PASSAGES, AnswerDelta(0, "ab"), AnswerDelta(1, "x")]
    assert asyncio.run(collect_updates()) == [first, [AnswerDelta(0, "c")], [], []]


def test_restarted_answer_replaces_the_earlier_updates() -> None:
    async def collect_updates() -> object:
        progress = AnswerProgress()
        update_in_thread(progress, PASSAGES, AnswerDelta(0, "half"), PASSAGES, AnswerDelta(0, "whole"))
        return await progress.wait_for_updates()

    assert asyncio.run(collect_updates()) == [PASSAGES, AnswerDelta(0, "whole")]


def test_updates_after_the_end_of_the_event_loop_are_ignored() -> None:
    async def create_progress() -> AnswerProgress:
        return AnswerProgress()

    update_in_thread(asyncio.run(create_progress()), PASSAGES)
