"""The whole service in one process: what `bookwheel serve` runs."""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rag_model.digest import digest_bytes
from rag_model.errors import BookwheelError
from rag_model.evaluation.questions.files import read_questions
from rag_model.generate.named import rag_id
from rag_model.serving.following.follower import Followed
from rag_model.serving.following.secrets import without_secrets
from rag_model.serving.http.app import create_app
from rag_model.serving.http.server import Server, address, bound
from rag_model.serving.service import Service
from rag_model.serving.service_settings import ServiceSettings
from rag_model.serving.watching.metrics import CONTENT_TYPE, Metrics
from rag_model.serving.watching.quality import Quality
from rag_model.store.objects.cache import cache_folder
from rag_model.store.objects.files import Files
from rag_model.store.pulling.pulled import CURRENT
from rag_model.store.store import Store

__all__ = ["Followed", "ServiceSettings", "default_dest", "read_questions", "run"]
_SWITCH = 0.001  # seconds that one thread may keep Python from the others: at 5 ms, its default, questions queue up


def run(
    followed: Followed,
    settings: ServiceSettings,
    listener: tuple[str, int],
    questions: Sequence[str] = (),
    listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal comes.

    Args:
        followed: what to serve.
        settings: how.
        listener: host and port to listen at; port 0 takes a free one.
        questions: of the evaluation; how far live ones drift from them is measured.
        listening: called with the URL once connections are taken, which may be long before questions can be answered.

    Raises:
        StoreError: there is no such store or snapshot, and nothing of it on this machine's disk.
        UsageError: the address is taken, or the snapshot has no such index.
        RefusedError: the model's questions ask into another space than the snapshot's.
    """
    _log()
    sys.setswitchinterval(_SWITCH)
    if not (followed.dest / CURRENT).exists():  # otherwise it can serve that without the store
        store = Store.open(followed.url)
        store.snapshots.resolve(followed.ref)
        if followed.model is not None:
            rag_id(store, followed.model)
    failures: list[BookwheelError] = []
    servers: list[Server] = []

    def hopeless(error: BookwheelError) -> None:
        failures.append(error)
        for server in servers:
            server.should_exit = True

    with bound(*listener) as socket:
        metrics = Metrics(settings, Quality(questions=questions))
        service = Service(followed, settings, metrics, hopeless)
        app = create_app(service, metrics.exposition, CONTENT_TYPE)
        servers.append(Server(app, service, lambda: listening(address(socket))))
        service.start()
        try:
            servers[0].run(sockets=[socket])
        finally:
            service.close()
    if failures:
        raise failures[0]


def default_dest(url: str) -> Path:
    """Return the default folder for a store's pulled snapshots: in the cache, the same on every start."""
    return cache_folder() / "served" / digest_bytes(Files(url).url.encode())[-16:]


class _Discreet(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def _log() -> None:
    """Log to standard error, without secrets: what changes, and what goes wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Discreet("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rag_model.serving").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what is wrong with a request is told who sent it
