"""Parameters that verbs share, and the reply of every verb."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rag_model.errors import UsageError

StoreUrl = Annotated[
    str, Parameter(name="--store", help="The store of snapshots: a folder, s3://…, gs://…, az://…; to read, hf://….")
]
MaybeStoreUrl = Annotated[
    str | None,
    Parameter(
        name="--store", help="The store of snapshots: a folder, s3://…, gs://…, az://… or hf://…; none with --folder."
    ),
]
SnapshotName = Annotated[str, Parameter(help="A ref, ref@number, an id, or a unique prefix of one.")]
IndexName = Annotated[
    str | None, Parameter(help="An index of the snapshot, or `exact`: the short form of --retriever.")
]
RetrieverName = Annotated[
    str | None,
    Parameter(
        help="How to find passages: an index, rrf(A, B, k=60, weights=[1, 1]) of several, rerank(A, MODEL, 50); A:100 "
        "retrieves 100 from A. By default the snapshot's own."
    ),
]
AnyName = Annotated[  # for verbs that take snapshots and models
    str,
    Parameter(help="A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a model."),
]
AnyVersion = Annotated[  # for verbs that take evaluations too
    str,
    Parameter(
        help="A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a model; with "
        "`evaluation:`, an id of an evaluation."
    ),
]
Yes = Annotated[bool, Parameter(negative="", help="Do it; without this the verb only reports what it would delete.")]
EncoderName = Annotated[  # never `--encoder`: in settings that names the passage encoder of reindex
    str | None,
    Parameter(name="--question-encoder", help="Encode questions with this encoder instead of the snapshot's."),
]
AsksName = Annotated[
    str | None,
    Parameter(
        help="The passage encoder of a model that does not name it, such as facebook/rag-*: a folder or a hub name."
    ),
]


def keep_whole(kind: object, value: str, *, delimiter: str | None = None) -> list[str]:
    """Return an environment setting as one value, since expressions may contain spaces."""
    return [value]


def format_numbers(values: Mapping[str, Any]) -> str:
    """Format named numbers in one line.

    >>> format_numbers({"passages": 12000, "recall@20": 0.981})
    'passages 12,000, recall@20 0.981'
    """
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Common:
    """Options of every verb."""

    json: Annotated[bool, Parameter(negative="", help="Print one JSON document on standard output.")] = False
    debug: Annotated[bool, Parameter(negative="", help="Show the trace of a failure.")] = False
    trust: Annotated[
        Path | None, Parameter(help="Open only what a public key of this file has signed (`docs/howto/trust.md`).")
    ] = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A verb's reply as JSON and as text, with the reason if a gate or a verification failed."""

    document: Any
    text: str
    refusal: str = ""  # one sentence; empty if nothing failed


_AGE = re.compile(r"([0-9]{1,6})([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str) -> float:
    """Return an age in seconds.

    >>> parse_age("90d"), parse_age("30m"), parse_age("0")
    (7776000.0, 1800.0, 0.0)

    Raises:
        UsageError: the text is not a whole number with at most one unit.
    """
    match = _AGE.fullmatch(text)
    if not match:
        raise UsageError(f"{text!r} is not an age: write it as 90d, 24h, 30m, 45s or 0")
    return float(int(match[1]) * _SECONDS[match[2]])
