"""Probe what every writer needs of a store: reads, writes, exclusive creation, and a clock."""

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from rag_model.errors import StoreError
from rag_model.store.objects.files import json_bytes
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe."""

    excludes: bool  # if two writers create one file, the second fails
    skew: float  # seconds by which the store's clock is ahead of this machine's
    seconds: float  # time to write, list, read and remove a small file


def probe(store: Store) -> Probed:
    """Write a small file, list it, read it back and remove it; then let writers race to create one.

    Leaves no file behind. `gc` and intents use the store's clock alone, so a skew does no harm.

    Raises:
        StoreError: the store cannot be read or written, or does not give back what was written.
    """
    path, value = f"probe/doctor-{secrets.token_hex(8)}.json", {"nonce": secrets.token_hex(8)}
    begun, before = time.perf_counter(), time.time()
    try:
        written = store.intents.stamp(path, value)
        after = time.time()
        if store.files.read(path) != json_bytes(value):
            raise StoreError(f"{store.files.url_of(path)} does not hold what was just written: use another store")
    finally:
        with suppress(StoreError):  # the earlier failure is the one to report
            store.files.remove(path)
    seconds = time.perf_counter() - begun
    # the store's clock was read between two readings of this machine's: only a time outside them is a skew
    skew = min(written - before, 0.0) if written < after else written - after
    return Probed(store.files.excludes(), round(skew, 1), round(seconds, 3))
