"""The JSON of HTTP requests and replies: replies are as the verbs print them; models describe and check it.

Replies are written from `hit_json` and `answer_json`, as the verbs write theirs; their models here are for OpenAPI, and
a test holds the two together.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from rag_model.errors import UsageError
from rag_model.reading.answer import answer_json
from rag_model.retrieve.expression import one_of
from rag_model.retrieve.questions import check_questions
from rag_model.retrieve.retriever import hit_json
from rag_model.serving.answering.work import Answered, Found
from rag_model.serving.service_settings import ServiceSettings

_ONE_PROMPT = "Where all passages are read in one prompt."
_SHOWN = 80  # characters of a field's name that are repeated
_WHOLE = "is not a whole number: write it without point, exponent and quotes, such as 5"
_WANTED = {  # by pydantic's kind of error
    "missing": "is missing: give it, as /openapi.json says",
    "extra_forbidden": "is not a field of this request: correct its name, or leave it out; /openapi.json lists them",
    "too_short": "is empty: give at least one",
    "list_type": 'is not a list: give one of strings, such as ["Who wrote Faust?"]',
    "string_type": "is not a string: write it in quotes",
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "is too large a number: give a smaller one",
    "model_type": 'is not an object: send one such as {"questions": ["Who wrote Faust?"]}',
    "model_attributes_type": 'is not an object: send one such as {"questions": ["Who wrote Faust?"]}',
}


class MalformedError(UsageError):
    """The body is JSON, but not what the endpoint takes."""


class Request(BaseModel):
    """What both endpoints take; unknown keys are refused, so that a misspelt one is noticed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    questions: list[str] = Field(min_length=1, examples=[["Who wrote Animal Farm?"]])
    retriever: str | None = Field(
        None,
        description="How to find passages: a retriever of the service, or another one made of its indexes, such as "
        "rrf(hnsw, ivfpq); by default its first.",
    )


class SearchRequest(Request):
    """Questions to find passages for."""

    k: int = Field(5, description="Passages a question.")
    index: str | None = Field(None, description="One of the service's indexes: the short form of `retriever`.")

    @property
    def expression(self) -> str | None:
        """The retriever that is asked for, in one spelling; None: the service's first."""
        return one_of(self.index, self.retriever)


class AnswerRequest(Request):
    """Questions to answer."""

    k: int | None = Field(None, description="Passages a question; by default as in training.")
    stream: bool | None = Field(
        None,
        description="Reply with server-sent events, words as they come; by default where Accept names "
        "text/event-stream.",
    )

    @property
    def expression(self) -> str | None:
        """The retriever that is asked for, in one spelling; None: the service's first."""
        return one_of(None, self.retriever)


class LegHit(BaseModel):
    """How one leg of a retriever ranked a passage."""

    leg: str
    rank: int = Field(description="From 1.")
    score: float = Field(description="The leg's own.")


class Hit(BaseModel):
    """One passage."""

    rank: int = Field(description="From 1.")
    score: float = Field(description="Larger is better; comparable within one snapshot and retriever.")
    id: str
    page_id: str
    title: str
    section: str
    text: str
    url: str = Field(description="Address of the article's revision.")
    revised: str | None = Field(description="When that revision was saved, ISO 8601 in UTC; null: unknown.")
    licence: str = Field(description="The line of credit to show with the text.")
    legs: list[LegHit] | None = Field(
        None, description="Which legs found it; where a retriever has several.", exclude_if=lambda legs: legs is None
    )


class Result(BaseModel):
    """One question and its passages, best first."""

    question: str
    hits: list[Hit]


class SearchReply(BaseModel):
    """What `bookwheel search --json` prints."""

    snapshot: str = Field(description="The snapshot of every hit here.")
    results: list[Result]


class ReadPassage(Hit):
    """A passage that an answer was read from."""

    weight: float | None = Field(description="p(z|x); null where passages are not marginalised.")
    posterior: float | None = Field(description="p(z|x,y); as the weight.")


class Token(BaseModel):
    """A token of a RAG-Token answer, and each passage's share of it."""

    text: str
    posterior: list[float]


class Usage(BaseModel):
    """What an answer cost."""

    prompt_tokens: int = Field(description="Read; where passages are marginalised, of all their contexts.")
    new_tokens: int = Field(description="Written.")
    cost: float | None = Field(description="In the currency of the prices given; null: no prices are known.")
    estimated: bool = Field(description="The endpoint told no tokens, so they were counted here.")


class Excerpt(BaseModel):
    """One numbered entry of a prompt: a passage, or several joined."""

    number: int = Field(description="What the answer cites it by, from 1.")
    title: str
    section: str
    url: str = Field(description="Address of the article's revision.")
    revision: int = Field(description="0 where the source has none.")
    places: list[int] = Field(description="Of the passages that it holds, from 0.")
    text: str = Field(description="As the model read it.")
    cut: bool = Field(description="Its end did not fit.")
    revised: str | None = Field(description="When the revision was saved, ISO 8601 in UTC; null: unknown.")


class Statement(BaseModel):
    """One sentence of an answer."""

    text: str
    cited: list[int] = Field(description="Numbers of the context.")
    unknown: list[int] = Field(description="Numbers that the context does not have.")


class Confidence(BaseModel):
    """How sure an answer is."""

    signal: str = Field(description="What the score is: likelihood, retrieval or passages.")
    score: float | None = Field(description="Larger is surer; null: minus infinity.")
    least: float = Field(description="Below it no answer is given.")


class Answer(BaseModel):
    """One question and its answer."""

    question: str
    answer: str
    ended: bool
    log_likelihood: float | None
    passages: list[ReadPassage]
    tokens: list[Token]
    closed_book_log_likelihood: float | None = Field(
        None, description="Of the same answer without passages, in nats.", exclude_if=lambda one: one is None
    )
    abstained: bool | None = Field(
        None,
        description="The score is below the service's threshold: the library does not hold it.",
        exclude_if=lambda one: one is None,
    )
    confidence: Confidence | None = Field(
        None, description="Where the service has a threshold.", exclude_if=lambda one: one is None
    )
    usage: Usage | None = Field(None, description="Where tokens were counted.", exclude_if=lambda one: one is None)
    context: list[Excerpt] | None = Field(None, description=_ONE_PROMPT, exclude_if=lambda one: one is None)
    statements: list[Statement] | None = Field(None, description=_ONE_PROMPT, exclude_if=lambda one: one is None)
    citations: list[int] | None = Field(None, description=_ONE_PROMPT, exclude_if=lambda one: one is None)


class AnswerReply(BaseModel):
    """What `bookwheel answer --json` prints."""

    snapshot: str = Field(description="The snapshot of every passage here.")
    model: str
    answers: list[Answer]


class Refused(BaseModel):
    """A version that the ref names and that was refused."""

    number: int
    snapshot: str
    reason: str
    at: str
    tries: int
    final: bool = Field(description="It is not tried again before the ref moves.")


class SnapshotReply(BaseModel):
    """What is served."""

    snapshot: str
    ref: str
    number: int | None = Field(description="Number of the ref's move; null where no ref is followed.")
    created_at: str | None = Field(description="When the ref was moved.")
    passages: int
    indexes: list[str] = Field(description="Indexes that requests may ask for, and compose retrievers from.")
    retrievers: list[str] = Field(description="Retrievers that the service was started with; the first is the default.")
    model: str | None
    refused: Refused | None
    store_problem: str | None = Field(description="Why the store could not be asked last time.")


def read_request(kind: type[SearchRequest | AnswerRequest], body: bytes, settings: ServiceSettings) -> Any:
    """Read a request and check it against the service's bounds.

    Raises:
        UsageError: it is not JSON, or exceeds a bound.
        MalformedError: it has other keys or types.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as wrong:
        raise _sentence(wrong) from None
    check_request(request, settings)
    return request


def _sentence(wrong: ValidationError) -> UsageError:
    first = wrong.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return UsageError(f"the body is not JSON ({first['msg'].partition(': ')[2]}): send an object with questions")
    place = ".".join(map(str, first["loc"]))[:_SHOWN] or "the body"
    wanted = _WANTED.get(first["type"], f"cannot be read ({first['msg']}): /openapi.json says what the service takes")
    return MalformedError(f"{' '.join(place.split())} {wanted}")


def check_request(request: SearchRequest | AnswerRequest, settings: ServiceSettings) -> None:
    """Check a request against the service's bounds.

    Raises:
        UsageError: it exceeds one, or a question is empty.
    """
    if len(request.questions) > settings.max_questions:
        raise UsageError(f"{len(request.questions)} questions are too many: ask up to {settings.max_questions} at once")
    if longest := next((text for text in request.questions if len(text) > settings.max_question_chars), ""):
        raise UsageError(f"a question has {len(longest)} characters: ask in up to {settings.max_question_chars}")
    check_questions(request.questions)
    if request.k is not None and request.k < 1:
        raise UsageError(f"k is {request.k}: ask for at least 1 passage")
    if request.k is not None and request.k > settings.max_k:
        raise UsageError(f"k is {request.k}: ask for at most {settings.max_k} passages")


def search_reply(questions: Sequence[str], found: Found) -> bytes:
    """Write a reply of /search."""
    results = [
        {"question": question, "hits": [hit_json(hit) for hit in hits]}
        for question, hits in zip(questions, found.hits, strict=True)
    ]
    return to_json({"snapshot": found.snapshot, "results": results})


def answer_reply(answered: Answered) -> bytes:
    """Write a reply of /answer."""
    answers = [answer_json(one) for one in answered.answers]
    return to_json({"snapshot": answered.snapshot, "model": answered.model, "answers": answers})
