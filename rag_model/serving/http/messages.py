"""The JSON of HTTP requests and replies.

`rag_model.client.replies` defines the replies. Here, pydantic models are derived from these
replies, for OpenAPI and for checks in tests. The replies themselves are written by `Hit.to_json`
and `answer_json`.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import parse_qs

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from rag_model.client import replies
from rag_model.errors import UsageError
from rag_model.extras import require
from rag_model.reading.answer import answer_json
from rag_model.retrieve.expression import add_condition, choose_expression
from rag_model.retrieve.hits import Hit, LegHit
from rag_model.retrieve.retriever import check_queries
from rag_model.serving.answering.execution import AnswerResult, SearchResult
from rag_model.serving.http.guard import MSGPACK_TYPES
from rag_model.serving.settings import ServiceSettings

_MAX_WHOLE_FLOAT = 2.0**53  # above this, floats do not represent every integer
_MAX_FIELD_NAME = 80  # characters of a field name in error messages
_NOT_AN_INTEGER = "is not a whole number: write it without quotes, such as 5"
_ADVICE_BY_TYPE = {  # error text for each error type of pydantic
    "missing": "is missing: give it, as /openapi.json says",
    "extra_forbidden": "is not a field of this request: correct its name, or leave it out; /openapi.json lists them",
    "too_short": "is empty: give at least one",
    "list_type": 'is not a list: give one of strings, such as ["Who wrote Faust?"]',
    "string_type": "is not a string: write it in quotes",
    "int_type": _NOT_AN_INTEGER,
    "int_from_float": _NOT_AN_INTEGER,
    "int_parsing_size": "is too large a number: give a smaller one",
    "model_type": 'is not an object: send one such as {"questions": ["Who wrote Faust?"]}',
    "model_attributes_type": 'is not an object: send one such as {"questions": ["Who wrote Faust?"]}',
}
_HIT_DESCRIPTIONS = {
    "rank": "Position in the list, from 1.",
    "score": "Larger is better; comparable only within one snapshot and retriever.",
    "url": "Address of the article's revision.",
    "revised": "Time of the revision, ISO 8601 in UTC; null: unknown.",
    "licence": "The line of credit to show with the text.",
    "kind": "What the passage is part of: prose, table, infobox or list.",
    "language": "The language of the page, if the snapshot has it.",
    "wikidata": "The Wikidata item of the page, if the snapshot has it.",
    "categories": "The categories of the page, if the snapshot has them.",
    "legs": "The child retrievers that returned it, if the retriever has several.",
}
_DESCRIPTIONS: dict[type, dict[str, str]] = {
    Hit: _HIT_DESCRIPTIONS,
    replies.ReadHit: _HIT_DESCRIPTIONS,
    LegHit: {"rank": "Position in its list, from 1.", "score": "The child retriever's score."},
}
_SCHEMA_NAME_BY_RECORD: dict[type, str] = {  # schemas with another name than the record
    replies.QueryResult: "Result",
    replies.ReadHit: "ReadPassage",
    replies.AnswerToken: "Token",
    replies.AnswerUsage: "Usage",
    replies.AnswerExcerpt: "Excerpt",
    replies.AnswerStatement: "Statement",
    replies.AnswerConfidence: "Confidence",
    replies.AnswerRoute: "Route",
    replies.AnsweredQuestion: "Answer",
    replies.RefusedVersion: "Refused",
}


def _parse_whole_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE_FLOAT:
        return int(value)
    return value


WholeNumber = Annotated[int, BeforeValidator(_parse_whole_number)]
"""An integer as JSON Schema defines it, which includes 2.0."""


class MalformedError(UsageError):
    """The body is JSON, but does not match the endpoint's schema."""


class Request(BaseModel):
    """The common fields of requests; unknown keys are refused, to catch misspellings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    questions: list[str] = Field(min_length=1, examples=[["Who wrote Animal Farm?"]])
    retriever: str | None = Field(
        None,
        description="Retriever expression: one of the service's retrievers, or another one of its indexes, such as "
        "rrf(hnsw, ivfpq); by default the first retriever.",
    )


class SearchRequest(Request):
    """A request to /search."""

    k: WholeNumber | None = Field(
        None, description="Passages per question; by default 5, or all of a smaller snapshot."
    )
    index: str | None = Field(None, description="One of the service's indexes: the short form of `retriever`.")
    where: str | None = Field(
        None,
        description="Condition on the passages: their kind, such as kind=table or kind=table,infobox; the "
        "language=, wikidata= or category= of their page; or the beginning of its title=. Without `retriever`, "
        "the snapshot's default retriever is used.",
    )

    @property
    def expression(self) -> str | None:
        """The canonical retriever expression; None means the service's default."""
        return add_condition(choose_expression(self.index, self.retriever), self.where)


class AnswerRequest(Request):
    """A request to /answer."""

    k: WholeNumber | None = Field(None, description="Passages per question; by default as in training.")
    stream: bool | None = Field(
        None,
        description="Reply with server-sent events as the answer is decoded; by default if Accept names "
        "text/event-stream.",
    )

    @property
    def expression(self) -> str | None:
        """The canonical retriever expression; None means the service's default."""
        return choose_expression(None, self.retriever)


class RetrieveRequest(BaseModel):
    """A request to /retrieve, as trainings of search agents send it: `queries` or one `query`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    queries: list[str] | None = Field(None, min_length=1, examples=[["Who wrote Animal Farm?"]])
    query: str | None = Field(None, description="A single query; `result` is then one list.")
    topk: WholeNumber | None = Field(None, description="Passages per query; by default 5.")
    return_scores: bool = Field(False, description="Whether each document is sent with its score.")

    @property
    def questions(self) -> Sequence[str]:
        """The queries."""
        return self.queries or [self.query or ""]


class Document(BaseModel):
    """A passage, with the field names of Search-R1."""

    id: str
    contents: str = Field(description="The title, a line break, and the text.")


class ScoredDocument(BaseModel):
    """A document with its score."""

    document: Document
    score: float


class RetrieveReply(BaseModel):
    """The documents of each query, best first."""

    snapshot: str = Field(description="The id of the snapshot that was searched.")
    result: list[list[ScoredDocument]] | list[list[Document]] | list[ScoredDocument] | list[Document]


@dataclass(frozen=True, slots=True)
class RetrieveOptions:
    """The options of a request to /retrieve, which clients can only give in its URL."""

    snapshot: str | None  # an id, or ref@number; None means the current one
    expression: str | None  # canonical retriever expression; None means the service's default


@functools.cache
def create_model(record_type: type) -> type[BaseModel]:
    """Create the pydantic model that describes and checks the JSON of a record."""
    model_fields: dict[str, Any] = {}
    for field in replies.list_json_fields(record_type):
        json_hint = _to_json_hint(field.hint)
        description = field.description or _DESCRIPTIONS.get(record_type, {}).get(field.name)
        if field.is_omittable:
            model_fields[field.name] = (
                json_hint | None,
                Field(None, description=description, exclude_if=lambda value: value is None),
            )
        else:
            model_fields[field.name] = (json_hint, Field(description=description))
    name = _SCHEMA_NAME_BY_RECORD.get(record_type, record_type.__name__)
    docstring_summary = (record_type.__doc__ or "").partition("\n")[0]
    return pydantic.create_model(name, __doc__=docstring_summary, **model_fields)


def _to_json_hint(hint: Any) -> Any:
    """Replace records by their models, and tuples by lists."""
    if isinstance(hint, UnionType):
        return functools.reduce(operator.or_, map(_to_json_hint, get_args(hint)))
    if get_origin(hint) is tuple:
        return list[_to_json_hint(get_args(hint)[0])]  # type: ignore[misc]
    return create_model(hint) if isinstance(hint, type) and is_dataclass(hint) else hint


def read_request(request_type: type[SearchRequest | AnswerRequest], body: bytes, settings: ServiceSettings) -> Any:
    """Parse a request and check it against the service's limits.

    Raises:
        UsageError: The body is not JSON, or the request exceeds a limit.
        MalformedError: The body has wrong keys or types.
    """
    try:
        request = request_type.model_validate_json(body)
    except ValidationError as error:
        raise _create_request_error(error) from None
    check_request(request, settings)
    return request


def _create_request_error(error: ValidationError) -> UsageError:
    first_error = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first_error["type"] == "json_invalid":
        return UsageError(
            f"the body is not JSON ({first_error['msg'].partition(': ')[2]}): send an object, as /openapi.json says"
        )
    field_path = ".".join(map(str, first_error["loc"]))[:_MAX_FIELD_NAME] or "the body"
    advice = _ADVICE_BY_TYPE.get(
        first_error["type"],
        f"cannot be read ({first_error['msg']}): /openapi.json says what the service takes",
    )
    return MalformedError(f"{' '.join(field_path.split())} {advice}")


def check_request(request: SearchRequest | AnswerRequest, settings: ServiceSettings) -> None:
    """Check a request against the service's limits.

    Raises:
        UsageError: The request exceeds a limit, or a question is empty.
    """
    if len(request.questions) > settings.max_questions:
        raise UsageError(f"{len(request.questions)} questions are too many: ask up to {settings.max_questions} at once")
    if long_question := next((text for text in request.questions if len(text) > settings.max_question_chars), ""):
        raise UsageError(f"a question has {len(long_question)} characters: ask in up to {settings.max_question_chars}")
    check_queries(request.questions)
    _check_depth("k", request.k, settings)


def _check_depth(name: str, k: int | None, settings: ServiceSettings) -> None:
    if k is not None and k < 1:
        raise UsageError(f"{name} is {k}: ask for at least 1 passage")
    if k is not None and k > settings.max_k:
        raise UsageError(f"{name} is {k}: ask for at most {settings.max_k} passages")


def is_msgpack(content_type: str | None) -> bool:
    """Return whether a content type means MessagePack; GEM's client sends it without a type."""
    return (content_type or "").partition(";")[0].strip().lower() in MSGPACK_TYPES


def read_retrieve_request(body: bytes, settings: ServiceSettings, *, as_msgpack: bool) -> RetrieveRequest:
    """Parse a request to /retrieve, in JSON or MessagePack, and check it against the limits.

    Raises:
        UsageError: The body is neither JSON nor MessagePack, or the request exceeds a limit.
        MalformedError: The body has wrong keys or types.
    """
    try:
        if as_msgpack:
            request = RetrieveRequest.model_validate(_decode_msgpack(body))
        else:
            request = RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        raise _create_request_error(error) from None
    if (request.queries is None) == (request.query is None):
        raise MalformedError('give either queries, such as ["Who wrote Faust?"], or one query')
    if len(request.questions) > settings.max_queries:
        raise UsageError(
            f"{len(request.questions)} queries are too many: send up to {settings.max_queries} at "
            "once, or start the service with a larger --max-queries"
        )
    _check_depth("topk", request.topk, settings)
    if len(request.questions) * (request.topk or 1) > settings.max_retrieved:
        raise UsageError(
            f"{len(request.questions)} queries for {request.topk} passages each are too many: the "
            f"product may be up to {settings.max_retrieved}"
        )
    return request


def _decode_msgpack(body: bytes) -> Any:
    msgspec = require("msgspec", "serve")
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"the body is not MessagePack ({error}): send JSON, declared as application/json") from None


def read_retrieve_options(query_string: bytes) -> RetrieveOptions:
    """Parse the options in the URL of a request to /retrieve.

    Raises:
        UsageError: An option is unknown or repeated, or the retriever is not an expression.
    """
    options = parse_qs(query_string.decode("latin-1"), keep_blank_values=True)
    for name, option_values in options.items():
        if name not in ("snapshot", "retriever") or len(option_values) > 1:
            raise UsageError(
                f"the URL's option {name[:_MAX_FIELD_NAME]!r} is unknown or repeated: /retrieve "
                "takes snapshot and retriever"
            )
    (snapshot,), (retriever,) = options.get("snapshot", [None]), options.get("retriever", [None])
    return RetrieveOptions(snapshot, choose_expression(None, retriever))


def format_retrieve_reply(
    request: RetrieveRequest, snapshot: str, hits: Sequence[Sequence[Hit]], *, as_msgpack: bool
) -> bytes:
    """Write a reply of /retrieve, in JSON or MessagePack."""
    result: list[Any] = []
    for query_hits in hits:
        documents: list[dict[str, Any]] = [
            {"id": hit.passage.id, "contents": f"{' '.join(hit.passage.title.split())}\n{hit.passage.text}"}
            for hit in query_hits
        ]
        if request.return_scores:
            scores = [hit.score for hit in query_hits]
            documents = [
                {"document": document, "score": score} for document, score in zip(documents, scores, strict=True)
            ]
        result.append(documents)
    reply = {"snapshot": snapshot, "result": result if request.query is None else result[0]}
    return _encode_msgpack(reply) if as_msgpack else to_json(reply)


def _encode_msgpack(reply: Any) -> bytes:
    encoded_reply: bytes = require("msgspec", "serve").msgpack.encode(reply)
    return encoded_reply


def format_search_reply(questions: Sequence[str], result: SearchResult) -> bytes:
    """Write a reply of /search."""
    results = [
        {"question": question, "hits": [hit.to_json() for hit in hits]}
        for question, hits in zip(questions, result.hits, strict=True)
    ]
    return to_json({"snapshot": result.snapshot, "results": results})


def format_answer_reply(result: AnswerResult) -> bytes:
    """Write a reply of /answer."""
    answers = [answer_json(answer) for answer in result.answers]
    return to_json({"snapshot": result.snapshot, "model": result.model, "answers": answers})
