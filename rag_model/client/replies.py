"""The replies of the service as dataclasses, which define the JSON of the replies.

The client parses replies into these records, and `rag_model.serving.http.messages` derives the
OpenAPI schema from them. Unknown keys, for example from a newer service, are ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from rag_model.retrieve.hits import (
    HIT_JSON_FIELDS,
    OMITTED_HIT_JSON_FIELDS,
    OPTIONAL_HIT_JSON_FIELDS,
    Hit,
)

_Record = TypeVar("_Record")
_ONE_PROMPT = "Only if the model reads all passages in one prompt."
_OMITTABLE = "omittable"  # marks a field that some replies omit


@dataclass(frozen=True, slots=True)
class QueryResult:
    """One question and its passages, best first."""

    question: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class SearchReply:
    """The reply of /search, in the order of the questions."""

    snapshot: Annotated[str, "The snapshot of all hits."]
    results: tuple[QueryResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadHit(Hit):
    """A passage that the model read."""

    weight: Annotated[float | None, "p(z|x); null if passages are not marginalised."] = None
    posterior: Annotated[float | None, "p(z|x,y); null if the weight is null."] = None


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of a RAG-Token answer, with each passage's share of its probability."""

    text: str
    posterior: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """The cost of an answer."""

    prompt_tokens: Annotated[int, "Number of tokens read, in all contexts if passages are marginalised."]
    new_tokens: Annotated[int, "Number of tokens written."]
    cost: Annotated[float | None, "Cost in the currency of the given prices; null: no prices are known."]
    estimated: Annotated[bool, "Whether the service counted the tokens, as the endpoint did not."]


@dataclass(frozen=True, slots=True)
class AnswerExcerpt:
    """One numbered source in the model's prompt: a passage, or several adjacent ones."""

    number: Annotated[int, "The answer cites it as [number], from 1."]
    title: str
    section: str
    url: Annotated[str, "Address of the article's revision."]
    places: Annotated[tuple[int, ...], "Positions of its passages in `passages`, from 0."]
    text: Annotated[str, "The text, as the model read it."]
    revision: Annotated[int, "Id of the article's revision; 0 if the source has none."] = 0
    revised: Annotated[str | None, "Time of the revision, ISO 8601 in UTC; null: unknown."] = None
    cut: Annotated[bool, "Whether the end of the text was cut off, to fit into the prompt."] = False


@dataclass(frozen=True, slots=True)
class AnswerStatement:
    """One sentence of an answer."""

    text: str
    cited: Annotated[tuple[int, ...], "Numbers of the excerpts that the sentence cites."]
    unknown: Annotated[tuple[int, ...], "Cited numbers that no excerpt has."]


@dataclass(frozen=True, slots=True)
class AnswerConfidence:
    """The confidence of an answer."""

    signal: Annotated[str, "The kind of score: likelihood, retrieval or passages."]
    score: Annotated[float | None, "A larger score is more confident; null: minus infinity."]
    least: Annotated[float, "The threshold; below it no answer is given."]


@dataclass(frozen=True, slots=True)
class AnswerRoute:
    """The score by which the reader `auto` chose between the model's weights and the passages."""

    signal: Annotated[str, "The kind of score: weights or difference."]
    score: Annotated[float | None, "Score in nats per token; null: an answer is empty, or its probability is 0."]
    least: Annotated[float | None, "The weights answer if the score is at least this; null: never."]


@dataclass(frozen=True, slots=True)
class ReportedProblem:
    """The reason why a model gave no answer, or a doubtful one."""

    kind: Annotated[str, "One of reasoning, refused, filtered, tool_call, empty, prompt_truncated."]
    message: Annotated[str, "The problem, in one sentence."]


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """One question and its answer."""

    question: str
    answer: Annotated[str, "The answer; it may be empty."]
    ended: Annotated[bool, "Whether the answer is complete; false: cut at the maximum length."]
    log_likelihood: Annotated[float | None, "log p(y|x) in nats; null: not finite or unknown."]
    passages: tuple[ReadHit, ...]
    context: Annotated[tuple[AnswerExcerpt, ...], "The excerpts in the prompt. " + _ONE_PROMPT, _OMITTABLE] = ()
    citations: Annotated[
        tuple[int, ...], "Numbers of the excerpts that the answer cites. " + _ONE_PROMPT, _OMITTABLE
    ] = ()
    tokens: Annotated[tuple[AnswerToken, ...], "The answer's tokens, of a RAG-Token model."] = ()
    statements: Annotated[tuple[AnswerStatement, ...], "The sentences of the answer. " + _ONE_PROMPT, _OMITTABLE] = ()
    usage: Annotated[AnswerUsage | None, "The cost of the answer, if tokens were counted.", _OMITTABLE] = None
    confidence: Annotated[AnswerConfidence | None, "Only if the service has a threshold.", _OMITTABLE] = None
    abstained: Annotated[bool | None, "Whether the confidence is below the service's threshold.", _OMITTABLE] = None
    problem: Annotated[ReportedProblem | None, "Why the answer is empty or doubtful.", _OMITTABLE] = None
    memory: Annotated[str | None, "The answer is from `weights` or `passages`; null: no answer.", _OMITTABLE] = None
    route: Annotated[AnswerRoute | None, "Only if the reader chooses a memory.", _OMITTABLE] = None
    closed_book_log_likelihood: Annotated[
        float | None, "Log-likelihood of the same answer without passages, in nats.", _OMITTABLE
    ] = None


@dataclass(frozen=True, slots=True)
class AnswerReply:
    """The reply of /answer, in the order of the questions."""

    snapshot: Annotated[str, "The snapshot of all passages."]
    model: str
    answers: tuple[AnsweredQuestion, ...]


@dataclass(frozen=True, slots=True)
class RefusedVersion:
    """A version that the ref names and that the service refused."""

    number: int
    snapshot: str
    reason: Annotated[str, "Why it was refused, in one sentence."]
    at: Annotated[str, "Time of the refusal, ISO 8601 in UTC."]
    tries: int
    final: Annotated[bool, "Whether the service tries it again only after the ref has moved."]


@dataclass(frozen=True, slots=True)
class SnapshotReply:
    """The reply of /snapshot."""

    snapshot: str
    ref: str
    number: Annotated[int | None, "Number of the ref's move; null if no ref is followed."]
    created_at: Annotated[str | None, "Time of the ref's move."]
    passages: int
    indexes: Annotated[tuple[str, ...], "Indexes of which requests may compose retrievers."]
    retrievers: Annotated[tuple[str, ...], "Configured retrievers; the first is the default."]
    model: str | None
    refused: RefusedVersion | None
    store_problem: Annotated[str | None, "Why the store's last poll failed; null: it succeeded."]
    explanations: Annotated[tuple[str, ...], "A description of each retriever, in one line."] = ()
    kinds: Annotated[tuple[str, ...], "Kinds of passages, for `where`; empty: only prose."] = ()
    notes: Annotated[tuple[str, ...], "Indexes that do not fit into the service's memory, with the recall lost."] = ()


class JsonField(NamedTuple):
    """One field in the JSON of a record."""

    name: str
    hint: Any  # type annotation of the field in the record
    is_required: bool  # whether the client refuses a reply without the field
    is_omittable: bool  # whether some replies omit the field
    description: str | None = None


def parse_reply(record_type: type[_Record], value: Any) -> _Record:
    """Convert a JSON value to a record, and check all types.

    >>> parse_reply(QueryResult, {"question": "Who?", "hits": [], "new": 1})
    QueryResult(question='Who?', hits=())

    Raises:
        ValueError: A key is missing or has a wrong type; the message contains its path.
    """
    record: _Record = _parse_record(record_type, value, "")
    return record


def _parse_record(record_type: Any, json_object: Any, path: str) -> Any:
    if not isinstance(json_object, Mapping):
        raise ValueError(f"{path or 'the reply'} is not an object")  # noqa: TRY004 - a value
    json_values = {}
    for name, hint, is_required, *_ in list_json_fields(record_type):
        field_path = f"{path}.{name}" if path else name
        if name in json_object:
            json_values[name] = _parse_value(hint, json_object[name], field_path)
        elif is_required:
            raise ValueError(f"{field_path} is missing")
    return record_type.from_fields(json_values) if issubclass(record_type, Hit) else record_type(**json_values)


def _parse_value(hint: Any, value: Any, path: str) -> Any:
    type_arguments = get_args(hint)
    if isinstance(hint, UnionType):  # X | None
        return None if value is None else _parse_value(type_arguments[0], value, path)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path} is not a list")
        return tuple(_parse_value(type_arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint):
        return _parse_record(hint, value, path)
    if hint is float and type(value) is int and math.isfinite(value):
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{path} is not of type {hint.__name__}")
    return value


@cache
def list_json_fields(record_type: type) -> tuple[JsonField, ...]:
    """Return the fields of a record's JSON."""
    hints, own_fields = get_type_hints(record_type, include_extras=True), list(fields(record_type))
    json_fields: list[JsonField] = []
    if issubclass(record_type, Hit):
        own_fields = own_fields[len(fields(Hit)) :]
        for name, hint in HIT_JSON_FIELDS.items():
            is_required = name not in OPTIONAL_HIT_JSON_FIELDS
            is_omittable = name in OMITTED_HIT_JSON_FIELDS
            json_fields.append(JsonField(name, hint, is_required, is_omittable))
    for own_field in own_fields:
        hint, description, *markers = _split_annotation(hints[own_field.name])
        is_required, is_omittable = own_field.default is MISSING, _OMITTABLE in markers
        json_fields.append(JsonField(own_field.name, hint, is_required, is_omittable, description))
    return tuple(json_fields)


def _split_annotation(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Annotated else (hint, None)
