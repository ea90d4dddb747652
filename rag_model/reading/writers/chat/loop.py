"""An event loop in a thread of its own: what runs there can be waited for, and given up, from any other thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rag_model.errors import StoppedError

_Done = TypeVar("_Done")
_Piece = tuple[int, str]
_LOOK = 0.05  # seconds between two looks at whether the work is still wanted


class Loop:
    """Runs coroutines beside the threads that wait for them. Safe among threads."""

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()

    def run(
        self,
        work: Callable[[Callable[[int, str], None]], Coroutine[Any, Any, _Done]],
        stop: Callable[[], bool] | None = None,
        tell: Callable[[int, str], None] | None = None,
    ) -> _Done:
        """Return what `work` gives; the pieces that it puts out are told in the thread that calls.

        Raises:
            StoppedError: `stop` was true; the work was cancelled.
        """
        pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(work(lambda place, text: pieces.put((place, text))), self._loop)
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := _next(pieces)) is not None:
                if stop is not None and stop():
                    raise StoppedError("no caller waits for this answer any more, so it was given up")
                if piece and tell is not None:
                    tell(*piece)
            return future.result()
        except CancelledError as closed:
            raise StoppedError("the endpoint's connections were closed, so this answer was given up") from closed
        finally:
            future.cancel()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End what runs, then run `last`, then the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_ended(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(_dropped())
        self._loop.close()


def _next(pieces: "SimpleQueue[_Piece | None]") -> _Piece | tuple[()] | None:
    """Return the next piece; () if none came for a moment, None at the end."""
    try:
        return pieces.get(timeout=_LOOK)
    except Empty:
        return ()


async def _ended(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    others = _others()
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last()


async def _dropped() -> None:
    """Close the streams that were not read to their end: Python warns of what a closed loop has left of them."""
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.gather(*_others(), return_exceptions=True)


def _others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
