"""Serve a pulled folder: what its `current` names, and what another pull makes it name later. No store is asked."""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rag_model.errors import BookwheelError
from rag_model.secrets import without_secrets
from rag_model.serving.answering.edition import Edition, ServedRef
from rag_model.serving.answering.offer import Offer
from rag_model.serving.following.desk import Desk
from rag_model.serving.following.memory import check_memory
from rag_model.serving.following.model_trial import try_encoders
from rag_model.serving.following.trial import try_indexes
from rag_model.serving.service_settings import ServiceSettings
from rag_model.serving.threads import WatchedThread
from rag_model.serving.watching.observer import Observer, Refusal, tell
from rag_model.store.pulling.pulled import CURRENT
from rag_model.store.versions.snapshot import Snapshot

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A folder that `bookwheel pull` writes."""

    folder: Path
    model: None = None  # passages only

    def check(self) -> None:
        """Check that a snapshot lies there.

        Raises:
            StoreError: nothing was pulled there, or the manifest is damaged.
        """
        Snapshot.from_folder(self.folder).close()


class FolderFollower:
    """Looks at a folder at regular intervals, in a thread of its own; a wrong snapshot leaves the old one serving."""

    refusal: Refusal | None = None  # a folder has no ref: what is wrong with it is `problem`

    def __init__(
        self,
        pulled: Pulled,
        desk: Desk,
        settings: ServiceSettings,
        observer: Observer,
        hopeless: Callable[[BookwheelError], None] = lambda error: None,
    ) -> None:
        """Prepare to follow; `hopeless` is called with the reason if the first snapshot cannot be served."""
        self._folder, self._desk, self._settings, self._observer = pulled.folder, desk, settings, observer
        self._hopeless = hopeless
        self._wrong: Path | None = None  # what could not be served last time
        self._stopping = threading.Event()
        self.thread = WatchedThread("follower", self._run, partial(tell, observer.died))
        self.problem = ""  # why what the folder holds is not served; empty: it is

    def start(self) -> None:
        """Begin to follow."""
        self.thread.start()

    def stop(self) -> None:
        """Stop following."""
        self._stopping.set()
        self.thread.join()

    def look(self) -> None:
        """Look at the folder once and serve what it names, if that is new."""
        root = (self._folder / CURRENT if (self._folder / CURRENT).exists() else self._folder).resolve()
        serving = self._desk.current
        if root == self._wrong or (serving is not None and serving.id == root.name):
            return
        try:
            self._desk.put(self._opened(root, serving))
            self._wrong, self.problem = None, ""
        except BookwheelError as error:
            self._wrong, self.problem = root, without_secrets(str(error))
            _LOG.error("%s is not served: %s", root, self.problem)
            if serving is None:
                self._hopeless(error)

    def _opened(self, root: Path, serving: Edition | None) -> Edition:
        with closing(Snapshot.from_folder(root)) as snapshot:
            content, identity = snapshot.manifest.content, snapshot.id
            offer = Offer.of(snapshot, self._settings, weighs=False)
            check_memory(content, offer.indexes, self._settings)
            if self._settings.trial:
                try_indexes(root, content, offer.indexes)
                try_encoders(root, content, offer.indexes)
        edition = Edition.open(root, ServedRef(CURRENT, 0, identity, ""), self._settings, None, serving)
        try:
            edition.warm()
        except BaseException:
            edition.close()
            raise
        tell(self._observer.serves, edition, 0.0)
        return edition

    def _run(self) -> None:
        while True:
            self.look()
            if self._stopping.wait(self._settings.poll_seconds):
                return
