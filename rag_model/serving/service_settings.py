"""The bounds of requests, the size of queues and batches, and how a service changes editions."""

import math
import re
import threading
from dataclasses import dataclass, fields

from rag_model.errors import UsageError
from rag_model.retrieve.expression import parse

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # names of this machine, which no other site can have
ANY_HOST = "*"
_HOST = re.compile(r"([A-Za-z0-9_]([A-Za-z0-9._-]*)|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")  # as in a Host header


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How a service works; the bounds keep one caller's requests from delaying the requests of others."""

    # what is served
    retrievers: tuple[str, ...] = ()  # expressions; the first answers where a request names none. None: the snapshot's
    embeddings: bool = True  # pulled too: the recall of live questions is measured by them; disk, not memory
    loaded: bool = False  # indexes in memory, of two editions for a moment; else mapped, in the kernel's page cache
    trial: bool = True  # child processes use a new version's indexes and models first: some seconds, once a model
    # requests
    max_questions: int = 64  # a request: one batch
    max_question_chars: int = 2_000  # encoders read some hundred tokens, and what is longer is cut
    max_k: int = 100  # passages a question: DPR's depth
    max_depth: int = 1_000  # passages that a request may ask a leg for, as in hnsw:1000
    max_body_bytes: int = 1 << 20  # 64 questions of 2,000 characters, each escaped as \uXXXX
    body_seconds: float = 10.0  # from a request's head to the end of its body: a slow sender holds no place for longer
    request_seconds: float = 30.0  # from the whole body to the answer; then 504, and it leaves the queue
    connections: int = 1_000  # at once: each costs a file descriptor, of which processes have 1,024
    connections_per_client: int = 256  # of one address: the others keep three quarters; more behind a balancer
    write_seconds: float = 10.0  # for a client to read a reply, and one more for each 64 KiB of it; then it is cut off
    idle_seconds: float = 75.0  # between two requests of a connection: balancers give up theirs first, after 60
    unsent_bytes_per_client: int = 128 << 20  # replies of 64 questions, 100 passages each, take 5 MB
    hosts: tuple[str, ...] = LOOPBACK  # names that it is asked by, which its own pages are from; "*": any
    # the queue
    queue_questions: int = 512  # waiting to be searched: a second's work or so; then 429
    queue_answers: int = 32  # waiting to be answered by a model, which takes about a second each
    batch_questions: int = 64  # encoded and searched at once: more are no faster on a CPU
    batch_answers: int = 8  # decoded at once
    batch_wait_ms: float = 20.0  # for requests that are on their way; a single caller does not wait
    workers: int = 0  # batches at once; 0: one a core, up to four: a core encodes while the other speaks HTTP
    answer_workers: int = 0  # batches answered at once; 0: one, and eight where the model is behind an endpoint
    threads: int = 0  # of torch and faiss in each; 0: the cores, divided among them
    # the answers
    override_every: int = 20  # one answer in so many is checked for an override: 2 readings more, or 1 call; 0: none
    # the ref
    poll_seconds: float = 10.0  # between two looks at the ref and the takedowns: a listing of each
    retry_seconds: float = 900.0  # at most, between two tries of a version that could not be pulled
    keep: int = 2  # pulled snapshots on the disk: the one that serves, and the one before it for a quick rollback
    # the end
    linger_seconds: float = 2.0  # after SIGTERM: not ready, but still answering, so that load balancers notice
    drain_seconds: float = 30.0  # for requests under way after that

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: a bound is not a positive number, a host is no host name, or a retriever is not an expression.
        """
        for expression in self.retrievers:
            parse(expression)
        for host in self.hosts:
            if host != ANY_HOST and not _HOST.fullmatch(host):
                raise UsageError(
                    f"{host!r} is not a host name: give --allow-host one such as rag.example.com, "
                    "rag.example.com:8443 or [::1], without http:// and path, or * for any"
                )
        for name in (one.name for one in fields(self)):
            self._check_finite(name, getattr(self, name))
        least = {
            name: getattr(self, name)
            for name in (
                *("max_questions", "max_question_chars", "max_k", "max_depth", "max_body_bytes", "body_seconds"),
                "request_seconds",
                *("queue_questions", "queue_answers", "batch_questions", "batch_answers", "poll_seconds"),
                *("retry_seconds", "keep", "connections", "idle_seconds", "write_seconds"),
                *("connections_per_client", "unsent_bytes_per_client"),
            )
        }
        for name, value in least.items():
            if value <= 0:
                raise UsageError(f"{name} is {value}: give more than 0")
        for name in (
            "batch_wait_ms",
            "workers",
            "answer_workers",
            "threads",
            "override_every",
            "linger_seconds",
            "drain_seconds",
        ):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}: give 0 or more")

    def _check_finite(self, name: str, value: object) -> None:
        """Refuse NaN, which is neither more nor less than a bound, infinity, and more than threads can wait."""
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} is {value}: give a finite number")
        if name.endswith("_seconds") and isinstance(value, float | int) and value > threading.TIMEOUT_MAX:
            raise UsageError(f"{name} is {value:g}: give at most {threading.TIMEOUT_MAX:g}")
