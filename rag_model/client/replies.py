"""The service's replies as records. Keys that a newer service adds are left out."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rag_model.retrieve.shown import ShownHit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """One question and its passages, best first."""

    question: str
    hits: tuple[ShownHit, ...]


@dataclass(frozen=True, slots=True)
class SearchReply:
    """Passages for questions, in the order of the questions."""

    snapshot: str  # of every hit here
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadHit(ShownHit):
    """A passage that an answer was read from."""

    weight: float | None = None  # p(z|x); None: the model reads all passages at once
    posterior: float | None = None  # p(z|x,y)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One numbered entry of the context that a model read: a passage, or several joined."""

    number: int  # as the answer cites it: [number]
    title: str
    section: str
    url: str
    places: tuple[int, ...]  # in the answer's `passages`
    text: str  # as the model read it
    revision: int = 0  # of the article; 0 where the source has none
    revised: str | None = None  # when it was saved, ISO 8601 in UTC; None: unknown


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and its answer."""

    question: str
    answer: str  # may be empty
    ended: bool  # False: cut at the longest length
    log_likelihood: float | None  # log p(y|x) in nats; None: not finite, or not known
    passages: tuple[ReadHit, ...]
    context: tuple[Excerpt, ...] = ()  # where the model reads all passages at once
    citations: tuple[int, ...] = ()  # the numbers of the context that the answer cites


@dataclass(frozen=True, slots=True)
class AnswerReply:
    """Answers to questions, in the order of the questions."""

    snapshot: str  # of every passage here
    model: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A version that the ref names and that the service refused."""

    number: int
    snapshot: str
    reason: str  # one sentence
    at: str  # ISO 8601, UTC
    tries: int
    final: bool  # it is not tried again before the ref moves


@dataclass(frozen=True, slots=True)
class SnapshotReply:
    """What is served, and what was refused."""

    snapshot: str
    ref: str
    number: int | None  # of the ref's move; None where no ref is followed
    created_at: str | None  # when the ref was moved
    passages: int
    indexes: tuple[str, ...]
    retrievers: tuple[str, ...]  # that the service was started with; the first is the default
    model: str | None
    refused: Refused | None
    store_problem: str | None  # why the store could not be asked last time


def read_reply(kind: type[T], value: Any) -> T:
    """Return a parsed JSON value as a record; every type is checked.

    >>> read_reply(Result, {"question": "Who?", "hits": [], "new": 1})
    Result(question='Who?', hits=())

    Raises:
        ValueError: a key is missing or of another type; the message says where.
    """
    found: T = _record(kind, value, "")
    return found


def _record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where or 'the whole'} is not an object")  # noqa: TRY004 - of the JSON, not of an argument
    given = {}
    for name, hint, needed in _fields(kind):
        place = f"{where}.{name}" if where else name
        if name in value:
            given[name] = _read(hint, value[name], place)
        elif needed:
            raise ValueError(f"{place} is missing")
    return kind(**given)


def _read(hint: Any, value: Any, where: str) -> Any:
    kinds = get_args(hint)
    if isinstance(hint, UnionType):  # X | None
        return None if value is None else _read(kinds[0], value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is not a list")
        return tuple(_read(kinds[0], one, f"{where}[{place}]") for place, one in enumerate(value))
    if is_dataclass(hint):
        return _record(hint, value, where)
    if hint is float and type(value) is int and math.isfinite(value):
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is not of type {hint.__name__}")
    return value


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return each field's name and type, and whether it has no default."""
    hints = get_type_hints(kind)
    return tuple((one.name, hints[one.name], one.default is MISSING) for one in fields(kind))
