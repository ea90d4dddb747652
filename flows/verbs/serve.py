"""`bookwheel serve`: serve a snapshot over HTTP, and follow its ref."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.command.reading import ReadingOptions
from flows.command.reply import AsksName, Common, MaybeStoreUrl, SnapshotName, keep_as_one_value
from rag_model.errors import UsageError
from rag_model.evaluation.questions import read_questions
from rag_model.extras import require
from rag_model.process import parse_bytes
from rag_model.retrieve.expression import choose_expressions
from rag_model.serving.workers import WorkerLink, supervise

if TYPE_CHECKING:
    from rag_model.reading.settings import ReaderSettings
    from rag_model.serving.following.follower import FollowedRef, PulledFolder
    from rag_model.serving.settings import ServiceSettings

_MAX_WORKERS = 256
_REQUIRED_EXTRAS = {"fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve", "torch": "model"}


def serve(
    *,
    store: MaybeStoreUrl = None,
    ref: SnapshotName = "latest",
    model: str | None = None,
    asks: AsksName = None,
    folder: Path | None = None,
    mcp: bool = False,
    reading: ReadingOptions | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    health_port: int | None = None,
    allow_host: tuple[str, ...] = (),
    tokens: Path | None = None,
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
    connections_per_client: int = 1_000,
    max_queries: int = 4_096,
    pinned: int = 2,
    retriever: Annotated[tuple[str, ...], Parameter(env_var_split=keep_as_one_value)] = (),
    index: tuple[str, ...] = (),
    in_memory: bool = False,
    memory: str | None = None,
    # a former option, whose behaviour is now the default
    low_memory: Annotated[bool, Parameter(show=False)] = False,
    dest: Path | None = None,
    from_store: bool = False,
    no_pull: bool = False,
    cache_bytes: int | None = None,
    keep: int = 2,
    no_embeddings: bool = False,
    request_seconds: float = 30.0,
    poll: float = 10.0,
    workers: int = 1,
    batches: int = 0,
    questions: Path | None = None,
    probes: Path | None = None,
    override_every: int | None = None,
    common: Common | None = None,
    link: Annotated[WorkerLink | None, Parameter(parse=False)] = None,
) -> None:
    """Serve passages, and with a model answers, from the snapshot of a ref; follow the ref.

    When the ref moves, the service changes to the new snapshot without a pause. The address is
    printed on standard error when connections are accepted (with --json as one line on standard
    output), and again when the first snapshot is served. With --mcp nothing is printed, and the
    service ends when its standard input is closed.

    Args:
        model: A RAG model for /answer: of the store (its ref is followed too), or a folder;
            with --reader concat also a folder of a generator alone, or openai:MODEL.
        folder: Serve passages of this pulled folder instead of a store; a later pull to it is
            noticed.
        mcp: Serve tools for an agent (search, passage, snapshot) by MCP over standard input and
            output, not HTTP.
        host: Address to listen on; 0.0.0.0 is reachable from other machines too.
        port: Port of the service; 0 takes a free one.
        health_port: A port only for /healthz, /readyz and /metrics, without TLS and tokens; 0 takes
            a free one.
        allow_host: A host name that requests may use, and whose pages may call the service;
            repeat it for more; * allows any. localhost, 127.0.0.1 and [::1] stay allowed. By
            default only these, or any name if --host is reachable from other machines. /healthz
            and /readyz are answered under any name.
        tokens: A file of bearer tokens, one per line; all requests but /healthz and /readyz need
            one. Changes take effect within two seconds: if the file is empty no token is valid;
            if it is deleted or unreadable the tokens stay as they are.
        tls_certificate: PEM file of the certificate and its chain, for HTTPS. Changes take
            effect within two seconds.
        tls_key: PEM file of the certificate's private key.
        connections_per_client: Maximum concurrent connections from one address; the limit of all
            addresses is 2,000.
        max_queries: Maximum number of queries in a request to /retrieve, as trainings of search
            agents send it.
        pinned: Number of snapshots besides the current one that stay open while requests to
            /retrieve name them; each takes the memory of a second version.
        retriever: Retriever expression: an index, rrf(A, B, k=60, weights=[1, 1]) or rerank(A,
            MODEL, 50); repeat it for more. The first is the default. Requests may combine the
            same indexes in other expressions. By default every index of the snapshot that fits
            into memory.
        index: An index, or `exact`; the short form of --retriever. Repeat the option for further
            values.
        in_memory: Load indexes instead of mapping them: the kernel cannot evict their pages, and
            two versions are in memory while the service changes to a new one.
        memory: Memory for the processes, the encoders and the indexes, such as 4G. Only indexes
            that fit are served, and the recall that this costs is logged. By default mapped
            indexes of any size are served.
        dest: Folder for pulled snapshots; by default a folder of the cache.
        from_store: Answer at once, from byte ranges of a remote store's files, until the snapshot
            is pulled. Until then indexes of the kinds bm25, impact and ivf are served.
        no_pull: With --from-store: pull nothing, and continue to answer from the store.
        cache_bytes: With --from-store: bytes of ranges that stay on the disk; by default the
            maximum of the cache, BOOKWHEEL_CACHE_BYTES.
        keep: Number of pulled snapshots to keep on the disk.
        no_embeddings: Do not pull the vectors; recall on live questions is then not measured.
        request_seconds: Maximum seconds from a complete request to its reply; a request that
            takes longer fails with 504. Raise it for a model that reasons before it answers.
        poll: Seconds between two checks of the ref.
        workers: Processes that answer, besides the one that starts them. All workers share the
            files of a snapshot, and change to the next one at the same time; one that dies is
            started again. Each has its own queue and connections.
        batches: Batches of questions that each process handles at once; 0: one per core, up to
            four.
        questions: Questions of the evaluation, from which the drift of live questions is
            measured.
        probes: With --model: questions that the model is asked without passages, to notice when
            its own answers change. A local model is asked after each swap, one behind an endpoint
            every hour. By default 32 of --questions. The first answers are recorded beside the
            pulled snapshots.
        override_every: With --model: check one answer in this many for an override, in which
            the model prefers its own memory to the passages. A check runs in the
            background. It costs nothing if a passage supports the answer, otherwise about as much
            as a short answer; behind an endpoint it is one more call, without passages. By
            default 20; 0: none.
    """
    arguments = dict(locals())
    # set before torch and faiss are imported, whose spinning threads would starve HTTP requests
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Let threads spin briefly between the layers of a model, because waking a thread takes longer.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for package_name, extra_name in (_REQUIRED_EXTRAS | ({"mcp": "mcp"} if mcp else {})).items():
        require(package_name, extra_name)
    if low_memory and in_memory:
        raise UsageError("--low-memory maps indexes, --in-memory loads them: give one of them, or none to map them")
    reading = reading or ReadingOptions()
    _check_model_options(model, reading, override_every, probes)
    _check_pull_options(folder, model, cache_bytes, from_store=from_store, no_pull=no_pull)
    if (tls_certificate is None) != (tls_key is None):
        raise UsageError("--tls-certificate and --tls-key belong together: give both, or none")
    source_name = ref if folder is None else str(folder)
    announce_address = partial(_announce_address, source_name, prints_json=common is not None and common.json)
    announce_service = partial(_announce_service, source_name)
    if link is None and workers != 1:
        _check_workers(workers, in_memory=in_memory, mcp=mcp)
        serve_in_worker = partial(_serve_in_worker, arguments)
        scheme = "http" if tls_certificate is None else "https"
        supervise(workers, serve_in_worker, (host, port, health_port), announce_address, announce_service, scheme)
        return
    from rag_model.serving import run as serving  # noqa: PLC0415 - torch reads the variables

    settings = serving.ServiceSettings(
        retrievers=choose_expressions(index, retriever),
        pull_embeddings=not no_embeddings,
        in_memory=in_memory,
        request_seconds=request_seconds,
        poll_seconds=poll,
        workers=batches,
        keep=keep,
        allowed_hosts=serving.resolve_allowed_hosts(host, allow_host),
        connections_per_client=connections_per_client,
        max_queries=max_queries,
        pinned_snapshots=pinned,
        from_store=from_store,
        pull=not no_pull,
        cache_bytes=cache_bytes,
        memory_bytes=None if memory is None else parse_bytes(memory),
        processes=workers,
    )
    if override_every is not None:
        settings = replace(settings, override_every=override_every)
    reader_settings = reading.build_reader_settings(model or "", store)
    source = _build_source(store, ref, dest, folder, model, asks, reader_settings)
    if mcp:
        _serve_mcp(source, settings, model)
        return
    certificate_files = serving.CertificateFiles(tls_certificate, tls_key) if tls_certificate and tls_key else None
    bind_settings = serving.BindSettings(host, port, health_port, tokens, certificate_files)
    evaluation_questions, probe_questions = _read_question_texts(questions), _read_question_texts(probes)
    if probes is None and model is not None:
        probe_questions = evaluation_questions
    serving.run(
        source, settings, bind_settings, announce_address, announce_service, evaluation_questions, probe_questions, link
    )


def _check_model_options(
    model: str | None, reading: ReadingOptions, override_every: int | None, probes: Path | None
) -> None:
    """Check that --override-every and --probes are given with a model that they apply to.

    Raises:
        UsageError: No model is given, or its reader cannot answer without passages.
    """
    if override_every is not None and model is None:
        raise UsageError("--override-every checks answers, and no model gives any: add --model, or leave it out")
    if probes is not None and (model is None or reading.reader == "extractive"):
        reason = "no model gives any: add --model" if model is None else "spans need passages: give another --reader"
        raise UsageError(f"--probes asks for answers without passages, and {reason}, or leave --probes out")


def _check_pull_options(
    folder: Path | None, model: str | None, cache_bytes: int | None, *, from_store: bool, no_pull: bool
) -> None:
    """Check that --from-store, and the options that need it, allow the other options.

    Raises:
        UsageError: --from-store is missing, or excludes another option.
    """
    if not from_store and (no_pull or cache_bytes is not None):
        raise UsageError(f"{'--no-pull' if no_pull else '--cache-bytes'} only applies with --from-store: add it")
    if from_store and (folder is not None or (no_pull and model is not None)):
        excluded_option = "--folder, which is pulled" if folder is not None else "--model, which reads pulled passages"
        raise UsageError(f"--from-store excludes {excluded_option}: leave one of them out")


def _check_workers(workers: int, *, in_memory: bool, mcp: bool) -> None:
    """Check the number of workers, and that the other options allow several workers.

    Raises:
        UsageError: The number is out of range, or an option allows one worker only.
    """
    if not 1 <= workers <= _MAX_WORKERS:
        raise UsageError(f"--workers is {workers}: give 1 to {_MAX_WORKERS}")
    if in_memory or mcp:
        reason = "loads the indexes into each process" if in_memory else "serves one agent in one process"
        raise UsageError(f"{'--in-memory' if in_memory else '--mcp'} {reason}: leave it or --workers out")


def _serve_in_worker(arguments: dict[str, Any], link: WorkerLink) -> None:
    """Serve with the arguments of the command, as one of several workers."""
    serve(**(arguments | {"link": link}))


def _announce_address(source_name: str, url: str, health_url: str | None, *, prints_json: bool) -> None:
    """Print the address when connections are accepted, while the snapshot is still loading."""
    if prints_json:
        print(json.dumps({"url": url, "health": health_url, "ref": source_name}), flush=True)
    health_suffix = f", its health at {health_url}" if health_url else ""
    print(f"listening at {url}{health_suffix}; loading {source_name} …", file=sys.stderr, flush=True)


def _announce_service(source_name: str, url: str, health_url: str | None) -> None:
    print(f"serving {source_name} at {url}", file=sys.stderr, flush=True)


def _build_source(
    store: str | None,
    ref: str,
    dest: Path | None,
    folder: Path | None,
    model: str | None,
    asks: str | None,
    reader_settings: "ReaderSettings",
) -> "FollowedRef | PulledFolder":
    """Return the source to serve: the pulled folder if it is given, else the ref of the store."""
    from rag_model.serving import run as serving  # noqa: PLC0415 - as in `serve`

    if folder is not None:
        if model is not None:
            raise UsageError("a pulled folder is served without a model: leave --model out, or give --store")
        return serving.PulledFolder(folder)
    if store is None:
        raise UsageError("nothing to serve: give --store, or --folder with a pulled snapshot")
    return serving.FollowedRef(store, ref, dest or serving.get_default_dest(store), model, asks, reader_settings)


def _read_question_texts(file: Path | None) -> list[str]:
    """Return the texts of the questions of a file; none if no file is given."""
    return [] if file is None else [question.text for question in read_questions(file).questions]


def _serve_mcp(source: "FollowedRef | PulledFolder", settings: "ServiceSettings", model: str | None) -> None:
    if model is not None:
        raise UsageError("--mcp serves passages to the agent's own model: leave --model out")
    from rag_model.serving import mcp_server  # noqa: PLC0415 - of the extra `mcp`

    mcp_server.run(source, settings)
