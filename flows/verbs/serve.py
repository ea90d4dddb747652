"""`bookwheel serve`: a snapshot over HTTP, replaced as soon as the ref moves."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reading import BudgetTokens, Cite, OrderName, PromptFile, concat_of
from flows.command.reply import AsksName, Common, SnapshotName, StoreUrl, whole
from rag_model.errors import UsageError
from rag_model.extras import require
from rag_model.reading.reader import ReaderName
from rag_model.retrieve.expression import all_of

_NEEDED = {"fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve", "torch": "model"}


def serve(
    *,
    store: StoreUrl,
    ref: SnapshotName = "latest",
    model: Annotated[
        str | None,
        Parameter(
            help="A RAG model for /answer: of the store (its ref is followed too), or a folder; with --reader concat "
            "also a folder of a generator alone, or openai:MODEL."
        ),
    ] = None,
    asks: AsksName = None,
    reader: Annotated[
        ReaderName | None,
        Parameter(help="With --model: how passages are read, `marginal` or `concat`, as in `answer`."),
    ] = None,
    order: OrderName = None,
    budget: BudgetTokens = None,
    prompt: PromptFile = None,
    cite: Cite = False,
    host: Annotated[str, Parameter(help="Address to listen at; 0.0.0.0: also reachable from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="0 takes a free one.")] = 8000,
    health_port: Annotated[
        int | None,
        Parameter(help="A port for /healthz, /readyz and /metrics alone, without TLS and tokens; 0 takes a free one."),
    ] = None,
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="A host name that the service is asked by, and whose pages may ask it; again for one more; * is any. "
            "localhost, 127.0.0.1 and [::1] stay allowed. By default these alone, and any name where --host is not of "
            "this machine alone. /healthz and /readyz are answered under any name.",
        ),
    ] = (),
    tokens: Annotated[
        Path | None,
        Parameter(
            help="A file of bearer tokens, one a line: only who has one is answered, but for /healthz and /readyz. "
            "Changes count within two seconds: once it is empty, no token is valid; a deleted or unreadable file "
            "changes nothing."
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        Parameter(help="PEM file of the certificate and its chain, for HTTPS. Changes count within two seconds."),
    ] = None,
    tls_key: Annotated[Path | None, Parameter(help="PEM file of its private key.")] = None,
    connections_per_client: Annotated[
        int, Parameter(help="Connections of one address at once, of 1,000 in all; more behind a load balancer.")
    ] = 256,
    retriever: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            env_var_split=whole,
            help="How to find passages: an index, rrf(A, B, k=60, weights=[1, 1]), rerank(A, MODEL, 50); again for one "
            "more. The first is the default. Requests may compose others of their indexes. By default the snapshot's.",
        ),
    ] = (),
    index: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="An index, or `exact`; again for one more: the short form of --retriever."),
    ] = (),
    low_memory: Annotated[
        bool, Parameter(negative="", help="Map indexes instead of loading them: slower where pages are cold.")
    ] = False,
    dest: Annotated[
        Path | None, Parameter(help="Where snapshots are pulled to; by default a folder of the cache.")
    ] = None,
    keep: Annotated[int, Parameter(help="Pulled snapshots that stay on the disk.")] = 2,
    no_embeddings: Annotated[
        bool, Parameter(negative="", help="Do not pull the vectors; recall on live questions is then not measured.")
    ] = False,
    poll: Annotated[float, Parameter(help="Seconds between two looks at the ref.")] = 10.0,
    batches: Annotated[int, Parameter(help="Batches of questions processed at once; 0: one a core, up to four.")] = 0,
    questions: Annotated[
        Path | None, Parameter(help="Questions of the evaluation; the drift of live ones from them is measured.")
    ] = None,
    common: Common | None = None,
) -> None:
    """Serve passages, and with a model answers, from what a ref names; follow the ref without a pause.

    Says its address on standard error; with --json as one line on standard output.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch and faiss: threads that spin starve HTTP
    for package, extra in _NEEDED.items():
        require(package, extra)
    running: Any = import_module("rag_model.serving.run")
    settings = running.ServiceSettings(
        retrievers=all_of(index, retriever),
        embeddings=not no_embeddings,
        swap="low-memory" if low_memory else "blue-green",
        poll_seconds=poll,
        workers=batches,
        keep=keep,
        hosts=running.hosts_of(host, allow_host),
        connections_per_client=connections_per_client,
    )
    if (tls_certificate is None) != (tls_key is None):
        raise UsageError("--tls-certificate and --tls-key belong together: give both, or none")
    files = running.CertificateFiles(tls_certificate, tls_key) if tls_certificate is not None else None
    doors = running.Doors(host, port, health_port, tokens, files)
    concat = concat_of([reader], model or "", order, budget, prompt, cite)
    reading = running.ReaderSettings(reader, concat=concat)
    followed = running.Followed(store, ref, dest or running.default_dest(store), model, asks, reading)
    asked = [question.text for question in running.read_questions(questions).questions] if questions else ()

    def listening(at: Any) -> None:
        if common is not None and common.json:
            print(json.dumps({"url": at.url, "health": at.health, "ref": ref}), flush=True)
        health = f", its health at {at.health}" if at.health else ""
        print(f"serving {ref} at {at.url}{health}", file=sys.stderr, flush=True)

    running.run(followed, settings, doors, asked, listening)
