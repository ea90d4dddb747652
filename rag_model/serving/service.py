"""The service without HTTP: desk, follower and the two queues."""

from collections.abc import Callable, Sequence
from functools import partial

from rag_model.errors import BookwheelError, UsageError
from rag_model.serving.answering import work
from rag_model.serving.answering.batcher import Batcher
from rag_model.serving.answering.edition import (
    answer_threads_of,
    answer_workers_of,
    lone_threads_of,
    threads_of,
    workers_of,
)
from rag_model.serving.answering.growing import Growing
from rag_model.serving.answering.team import Team
from rag_model.serving.answering.work import Answered, Found
from rag_model.serving.following.desk import Desk
from rag_model.serving.following.folder import FolderFollower, Pulled
from rag_model.serving.following.follower import Followed, Follower
from rag_model.serving.service_settings import ServiceSettings
from rag_model.serving.threads import limit_threads
from rag_model.serving.watching.observer import Observer, tell


class Service:
    """Answers questions from the snapshot that a ref names at the time."""

    def __init__(
        self,
        followed: Followed | Pulled,
        settings: ServiceSettings | None = None,
        observer: Observer | None = None,
        hopeless: Callable[[BookwheelError], None] = lambda error: None,
    ) -> None:
        """Put it together; `start` begins to follow. `hopeless` is called with the reason if nothing can be served."""
        self.followed, self.settings, self.observer = followed, settings or ServiceSettings(), observer or Observer()
        self.desk = Desk(partial(tell, self.observer.freed))
        around = self.desk, self.settings, self.observer, hopeless
        self.follower = (
            FolderFollower(followed, *around) if isinstance(followed, Pulled) else Follower(followed, *around)
        )
        self.draining = False
        self._searches: Batcher[Found] = Batcher(
            "search",
            partial(work.search, self.desk, self.observer),
            waiting=self.settings.queue_questions,
            batch=self.settings.batch_questions,
            wait_ms=self.settings.batch_wait_ms,
            workers=workers_of(self.settings),
            begin=partial(limit_threads, threads_of(self.settings)),
            alone=Team(threads_of(self.settings), lone_threads_of(self.settings)).computing,
            died=partial(tell, self.observer.died),
        )
        self._answers: Batcher[Answered] = Batcher(
            "answer",
            partial(work.answer, self.desk, self.observer),
            waiting=self.settings.queue_answers,
            batch=self.settings.batch_answers,
            workers=answer_workers_of(self.settings, followed.model),
            begin=partial(limit_threads, answer_threads_of(self.settings, followed.model)),
            died=partial(tell, self.observer.died),
        )

    @property
    def ready(self) -> bool:
        """Whether the service can answer questions, all its threads work, and it is not shutting down."""
        return self.desk.named is not None and not self.draining and not self.problem

    @property
    def problem(self) -> str:
        """Which thread does not work, and why, as one sentence; empty: all do."""
        threads = (*self._searches.threads, *self._answers.threads, self.follower.thread, *self.observer.threads)
        return next((thread.problem for thread in threads if thread.problem), "")

    def start(self) -> None:
        """Begin to follow the ref."""
        self.follower.start()

    async def search(self, questions: Sequence[str], k: int, retriever: str | None = None, client: str = "") -> Found:
        """Return passages for questions of a client; clients take turns.

        Raises:
            BusyError, LateError, ClosingError: see `Batcher.ask`.
            NotReadyError: nothing is served yet.
            UsageError: the retriever is wrong or not served here, or it gives fewer passages than `k`.
        """
        seconds = self.settings.request_seconds
        return await self._searches.ask(questions, k, retriever, seconds, self._asked("search"), client)

    async def answer(
        self,
        questions: Sequence[str],
        k: int | None = None,
        retriever: str | None = None,
        client: str = "",
        growing: Growing | None = None,
    ) -> Answered:
        """Return answers to questions, as `search` returns passages; `growing` is told what there is before that.

        Raises:
            UsageError: there is no model, or `search` would refuse the retriever or `k`.
        """
        if self.followed.model is None:
            raise UsageError("this service has no model, so it gives no answers: ask /search")
        seconds = self.settings.request_seconds
        return await self._answers.ask(questions, k, retriever, seconds, self._asked("answer"), client, growing)

    def close(self) -> None:
        """Answer the requests under way, then free everything."""
        self.draining = True
        self.follower.stop()
        self._searches.close()
        self._answers.close()
        serving = self.desk.current
        self.desk.close()
        tell(self.observer.close)  # it may ask the model
        if serving is not None and serving.model is not None:
            serving.model.close()

    def _asked(self, verb: str) -> Callable[[int, int], None]:
        return partial(tell, self.observer.asked, verb)
