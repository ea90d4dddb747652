"""The JSON of HTTP requests and replies.

`rag_model.client.replies` defines the replies. Here, pydantic models are derived from it, for
OpenAPI and for checks in tests. The replies themselves are written by `Hit.to_json` and
`answer_json`.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from rag_model.client import replies
from rag_model.errors import UsageError
from rag_model.reading.answer import answer_json
from rag_model.retrieve.expression import choose_expression
from rag_model.retrieve.hits import Hit, LegHit
from rag_model.retrieve.retriever import check_queries
from rag_model.serving.answering.execution import AnswerResult, SearchResult
from rag_model.serving.settings import ServiceSettings

_MAX_WHOLE_FLOAT = 2.0**53  # larger floats are not exact


def _parse_whole_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE_FLOAT:
        return int(value)
    return value


WholeNumber = Annotated[int, BeforeValidator(_parse_whole_number)]
"""An integer as JSON Schema defines it, which includes 2.0."""

_MAX_FIELD_NAME = 80  # characters of a field name in error messages
_NOT_AN_INTEGER = "is not a whole number: write it without quotes, such as 5"
_ADVICE_BY_TYPE = {  # by pydantic's type of error
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
        None, description="Passages a question; by default 5, or all passages of a smaller snapshot."
    )
    index: str | None = Field(None, description="One of the service's indexes: the short form of `retriever`.")

    @property
    def expression(self) -> str | None:
        """The canonical retriever expression; None: the service's default."""
        return choose_expression(self.index, self.retriever)


class AnswerRequest(Request):
    """A request to /answer."""

    k: WholeNumber | None = Field(None, description="Passages a question; by default as in training.")
    stream: bool | None = Field(
        None,
        description="Reply with server-sent events as the answer is decoded; by default if Accept names "
        "text/event-stream.",
    )

    @property
    def expression(self) -> str | None:
        """The canonical retriever expression; None: the service's default."""
        return choose_expression(None, self.retriever)


_HIT_DESCRIPTIONS = {
    "rank": "From 1.",
    "score": "Larger is better; comparable within one snapshot and retriever.",
    "url": "Address of the article's revision.",
    "revised": "Time of the revision, ISO 8601 in UTC; null: unknown.",
    "licence": "The line of credit to show with the text.",
    "legs": "The legs that retrieved it, if the retriever has several.",
}
_DESCRIPTIONS: dict[type, dict[str, str]] = {
    Hit: _HIT_DESCRIPTIONS,
    replies.ReadHit: _HIT_DESCRIPTIONS,
    LegHit: {"rank": "From 1.", "score": "The leg's own."},
}
_SCHEMA_NAMES: dict[type, str] = {  # where they differ from the records' names
    replies.QueryResult: "Result",
    replies.ReadHit: "ReadPassage",
    replies.AnswerToken: "Token",
    replies.AnswerUsage: "Usage",
    replies.AnswerExcerpt: "Excerpt",
    replies.AnswerStatement: "Statement",
    replies.AnswerConfidence: "Confidence",
    replies.AnsweredQuestion: "Answer",
    replies.RefusedVersion: "Refused",
}


@functools.cache
def create_model(record_type: type) -> type[BaseModel]:
    """Create the pydantic model that describes and checks the JSON of a record."""
    definitions: dict[str, Any] = {}
    for field in replies.list_json_fields(record_type):
        hint = _to_json_hint(field.hint)
        description = field.description or _DESCRIPTIONS.get(record_type, {}).get(field.name)
        if field.is_omittable:
            definitions[field.name] = (
                hint | None,
                Field(None, description=description, exclude_if=lambda value: value is None),
            )
        else:
            definitions[field.name] = (hint, Field(description=description))
    name = _SCHEMA_NAMES.get(record_type, record_type.__name__)
    summary = (record_type.__doc__ or "").partition("\n")[0]
    return pydantic.create_model(name, __doc__=summary, **definitions)


def _to_json_hint(hint: Any) -> Any:
    """Replace records by their models, and tuples by lists."""
    if isinstance(hint, UnionType):
        return functools.reduce(operator.or_, map(_to_json_hint, get_args(hint)))
    if get_origin(hint) is tuple:
        return list[_to_json_hint(get_args(hint)[0])]  # type: ignore[misc]
    return create_model(hint) if isinstance(hint, type) and is_dataclass(hint) else hint


def read_request(kind: type[SearchRequest | AnswerRequest], body: bytes, settings: ServiceSettings) -> Any:
    """Parse a request and check it against the service's limits.

    Raises:
        UsageError: It is not JSON, or exceeds a limit.
        MalformedError: It has wrong keys or types.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _create_request_error(error) from None
    check_request(request, settings)
    return request


def _create_request_error(error: ValidationError) -> UsageError:
    first_error = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first_error["type"] == "json_invalid":
        return UsageError(
            f"the body is not JSON ({first_error['msg'].partition(': ')[2]}): send an object with questions"
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
        UsageError: It exceeds a limit, or a question is empty.
    """
    if len(request.questions) > settings.max_questions:
        raise UsageError(f"{len(request.questions)} questions are too many: ask up to {settings.max_questions} at once")
    if long_question := next((text for text in request.questions if len(text) > settings.max_question_chars), ""):
        raise UsageError(f"a question has {len(long_question)} characters: ask in up to {settings.max_question_chars}")
    check_queries(request.questions)
    if request.k is not None and request.k < 1:
        raise UsageError(f"k is {request.k}: ask for at least 1 passage")
    if request.k is not None and request.k > settings.max_k:
        raise UsageError(f"k is {request.k}: ask for at most {settings.max_k} passages")


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
