"""Try out what every writer needs of a store: that it reads, writes, excludes a second writer, and knows the time."""

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from rag_model.errors import StoreError
from rag_model.store.objects.files import json_bytes
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class Probed:
    """What a store does."""

    excludes: bool  # of two who create one file, the second fails
    skew: float  # seconds by which the store's clock is ahead of this machine's
    seconds: float  # that writing, listing, reading and removing a small file took


def probe(store: Store) -> Probed:
    """Write a small file, list it, read it back and remove it; then create one twice.

    Leaves nothing behind. `gc` and intents go by the store's clock alone, so a skew loses nothing.

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
        with suppress(StoreError):  # what failed before it is what to tell
            store.files.remove(path)
    seconds = time.perf_counter() - begun
    # the store's clock was read between the two readings of this one; within them there is no telling
    skew = min(written - before, 0.0) if written < after else written - after
    return Probed(store.files.excludes(), round(skew, 1), round(seconds, 3))
