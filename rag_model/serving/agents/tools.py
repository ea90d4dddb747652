"""The tools that an agent calls: `search`, `passage` and `snapshot`, under the bounds of the HTTP service."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_model.corpus.moments import iso_of
from rag_model.errors import BookwheelError, UsageError
from rag_model.retrieve.attribution import Source
from rag_model.retrieve.lookup import locate
from rag_model.retrieve.retriever import hit_json
from rag_model.secrets import without_secrets
from rag_model.serving.http.messages import SearchRequest, check_request
from rag_model.serving.service import Service
from rag_model.serving.told import told, unready

_LOG = logging.getLogger(__name__)
_LOOK = 0.05  # seconds between two looks whether a snapshot is open
_LONGEST_ID = 1_000  # characters, as of a corpus
_WANTED = {  # by pydantic's kind of error
    "missing": "is missing: give it",
    "extra_forbidden": "is not an argument of this tool: leave it out",
    "string_type": "is not a text: give one",
    "int_type": "is not a whole number: give one such as 5",
    "string_too_long": f"is longer than {_LONGEST_ID} characters: give an id that a search gave",
}


class Arguments(BaseModel):
    """The arguments of a tool; unknown ones are refused, so that a misspelt one is noticed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SearchArguments(Arguments):
    """A question to find passages for."""

    question: str = Field(description="A question, or words, in the language of the passages.")
    k: int = Field(5, description="Passages to return, best first.")
    retriever: str | None = Field(
        None, description="How to find them, made of the indexes that `snapshot` lists, such as rrf(hnsw, bm25)."
    )


class PassageArguments(Arguments):
    """A passage to read."""

    id: str = Field(description="Of a passage that `search` gave.", max_length=_LONGEST_ID)


class NoArguments(Arguments):
    """Nothing."""


class UnknownToolError(UsageError):
    """There is no tool of this name."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an agent may call."""

    name: str
    about: str  # what it does and gives, for the agent's model
    arguments: type[Arguments]
    call: Callable[[Service, Any], Awaitable[dict[str, Any]]]


async def called(service: Service, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what a tool gives, as JSON values.

    Raises:
        BookwheelError: there is no such tool, an argument is wrong, or there is no answer; one sentence says why.
    """
    tool = TOOLS.get(name)
    if tool is None:
        raise UnknownToolError(f"there is no tool {name[:80]!r}: call one of {', '.join(TOOLS)}")
    try:
        read = tool.arguments.model_validate(arguments)
    except ValidationError as wrong:
        raise _sentence(wrong) from None
    await _until_open(service)
    return await tool.call(service, read)


def failure(error: Exception) -> str:
    """Return why a call failed, as one sentence; what is no error of ours goes to the log."""
    if isinstance(error, BookwheelError):
        return " ".join(without_secrets(str(error)).split())
    _LOG.error("a tool failed", exc_info=error)
    return "the tool failed unexpectedly: the server's log says why"


async def _search(service: Service, asked: SearchArguments) -> dict[str, Any]:
    request = SearchRequest(questions=[asked.question], k=asked.k, index=None, retriever=asked.retriever)
    check_request(request, service.settings)
    found = await service.search(request.questions, request.k, request.expression)
    return {"snapshot": found.snapshot, "hits": [hit_json(hit) for hit in found.hits[0]]}


async def _passage(service: Service, asked: PassageArguments) -> dict[str, Any]:
    return await asyncio.to_thread(_located, service, asked.id)


async def _snapshot(service: Service, asked: NoArguments) -> dict[str, Any]:
    return told(service)


def _located(service: Service, identity: str) -> dict[str, Any]:
    with service.desk.edition() as edition:
        found = locate(edition.snapshot, identity)
        passage, source = found.passage, Source.of(edition.snapshot.manifest.content.corpus)
        return {
            "snapshot": edition.id,
            **{name: getattr(passage, name) for name in ("id", "page_id", "title", "section", "text")},
            "url": source.url(passage),
            "revised": iso_of(passage.revised),
            "licence": source.line(passage),
            "previous": found.previous,
            "next": found.next,
        }


async def _until_open(service: Service) -> None:
    """Wait for the first snapshot: an agent calls a tool as soon as the server has started.

    Raises:
        UsageError: none is open within the time of a request; the sentence says why.
    """
    until = asyncio.get_running_loop().time() + service.settings.request_seconds
    while service.desk.named is None:
        hopeless = service.follower.refusal is not None or service.follower.problem
        if hopeless or asyncio.get_running_loop().time() > until:
            raise UsageError(unready(service))
        await asyncio.sleep(_LOOK)


def _sentence(wrong: ValidationError) -> UsageError:
    first = wrong.errors(include_url=False, include_input=False, include_context=False)[0]
    place = " ".join(".".join(map(str, first["loc"]))[:80].split()) or "the call"
    return UsageError(f"{place} {_WANTED.get(first['type'], 'cannot be read: give what the schema of the tool says')}")


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "search",
            "Find passages for a question, best first, each with its id, title, section, text, address, the day of "
            "its revision and the line of credit to show with it. Ask again with other words where none answers it.",
            SearchArguments,
            _search,
        ),
        Tool(
            "passage",
            "Read one passage by its id; `previous` and `next` are the ids of its neighbours on the page, to read on.",
            PassageArguments,
            _passage,
        ),
        Tool(
            "snapshot",
            "Say which version of the library is asked, how many passages it has, and which indexes and retrievers.",
            NoArguments,
            _snapshot,
        ),
    )
}
