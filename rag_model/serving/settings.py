"""The settings of a service: request limits, queues and batches, and how it follows a ref."""

import math
import re
import threading
from dataclasses import dataclass, fields

from rag_model.errors import UsageError
from rag_model.retrieve.expression import parse
from rag_model.secrets import LOOPBACK

ANY_HOST = "*"
_MIN_CACHE_BYTES = 16 << 20  # as many bytes as a few concurrent queries read
_ZERO_ALLOWED = {
    "batch_wait_ms", "workers", "answer_workers", "threads", "pinned_snapshots", "override_every",
    "linger_seconds", "drain_seconds",
}  # fmt: skip
# a host name or address with an optional port, as in a Host header
_HOST_PATTERN = re.compile(r"([A-Za-z0-9_]([A-Za-z0-9._-]*)|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of a service. The limits keep one client from delaying other clients."""

    # snapshot
    # retriever expressions, of which the first is the default; empty: the snapshot's default
    retrievers: tuple[str, ...] = ()
    # pull the vectors of passages, with which exact search measures the recall of live queries;
    # they take disk space, but no memory
    pull_embeddings: bool = True
    # load indexes into memory instead of mapping them; during a switch, those of two snapshots
    in_memory: bool = False
    # answer by reading byte ranges of the store's files until the snapshot is pulled
    from_store: bool = False
    pull: bool = True  # False (with `from_store`): pull nothing, and always read byte ranges
    # maximum bytes of cached ranges on the disk; None means the limit of the cache of blobs
    cache_bytes: int | None = None
    # memory limit of the processes, their encoders and the served indexes; None means no limit
    memory_bytes: int | None = None
    processes: int = 1  # processes that serve the same snapshot
    run_trials: bool = True  # try the indexes and models of a new version in a child process first
    # requests
    max_questions: int = 64  # maximum questions of a request; as many as in a batch
    max_question_chars: int = 2_000  # encoders truncate after some hundred tokens anyway
    max_k: int = 100  # maximum passages per question; 100 as in DPR
    max_depth: int = 1_000  # maximum depth of a child retriever in a request, as in hnsw:1000
    max_queries: int = 4_096  # maximum queries of a request to /retrieve; split into batches
    max_retrieved: int = 131_072  # maximum passages in a reply of /retrieve, about 100 MB
    max_body_bytes: int = 1 << 20  # for 64 questions of 2,000 characters, all escaped as \uXXXX
    max_retrieve_body_bytes: int = 8 << 20
    # time from the head of a request to the end of its body, so that slow senders do not occupy a
    # connection
    body_seconds: float = 10.0
    # time from the complete body to the reply; a request that takes longer fails with 504
    request_seconds: float = 30.0
    # maximum open connections; each takes a file descriptor, of which a process usually has 1,024
    connections: int = 2_000
    # maximum open connections of one address; a training sends hundreds of queries at once
    connections_per_client: int = 1_000
    # time in which a client must read a reply, in addition to one second for each 64 KiB
    write_seconds: float = 10.0
    # time after which idle connections are closed; longer than the usual 60 s of load balancers
    idle_seconds: float = 75.0
    # maximum bytes of replies that a client has not read; a reply to 64 questions with 100 passages
    # each has 5 MB
    unsent_bytes_per_client: int = 128 << 20
    # accepted Host headers and origins of pages; "*": any host
    allowed_hosts: tuple[str, ...] = LOOPBACK
    # queue
    queue_questions: int = 512  # maximum queued searches, about a second's work; more get 429
    queue_answers: int = 32  # maximum queued answers; a model takes about a second for each
    # maximum questions that are encoded and searched together; larger batches are no faster on a
    # CPU
    batch_questions: int = 64
    batch_answers: int = 8  # maximum answers that are decoded together
    # how long a batch waits for further requests; a single client never waits
    batch_wait_ms: float = 20.0
    workers: int = 0  # concurrent search batches; 0: one per core, up to four
    answer_workers: int = 0  # concurrent answer batches; 0: one, or eight for a remote model
    # torch and faiss threads of each worker; 0: the cores divided among the workers
    threads: int = 0
    # answers
    # check every n-th answer for an override (2 forward passes or 1 call); 0: check none
    override_every: int = 20
    # time between two rounds of probe questions to a remote model, which may change at any time
    probe_seconds: float = 3600.0
    # ref
    poll_seconds: float = 10.0  # time between two polls; each lists the ref and the takedowns once
    retry_seconds: float = 900.0  # longest pause between two attempts to load a version that failed
    # maximum number of open snapshots that requests name, besides the current one
    pinned_snapshots: int = 2
    pin_seconds: float = 900.0  # time that a pinned snapshot stays open after its last request
    # number of pulled snapshots on the disk: the current one and, for a quick rollback, the
    # previous one
    keep: int = 2
    # shutdown
    # keep answering after SIGTERM while /readyz fails, so that load balancers notice
    linger_seconds: float = 2.0
    drain_seconds: float = 30.0  # time after `linger_seconds` to finish the requests in progress

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: A limit is not a positive number, a host name is malformed, or a retriever
                is not a valid expression.
        """
        for expression in self.retrievers:
            parse(expression)
        if self.in_memory and self.from_store and not self.pull:
            raise UsageError("in_memory needs pulled indexes: leave it out, or set pull to true")
        if self.cache_bytes is not None and self.cache_bytes < _MIN_CACHE_BYTES:
            raise UsageError(f"cache_bytes is {self.cache_bytes:,}: give at least {_MIN_CACHE_BYTES:,}")
        for host in self.allowed_hosts:
            if host != ANY_HOST and not _HOST_PATTERN.fullmatch(host):
                raise UsageError(
                    f"{host!r} is not a host name: give --allow-host one such as rag.example.com, "
                    "rag.example.com:8443 or [::1], without http:// and path, or * for any"
                )
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            self._check_finite(name, value)
            if isinstance(value, bool) and setting.type is not bool:
                raise UsageError(f"{name} is {value}: give a number")
            if type(value) in {int, float} and (value < 0 or (value == 0 and name not in _ZERO_ALLOWED)):
                raise UsageError(f"{name} is {value}: give {'0 or more' if name in _ZERO_ALLOWED else 'more than 0'}")

    def _check_finite(self, name: str, value: object) -> None:
        """Raise an error for NaN, infinity, and times that are longer than a thread can wait."""
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} is {value}: give a finite number")
        if name.endswith("_seconds") and isinstance(value, float | int) and value > threading.TIMEOUT_MAX:
            raise UsageError(f"{name} is {value:g}: give at most {threading.TIMEOUT_MAX:g}")
