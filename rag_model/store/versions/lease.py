"""A lease: the snapshot that a long reader asks, kept from `expire` and `gc` while it is asked.

It is an intent that names the manifest and every file of the snapshot, and a running process renews it. So the snapshot
stays though no ref names it any more, and can be deleted as soon as the reader moves on or ends.
"""

import asyncio
import secrets
import threading
import weakref
from contextlib import ExitStack

from rag_model.errors import StoreError
from rag_model.store.store import Store


class Lease:
    """A lease on one snapshot of a store at a time."""

    def __init__(self, store: Store) -> None:
        """Hold nothing yet."""
        self._store, self._held = store, ExitStack()
        self._end = weakref.finalize(self, _let_go, self._held)  # also where the process ends without `close`

    def move(self, snapshot: str) -> None:
        """Hold the snapshot with this full id, then let the one before go.

        Raises:
            StoreError: there is no such snapshot, or the store cannot be written; the one before is still held.
        """
        manifest = self._store.snapshots.get(snapshot)
        needs = {self._store.snapshots.path(snapshot), *(blob.path for blob in manifest.content.files.values())}
        held = ExitStack()
        held.enter_context(self._store.intents.held(f"asked-{secrets.token_hex(8)}", needs))
        try:
            self._store.snapshots.get(snapshot)  # it may have been deleted just before it was held
        except StoreError:
            held.close()
            raise
        before, self._held = self._held, held
        self._end.detach()
        self._end = weakref.finalize(self, _let_go, held)
        before.close()

    def close(self) -> None:
        """Let the snapshot go."""
        self._end()


def _let_go(held: ExitStack) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        held.close()
    else:  # dropped in the thread that makes the store's requests, which cannot wait for one of its own
        threading.Thread(target=held.close, name="lease").start()
