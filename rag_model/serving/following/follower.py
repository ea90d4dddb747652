"""Follow a ref: pull the snapshot that it names, open it beside the current one, check it, and only then serve it.

If anything is wrong with a new version (a ref record that cannot be read, a wrong manifest, a missing or damaged file,
an index that finds nothing, an encoder space other than the model's, too little memory), it is refused and reported,
and the old version stays in service. A refused version is tried again when the ref moves; after an error that may
pass, as of a store, also before that, at growing intervals. A store that cannot be reached is reported and asked again.

A snapshot that was taken down is served until its replacement is open, and not at all where that is refused or there is
none. Its files leave the disk as soon as its last reader has left.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rag_model.errors import BookwheelError, InputError, MissingExtraError, NotFoundError, RefusedError, UsageError
from rag_model.reading.model import model_folder_of, model_id
from rag_model.reading.settings import ReaderSettings
from rag_model.reading.writers.writer import ENDPOINT
from rag_model.retrieve.derived import derive
from rag_model.retrieve.scorers import Scorers
from rag_model.secrets import without_secrets
from rag_model.serving.answering.asking import ServedModel
from rag_model.serving.answering.edition import Edition, ServedRef
from rag_model.serving.answering.offer import Offer
from rag_model.serving.following.desk import Desk
from rag_model.serving.following.memory import check_memory
from rag_model.serving.following.model_trial import try_encoders, try_model
from rag_model.serving.following.trial import try_indexes
from rag_model.serving.service_settings import ServiceSettings
from rag_model.serving.threads import WatchedThread
from rag_model.serving.watching.observer import Observer, Refusal, tell
from rag_model.store.objects.files import Files
from rag_model.store.pulling.kinds import chosen
from rag_model.store.pulling.prune import remove_taken_down
from rag_model.store.pulling.pull import pull
from rag_model.store.pulling.pulled import remember, remembered
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

_LOG = logging.getLogger(__name__)
_FINAL = (InputError, MissingExtraError, RefusedError, UsageError)  # the version's own fault: a retry cannot help
_NICE = 10  # pulling a version yields to questions; threads started here inherit it


@dataclass(frozen=True, slots=True)
class Followed:
    """What a service serves, and where it keeps it."""

    url: str  # of the store
    ref: str  # or an id, or ref@number, which never move
    dest: Path  # where snapshots are pulled to
    model: str | None = None  # a model of the store, a folder, or `openai:MODEL`
    asks: str | None = None  # the passage encoder that the model's questions ask, where it does not say so
    reading: ReaderSettings = field(default_factory=ReaderSettings)  # how the model reads

    @property
    def model_is_here(self) -> bool:
        """Whether the model can be loaded without the store."""
        return self.model is None or self.model.startswith(ENDPOINT) or Path(self.model).is_dir()

    @property
    def weighs(self) -> bool:
        """Whether passages are weighed by inner products, which retrievers must give."""
        return self.model is not None and self.reading.of(self.model) == "marginal"

    def on_disk(self) -> Path | None:
        """Return the folder of what the ref named when it was last pulled from this store; None: there is none.

        Raises:
            BookwheelError: the URL cannot be used.
        """
        return remembered(self.dest, Files(self.url).url, self.ref)

    def check(self) -> None:
        """Check that there is something to serve; what is on the disk can be served without the store.

        Raises:
            StoreError: the store has no such snapshot or model; or it cannot be reached, and nothing that the ref named
                before is on the disk.
        """
        if self.on_disk() is None:
            store = Store.open(self.url)
            store.snapshots.trusted(self.ref)
            if self.model is not None:
                model_id(store, self.model)


@dataclass(frozen=True, slots=True)
class _Target:
    named: ServedRef
    model: str | None  # id


class _StoppedError(BookwheelError):
    """The service ends while a version is on its way."""


class Follower:
    """Looks at a ref at regular intervals, in a thread of its own."""

    def __init__(
        self,
        followed: Followed,
        desk: Desk,
        settings: ServiceSettings,
        observer: Observer,
        hopeless: Callable[[BookwheelError], None] = lambda error: None,
    ) -> None:
        """Prepare to follow; `hopeless` is called with the reason if the first version cannot be served."""
        self._followed, self._desk, self._settings, self._observer = followed, desk, settings, observer
        self._hopeless = hopeless
        self._scorers = Scorers(followed.url)
        self._store: Store | None = None
        self._taken_down: frozenset[str] = frozenset()  # snapshots, when the store was last asked
        self._stopping = threading.Event()
        self._refused: tuple[_Target | None, Refusal] | None = None
        self._served = False  # whether anything was, since the start
        self._again = 0.0  # when the refused version is tried again, by the monotonic clock
        self.thread = WatchedThread("follower", self._run, partial(tell, observer.died))
        self.problem = ""  # why the store could not be asked last time; empty: it could

    @property
    def refusal(self) -> Refusal | None:
        """The refused version that the ref names; None: it is served, or not looked at yet."""
        return None if self._refused is None else self._refused[1]

    def start(self) -> None:
        """Begin to follow."""
        self.thread.start()

    def stop(self) -> None:
        """Stop following; a pull under way is interrupted, and the next one resumes it."""
        self._stopping.set()
        self.thread.join()

    def look(self) -> None:
        """Look at the ref once and bring what it names, if that is new; leave what was taken down."""
        try:
            self._store = store = self._store or Store.open(self._followed.url)
            self._taken_down = store.takedowns.replaced()
            target = self._target(store)
        except BookwheelError as error:
            self._unreadable(error)
        else:
            self._looked("")
            self._take(store, target)
        self._leave_taken_down()

    def _take(self, store: Store, target: _Target) -> None:
        """Bring a target unless it serves already, or was refused and is not due again."""
        serving = self._desk.current
        if serving is not None and (serving.id, serving.model and serving.model.id) == (
            target.named.snapshot,
            target.model,
        ):
            self._refused = None
            self._rename(serving, target.named)
        elif self._refused is None or self._refused[0] != target or time.monotonic() >= self._again:
            self._bring(store, target, serving)

    def _leave_taken_down(self) -> None:
        """Serve and keep nothing that was taken down, as far as is known."""
        serving = self._desk.current
        if serving is not None and serving.id in self._taken_down:
            _LOG.error("snapshot %s was taken down and is not served any more", serving.id[:12])
            self._desk.close()
            tell(self._observer.withdrawn, serving.id)
        try:
            for gone in remove_taken_down(self._followed.dest, self._taken_down, Manifest.from_bytes):
                _LOG.info("snapshot %s was taken down: its files are deleted", gone[:12])
        except OSError as kept:
            _LOG.error("what was taken down cannot be deleted from %s: %s", self._followed.dest, kept)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # not everywhere has a thread a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            try:
                self.look()
            except _StoppedError:
                return
            except BaseException as failure:  # a panic too: the next look may do better, questions are answered
                self._looked(f"unexpected {type(failure).__name__}: {failure}")
            if self._stopping.wait(self._settings.poll_seconds):
                return

    def _target(self, store: Store) -> _Target:
        followed = self._followed
        move = None if "@" in followed.ref else store.refs.current(followed.ref)
        if move is not None:
            named = ServedRef(followed.ref, move.number, move.snapshot, move.created_at)
        else:
            named = ServedRef(followed.ref, 0, store.snapshots.resolve(followed.ref), "")
        return _Target(named, None if followed.model is None else model_id(store, followed.model))

    def _unreadable(self, error: BookwheelError) -> None:
        """Distinguish a store that does not answer from one whose answer cannot be used, or that lacks the ref."""
        absent = isinstance(error, NotFoundError)
        if absent and not self._served:
            self._hopeless(error)
        try:
            numbers = [] if self._store is None else self._store.refs.numbers(self._followed.ref)
        except BookwheelError:
            numbers = []
        if numbers:
            self._looked("")
            self._refuse(None, ServedRef(self._followed.ref, numbers[-1], "", ""), error, final=False)
        else:
            self._looked(str(error))
            if self._desk.current is None and isinstance(error, _FINAL):
                self._hopeless(error)
            elif self._desk.current is None and not absent:
                self._from_disk()

    def _from_disk(self) -> None:
        """Serve what the ref named last until the store answers; a model of the store cannot be loaded without it."""
        followed, folder = self._followed, self._followed.on_disk()
        if folder is None or not followed.model_is_here:
            return
        identity = folder.name
        if identity in self._taken_down:
            return
        try:
            model = None if followed.model is None else self._loaded(None, followed.model)
            with Snapshot.from_folder(folder) as snapshot:
                offer = Offer.of(snapshot, self._settings, weighs=self._followed.weighs)
                self._try(folder, snapshot.manifest.content, offer.indexes)
            self._serve(folder, ServedRef(followed.ref, 0, identity, ""), model, None, time.monotonic())
        except BookwheelError as error:
            _LOG.error("snapshot %s on the disk can't be served: %s", identity[:12], error)

    def _looked(self, problem: str) -> None:
        problem = without_secrets(problem)
        if problem != self.problem:
            _LOG.warning("%s", problem or f"the store answers again: {self._followed.ref} is followed")
        self.problem = problem
        tell(self._observer.looked, problem)

    def _rename(self, serving: Edition, named: ServedRef) -> None:
        if serving.named != named:
            self._desk.rename(named)
            _LOG.info("%s@%d names snapshot %s, which is served already", named.ref, named.number, named.snapshot[:12])
            tell(self._observer.renamed, serving, named)

    def _bring(self, store: Store, target: _Target, serving: Edition | None) -> None:
        began, named = time.monotonic(), target.named
        try:
            folder, model = self._brought(store, target, serving)
            self._serve(folder, named, model, serving, began)
            self._remember(store, named)
        except _StoppedError:
            raise
        except BookwheelError as error:
            self._refuse(target, named, error, final=isinstance(error, _FINAL))
        except BaseException as error:  # a panic of a native library is no Exception
            _LOG.exception("snapshot %s can't be opened", named.snapshot[:12])
            self._refuse(target, named, error, final=False)

    def _brought(self, store: Store, target: _Target, serving: Edition | None) -> tuple[Path, ServedModel | None]:
        """Pull a snapshot beside what serves, and load the model unless it serves already."""
        ref, number = target.named.ref, target.named.number
        store.snapshots.trusted(f"{ref}@{number}" if number else ref)
        snapshot = Snapshot.of(store, store.snapshots.get(target.named.snapshot))
        content = snapshot.manifest.content
        offer = Offer.of(snapshot, self._settings, weighs=self._followed.weighs)
        check_memory(content, offer.indexes, self._settings)
        model = serving.model if serving is not None else None
        if target.model is not None and (model is None or model.id != target.model):
            model = self._loaded(store, target.model)
        report = pull(
            store,
            target.named.snapshot,
            self._followed.dest,
            select=chosen(content, indexes=offer.indexes, embeddings=offer.embeddings),
            keep=self._settings.keep,
            derive=derive,
            accept=lambda folder: self._try(folder, content, offer.indexes),
            on_progress=self._goes_on,
        )
        return report.path, model

    def _try(self, folder: Path, content: Content, indexes: Sequence[str]) -> None:
        if self._settings.trial:
            try_indexes(folder, content, indexes)
            try_encoders(folder, content, indexes)

    def _loaded(self, store: Store | None, identity: str) -> ServedModel:
        """Load the model that answers, after a child process has."""
        followed, folder = self._followed, model_folder_of(store, identity)
        if self._settings.trial and folder is not None:
            try_model(followed.dest, folder, followed.reading.of(identity))
        return ServedModel.load(store, identity, followed.reading, followed.asks, self._settings.batch_answers)

    def _serve(
        self, folder: Path, named: ServedRef, model: ServedModel | None, serving: Edition | None, began: float
    ) -> None:
        """Open a pulled snapshot, try it, and only then put it on the desk."""
        edition = Edition.open(folder, named, self._settings, model, serving, self._scorers)
        try:
            edition.warm()
        except BaseException:
            edition.close()
            raise
        self._refused, seconds = None, time.monotonic() - began
        _LOG.info("%s@%d: snapshot %s serves, after %.1f s", named.ref, named.number, edition.id[:12], seconds)
        tell(self._observer.serves, edition, seconds)
        self._desk.put(edition)
        self._served = True

    def _remember(self, store: Store, named: ServedRef) -> None:
        """Note what the ref names, for a start without the store."""
        try:
            remember(self._followed.dest, store.url, named.ref, named.snapshot)
        except OSError as full:
            _LOG.error("cannot note in %s what %s names: %s", self._followed.dest, named.ref, full)

    def _goes_on(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise _StoppedError("the service ends")

    def _refuse(self, target: _Target | None, named: ServedRef, error: BaseException, *, final: bool) -> None:
        before = self._refused
        tries = before[1].tries + 1 if before is not None and before[0] == target else 1
        reason = str(error) if isinstance(error, BookwheelError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())
        now = datetime.now(UTC).isoformat(timespec="seconds")
        refusal = Refusal(named.ref, named.number, named.snapshot, without_secrets(reason), now, tries, final)
        pause = self._settings.poll_seconds * 2.0 ** min(tries, 30)
        self._again = float("inf") if final else time.monotonic() + min(pause, self._settings.retry_seconds)
        if before is None or before[1].reason != refusal.reason:
            _LOG.error("%s@%d is refused: %s", named.ref, named.number, refusal.reason)
        self._refused = target, refusal
        tell(self._observer.refused, refusal)
        if final and self._desk.current is None and isinstance(error, BookwheelError):
            self._hopeless(error)
