"""Monitor the quality of what is served, over the questions that users ask.

Three figures: whether different questions still get different passages (retrieval collapse), whether the index finds
what exact search finds (recall), and how far the questions differ from those of the evaluation (drift). The windows
belong to one edition, so a swap empties them. A figure that cannot be computed is absent.

Slow work is done by one thread of the lowest priority, which rests far longer than it works.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors
from rag_model.reading.answer import Answer
from rag_model.retrieve.retriever import Hit
from rag_model.serving.threads import WatchedThread, lowest_priority
from rag_model.serving.watching.drift import LEAST, MOST, Reference
from rag_model.serving.watching.spotcheck import Truth, truth_of
from rag_model.serving.watching.windows import Figures, WatchSettings, Windows
from rag_model.store.versions.snapshot import Snapshot

Encode = Callable[[Sequence[str]], Vectors]
_LOG = logging.getLogger(__name__)
_SLICE = 8  # questions of the evaluation that are encoded between two rests
_RENEWALS = 10  # times that drift is measured while the window's questions change


@dataclass(slots=True)
class _Watch:
    """One edition under watch."""

    snapshot: Snapshot
    index: str | None  # None: a composition, so exact search cannot measure its recall
    parameters: Mapping[str, float]  # of its search
    encode: Encode | None
    windows: Windows
    unread: list[str]  # questions of the evaluation that are not encoded yet
    read: list[Vectors] = field(default_factory=list)
    reference: Reference | None = None
    truth: Truth | None = None
    opened: bool = False  # the truth was looked for

    @property
    def samples_due(self) -> bool:
        return self.windows.waiting and (self.truth is not None or not self.opened)

    @property
    def drift_due(self) -> bool:
        return self.reference is not None and self.windows.renewed(_RENEWALS)

    @property
    def due(self) -> bool:
        """Whether there is something to do that takes time."""
        return self.samples_due or self.drift_due or bool(self.unread)


class Quality:
    """Watches one edition at a time. Safe among threads; what it is told takes microseconds."""

    def __init__(self, settings: WatchSettings | None = None, questions: Sequence[str] = ()) -> None:
        """Watch as `settings` say; without `questions`, those of the evaluation, drift is not measured.

        Raises:
            UsageError: there are questions, but too few to measure drift against.
        """
        if 0 < len(questions) < LEAST:
            raise UsageError(f"{len(questions)} questions are too few to measure drift against: give at least {LEAST}")
        self._settings = settings or WatchSettings()
        self._questions = [
            questions[i] for i in np.linspace(0, len(questions) - 1, min(len(questions), MOST)).astype(int)
        ]
        self._changed = threading.Condition()
        self._watch: _Watch | None = None
        self._closed = False
        self.thread = WatchedThread("quality", self._work)
        self.thread.start()

    def follow(
        self,
        snapshot: Snapshot,
        index: str | None,
        parameters: Mapping[str, float] | None = None,
        *,
        encode: Encode | None = None,
    ) -> None:
        """Watch another edition from now on, with empty windows.

        Args:
            snapshot: of the edition.
            index: that is searched; None (the retriever is a fusion, say): recall is not measured.
            parameters: of its search, in place of the snapshot's.
            encode: of the questions; None: drift is not measured.
        """
        windows = Windows(self._settings, snapshot.n)
        with self._changed:
            unread = list(self._questions) if encode else []
            self._watch = _Watch(snapshot, index, parameters or {}, encode, windows, unread)
            self._changed.notify()

    def leave(self) -> None:
        """Watch no edition until `follow` names the next one."""
        with self._changed:
            self._watch = None
            self._changed.notify()

    def saw(
        self,
        snapshot: str,
        questions: Sequence[str],
        vectors: Vectors | None,
        ks: Sequence[int],
        hits: Sequence[Sequence[Hit]],
    ) -> None:
        """Take questions that were served by a snapshot: their (n, d) vectors, if any, depths and passages, in order.

        Those of a snapshot that is not watched, as of one that is being drained, are left out.
        """
        with self._changed:
            if self._watch is None or self._watch.snapshot.id != snapshot:
                return
            known = [None] * len(questions) if vectors is None else [vector.copy() for vector in vectors]
            for question, vector, k, found in zip(questions, known, ks, hits, strict=True):
                self._watch.windows.add_searched(question, vector, k, found, sampled=self._watch.index is not None)
            if self._watch.due:
                self._changed.notify()

    def saw_answers(self, snapshot: str, answers: Sequence[Answer]) -> None:
        """Take questions that a model answered from a snapshot's passages, as `saw` takes those that were searched."""
        with self._changed:
            if self._watch is not None and self._watch.snapshot.id == snapshot:
                for one in answers:
                    given = [support.hit.passage.id for support in one.support]
                    self._watch.windows.add_given("answer", one.question, given)

    def figures(self) -> Figures:
        """Return what is known now of the edition that is watched."""
        with self._changed:
            return self._watch.windows.figures() if self._watch else Figures()

    def close(self) -> None:
        """Stop watching; the thread ends within the search of one part."""
        with self._changed:
            self._closed, self._watch = True, None
            self._changed.notify()
        self.thread.join()

    def _work(self) -> None:
        lowest_priority()
        while watch := self._awaited():
            try:
                self._tend(watch)
            except BaseException:  # a panic too: missing figures are better than a dead thread
                _LOG.exception("the quality of snapshot %s is not watched any more", watch.snapshot.id[:12])
                with self._changed:
                    self._watch = None if self._watch is watch else self._watch
            watch = None  # do not hold an old edition while waiting

    def _awaited(self) -> _Watch | None:
        """Wait until something is due; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._watch is not None and self._watch.due))
            return self._watch

    def _tend(self, watch: _Watch) -> None:
        """Do one thing that is due, and rest."""
        if watch.samples_due:
            self._check(watch)
            return
        began = time.thread_time()
        if watch.drift_due and watch.reference is not None:
            with self._changed:
                vectors = watch.windows.renew()
            watch.windows.drift = watch.reference.distance(vectors)
        elif watch.unread and watch.encode is not None:
            # The evaluation's questions as this edition encodes them: vectors of another space can't be compared.
            watch.read.append(watch.encode(watch.unread[:_SLICE]))
            del watch.unread[:_SLICE]
            if not watch.unread:
                watch.reference = Reference.of(np.concatenate(watch.read))
        self._rest(watch, began)

    def _check(self, watch: _Watch) -> None:
        """Ask sampled questions again of all vectors, or of all postings."""
        if not watch.opened and watch.index is not None:
            watch.truth = truth_of(watch.snapshot, watch.index, watch.parameters)
        with self._changed:
            watch.opened = True
            if watch.truth is None:
                watch.index = None  # nothing is sampled any more
            asked = watch.windows.take_waiting()
        began = time.thread_time()

        def pause() -> bool:
            nonlocal began
            goes_on = self._rest(watch, began)
            began = time.thread_time()
            return goes_on

        recalls = watch.truth.recalls(asked, pause) if watch.truth else None
        if recalls is not None:
            with self._changed:
                watch.windows.add_recalls(recalls)

    def _rest(self, watch: _Watch, began: float) -> bool:
        """Rest after work that `began` then, so long that all work takes its share; False if the edition was left.

        Measured by the thread's own processor time, since wall-clock time also counts waiting for other threads.
        """
        rest = (time.thread_time() - began) * (1 / self._settings.share - 1)
        with self._changed:
            return not self._changed.wait_for(lambda: self._watch is not watch, rest)
