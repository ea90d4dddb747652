"""Reading remote files by range: at any offset, and ahead of the consumer."""

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

Place = TypeVar("Place")
Answer = TypeVar("Answer")
AHEAD = 4  # chunks that are in memory or being read at once
ASKED = 32  # small requests at once: on an object store an answer is nearly all waiting


class RangeFile(io.RawIOBase):
    """A file of known size that is read by range; unlike fsspec's it requests no size and does not read ahead."""

    def __init__(self, name: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """Read the bytes from `start` to `end` (exclusive) with `read(start, end)`; `name` is for messages."""
        self.name = name
        self._size, self._read, self._at = size, read, 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as `io.IOBase.seek` does, and return it."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less at the end of the file, and return the number of bytes."""
        data = self._read(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_ahead(read: Callable[[Place], Answer], places: Sequence[Place], ahead: int = AHEAD) -> Iterator[Answer]:
    """Yield `read(place)` for each place, in order, while up to `ahead` of them are read by other threads."""
    if min(len(places), ahead) < 2:
        yield from map(read, places)  # without a thread
        return
    with ThreadPoolExecutor(ahead) as pool:
        waiting = deque(pool.submit(read, place) for place in places[:ahead])
        later = iter(places[ahead:])
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(read, place) for place in islice(later, 1))
        finally:
            pool.shutdown(cancel_futures=True)
