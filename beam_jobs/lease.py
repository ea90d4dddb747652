"""A lease ties local worker processes to the launcher that started them.

The launcher holds an exclusive lock on a file while its job runs; every worker waits for that lock
in a thread. The kernel releases it when the launcher ends *by any means*, `kill -9` included, and a
worker that gets it exits at once: no process is orphaned, and no process polls.
"""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lease() -> Iterator[Path]:
    """Hold a new lease while the block runs; yield the path that workers wait on."""
    descriptor, name = tempfile.mkstemp(prefix="bookwheel-lease-")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(descriptor)


def exit_with_holder(lease: Path) -> None:
    """End this process as soon as the holder of `lease` has ended; returns at once."""
    threading.Thread(target=_wait_and_exit, args=(lease,), daemon=True, name="lease").start()


def _wait_and_exit(lease: Path) -> None:
    try:
        with lease.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        pass  # deleted before this worker started: the launcher has ended
    os._exit(1)
