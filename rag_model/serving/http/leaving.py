"""Give up the work for a client that has left."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect


@contextmanager
def while_connected(state: dict[str, Any]) -> Iterator[None]:
    """Run the block as long as the client of a request's `state` is connected.

    Raises:
        ClientDisconnect: it is not any more, and the block was cancelled.
    """
    task, left = asyncio.current_task(), False

    def leave() -> None:
        nonlocal left
        left = True
        if task is not None:
            task.cancel()

    state["leave"] = leave  # called by the connection
    try:
        yield
    except asyncio.CancelledError:
        if left:
            raise ClientDisconnect from None
        raise
    finally:
        del state["leave"]
