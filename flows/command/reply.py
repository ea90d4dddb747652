"""Parameters that several subcommands share, and the reply that each subcommand returns."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rag_model.errors import RefusedError, UsageError

StoreUrl = Annotated[
    str,
    Parameter(
        name="--store", help="The store of snapshots: a folder, s3://…, gs://… or az://…; read-only also hf://…."
    ),
]
MaybeStoreUrl = Annotated[
    str | None,
    Parameter(
        name="--store", help="The store of snapshots: a folder, s3://…, gs://…, az://… or hf://…; not with --folder."
    ),
]
SnapshotName = Annotated[str, Parameter(help="A ref, ref@number, an id, or a unique prefix of one.")]
IndexName = Annotated[str | None, Parameter(help="An index of the snapshot, or `exact`; a short form of --retriever.")]
RetrieverName = Annotated[
    str | None,
    Parameter(
        help="Retriever expression: an index, rrf(A, B, k=60, weights=[1, 1]), rerank(A, MODEL, 50) or "
        "where(A, kind=table); A:100 retrieves 100 passages with A. By default the snapshot's default retriever."
    ),
]
AnyName = Annotated[  # for subcommands that take snapshots and models
    str,
    Parameter(help="A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a model."),
]
AnyVersion = Annotated[  # for subcommands that take evaluations too
    str,
    Parameter(
        help="A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a model; with "
        "`evaluation:`, an id of an evaluation."
    ),
]
Yes = Annotated[bool, Parameter(help="Delete; without this option, the command only reports what it would delete.")]
EncoderName = Annotated[  # not `--encoder`, which sets the passage encoder of `reindex`
    str | None,
    Parameter(name="--question-encoder", help="Encode questions with this encoder instead of the snapshot's."),
]
AsksName = Annotated[
    str | None,
    Parameter(
        help="The passage encoder of a model that does not name it, such as facebook/rag-*: a folder or a hub name."
    ),
]
# What each metric of an index means. A depth in a metric's name, as in `recall@20`, is left out.
_METRIC_MEANINGS = {
    "recall": "share of the first {k} passages of an exact search that the index finds, mean over sampled queries",
    "recall_p5": "the same for the worst 5 % of these queries (5th percentile)",
    "source": "share of sampled sentences whose own passage is among the first {k}",
    "distances": "mean number of computed distances per query",
    "terms": "number of different terms",
    "postings": "number of pairs of a term and a passage that contains it",
    "degree": "mean number of links per node",
    "unlinked": "number of nodes to which no other node links",
    "unreachable": "number of nodes that no search reaches",
    "repaired": "number of nodes that no search reached before the merge linked them",
    "built_cells": "number of cells whose graph was built again instead of updated",
    "updated_cells": "number of cells whose graph was updated from the parent's",
    "reused_cells": "number of cells that reuse the parent's graph",
    "generation": "largest number of updates of a cell's graph since it was built",
    "replaced": "largest share of a cell that was replaced since its graph was built",
    "imbalance": "imbalance of the lists; 1 if all are equally long",
    "largest_list": "number of vectors in the longest list",
    "quantization_error": "relative error of the codes, |x - x̂|² / |x|²",
    "loss": "mean squared error of the decoded token vectors",
}
_NAME_WITH_DEPTH = re.compile(r"(?P<name>\w+?)@(?P<k>\d+)(?P<suffix>_p5)?")
_AGE_TEXT = re.compile(r"([0-9]{1,6})([smhdw]?)")
_SECONDS_BY_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def keep_as_one_value(kind: object, value: str, *, delimiter: str | None = None) -> list[str]:
    """Return the value unsplit, since a retriever expression in a variable may contain spaces."""
    return [value]


def format_numbers(values: Mapping[str, Any]) -> str:
    """Format named numbers in one line.

    >>> format_numbers({"passages": 12000, "recall@20": 0.981})
    'passages 12,000, recall@20 0.981'
    """
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


def format_value(value: Any) -> str:
    """Format a JSON value.

    >>> format_value({"search": {"k1": 0.9}, "sizes": [1, 2], "exact": True, "language": ""})
    '(search=(k1=0.9), sizes=[1, 2], exact=true)'
    """
    if isinstance(value, Mapping):
        return f"({format_settings(value)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_settings(values: Mapping[str, Any]) -> str:
    """Format settings in one line; leave out settings without a value.

    >>> format_settings({"factory": "HNSW32", "cells": None, "search": {"efSearch": 128}})
    'factory=HNSW32, search=(efSearch=128)'
    """
    return ", ".join(f"{name}={format_value(value)}" for name, value in values.items() if value not in ("", None, {}))


def format_index_metrics(metrics: Mapping[str, Mapping[str, Any]], label: str = "index") -> list[str]:
    """Return a line with metrics for each index, then a line that explains each metric.

    >>> print(*format_index_metrics({"bm25": {"source@20": 0.96, "terms": 12000}}), sep=chr(10))
    index     bm25: source@20 0.96, terms 12,000
    meaning   source@20: share of sampled sentences whose own passage is among the first 20
    meaning   terms: number of different terms
    """
    meaning_by_metric = {name: _describe_metric(name) for values in metrics.values() for name in values}
    return [
        *(f"{label:<9} {name}: {format_numbers(values)}" for name, values in metrics.items()),
        *(f"meaning   {name}: {meaning}" for name, meaning in meaning_by_metric.items() if meaning),
    ]


def _describe_metric(name: str) -> str:
    """Explain a metric of an index; return "" for a metric that an installed package defines."""
    match = _NAME_WITH_DEPTH.fullmatch(name)
    if match is None:
        return _METRIC_MEANINGS.get(name, "")
    return _METRIC_MEANINGS.get(match["name"] + (match["suffix"] or ""), "").format(k=match["k"])


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Common:
    """Options common to all subcommands.

    Attributes:
        json: Print one JSON document on standard output.
        debug: Show the trace of a failure.
        trust: Open only snapshots, models and evaluations that a key in this file has signed
            (`docs/howto/trust.md`).
    """

    json: bool = False
    debug: bool = False
    trust: Path | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a subcommand as JSON and text."""

    document: Any  # JSON values
    text: str
    refusal: str = ""  # why the subcommand failed, in one sentence; empty if it succeeded
    refusal_code: int = RefusedError.exit_code


def parse_age(text: str) -> float:
    """Return an age in seconds.

    >>> parse_age("90d"), parse_age("30m"), parse_age("0")
    (7776000.0, 1800.0, 0.0)

    Raises:
        UsageError: the text is not a whole number with at most one unit.
    """
    match = _AGE_TEXT.fullmatch(text)
    if not match:
        raise UsageError(f"{text!r} is not a length of time: write it as 90d, 24h, 30m, 45s or 0")
    return float(int(match[1]) * _SECONDS_BY_UNIT[match[2]])
