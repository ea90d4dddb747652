"""An MCP (Model Context Protocol) server over standard input and output: `bookwheel serve --mcp`.

Agents call its tools `search`, `passage` and `snapshot`. The limits are those of the HTTP service.
Standard output carries only messages of the protocol; anything else that this process and its
children print there goes to standard error.
"""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import anyio
import pyarrow.compute as pc
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_model.corpus.records import Passage, format_iso, hash_id
from rag_model.errors import BookwheelError, NotFoundError, UsageError
from rag_model.retrieve.attribution import Attribution
from rag_model.secrets import mask_secrets
from rag_model.serving.following.follower import FollowedRef, PulledFolder
from rag_model.serving.http.messages import SearchRequest, WholeNumber, check_request
from rag_model.serving.runtime import prepare_process
from rag_model.serving.service import Service
from rag_model.serving.settings import ServiceSettings
from rag_model.store.versions.manifest import PartEntry
from rag_model.store.versions.snapshot import Snapshot

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.05  # seconds between two checks whether a snapshot is loaded
_MAX_PAGE_DIGITS = 20  # a longer number is not a page id
_MAX_QUOTED = 80  # characters of an id that an error message repeats
_MAX_ID_LENGTH = 1_000  # maximum characters of an id; no corpus has longer ids
_ADVICE_BY_TYPE = {  # text for each type of pydantic's errors
    "missing": "is missing: give it",
    "extra_forbidden": "is not an argument of this tool: leave it out",
    "string_type": "is not a text: give one",
    "int_type": "is not a whole number: give one such as 5",
    "string_too_long": f"is longer than {_MAX_ID_LENGTH} characters: give an id from a search",
}
_INSTRUCTIONS = "Passages of a library, each with the line of credit to show with it. Search first, then read on by id."
_READ_ONLY = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)


class Arguments(BaseModel):
    """The arguments of a tool; unknown ones are refused, to catch misspellings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SearchArguments(Arguments):
    """A question for which to find passages."""

    question: str = Field(description="A question, or words, in the language of the passages.")
    k: WholeNumber | None = Field(
        None, description="Number of passages to return; by default 5, or all of a smaller snapshot."
    )
    retriever: str | None = Field(
        None,
        description="Retriever expression over the indexes that `snapshot` lists, such as rrf(hnsw, bm25).",
    )


class PassageArguments(Arguments):
    """A passage to read."""

    id: str = Field(description="A passage's id, from `search`.", max_length=_MAX_ID_LENGTH)


class NoArguments(Arguments):
    """No arguments."""


class UnknownToolError(UsageError):
    """There is no tool with this name."""


@dataclass(frozen=True, slots=True)
class AgentTool:
    """A function that an agent may call."""

    name: str
    description: str  # shown to the agent's model
    arguments: type[Arguments]
    call: Callable[[Service, Any], Awaitable[dict[str, Any]]]


async def call_tool(service: Service, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a tool and return its result as JSON values.

    Raises:
        BookwheelError: There is no such tool, an argument is invalid, or the service cannot answer.
    """
    tool = TOOLS.get(name)
    if tool is None:
        raise UnknownToolError(f"there is no tool {name[:80]!r}: call one of {', '.join(TOOLS)}")
    try:
        parsed_arguments = tool.arguments.model_validate(arguments)
    except ValidationError as error:
        raise _create_argument_error(error) from None
    await _wait_until_ready(service)
    return await tool.call(service, parsed_arguments)


def explain_failure(error: Exception) -> str:
    """Return the message of an error for the agent, and log unexpected errors."""
    if isinstance(error, BookwheelError):
        return " ".join(mask_secrets(str(error)).split())
    _LOG.error("a tool failed", exc_info=error)
    return "the tool failed unexpectedly: the server's log says why"


async def _call_search(service: Service, arguments: SearchArguments) -> dict[str, Any]:
    request = SearchRequest(
        questions=[arguments.question], k=arguments.k, index=None, retriever=arguments.retriever, where=None
    )
    check_request(request, service.settings)
    result = await service.search(request.questions, request.k, request.expression)
    return {"snapshot": result.snapshot, "hits": [hit.to_json() for hit in result.hits[0]]}


async def _call_passage(service: Service, arguments: PassageArguments) -> dict[str, Any]:
    return await asyncio.to_thread(_read_passage, service, arguments.id)


async def _call_snapshot(service: Service, arguments: NoArguments) -> dict[str, Any]:
    return service.describe()


def _read_passage(service: Service, passage_id: str) -> dict[str, Any]:
    with service.slot.acquire() as loaded_snapshot:
        located_passage = locate_passage(loaded_snapshot.snapshot, passage_id)
        passage = located_passage.passage
        attribution = Attribution.from_corpus(loaded_snapshot.snapshot.manifest.content.corpus)
        return {
            "snapshot": loaded_snapshot.id,
            **{name: getattr(passage, name) for name in ("id", "page_id", "title", "section", "kind", "text")},
            "url": attribution.build_url(passage),
            "revised": format_iso(passage.revised),
            "licence": attribution.build_credit_line(passage),
            "previous": located_passage.previous,
            "next": located_passage.next,
        }


async def _wait_until_ready(service: Service) -> None:
    """Wait for the first snapshot, because agents call a tool once the server has started.

    Raises:
        UsageError: No snapshot is loaded within the time limit of a request.
    """
    deadline = asyncio.get_running_loop().time() + service.settings.request_seconds
    while service.slot.served_ref is None:
        has_failed = service.follower.refusal is not None or service.follower.problem
        if has_failed or asyncio.get_running_loop().time() > deadline:
            raise UsageError(service.explain_unready())
        await asyncio.sleep(_POLL_SECONDS)


def _create_argument_error(error: ValidationError) -> UsageError:
    first_error = error.errors(include_url=False, include_input=False, include_context=False)[0]
    argument_name = " ".join(".".join(map(str, first_error["loc"]))[:80].split()) or "the call"
    return UsageError(
        f"{argument_name} {_ADVICE_BY_TYPE.get(first_error['type'], 'is invalid: see the schema of the tool')}"
    )


TOOLS = {
    tool.name: tool
    for tool in (
        AgentTool(
            "search",
            "Find passages for a question, best first, each with its id, title, section, text, "
            "URL, date of revision and the line of credit to show with it. If none answers the "
            "question, search again with other words.",
            SearchArguments,
            _call_search,
        ),
        AgentTool(
            "passage",
            "Read one passage by its id; `previous` and `next` are the ids of its neighbours on the same page.",
            PassageArguments,
            _call_passage,
        ),
        AgentTool(
            "snapshot",
            "Return the version of the library, its number of passages, its indexes and its retrievers.",
            NoArguments,
            _call_snapshot,
        ),
    )
}


def run(target: FollowedRef | PulledFolder, settings: ServiceSettings) -> None:
    """Serve the tools until standard input ends or a signal arrives.

    Raises:
        StoreError: There is no such snapshot, or nothing was pulled to the folder.
        UsageError: The snapshot does not have an index that the settings name.
    """
    prepare_process()
    target.check()
    anyio.run(_serve_mcp, target, settings)


def create_mcp_server(service: Service) -> "Server[dict[str, object]]":
    """Create the MCP server of a service, for any transport."""

    async def list_tools(
        context: ServerRequestContext[dict[str, object]],
        parameters: types.PaginatedRequestParams | None,
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.arguments.model_json_schema(),
                    annotations=_READ_ONLY,
                )
                for tool in TOOLS.values()
            ]
        )

    async def call(
        context: ServerRequestContext[dict[str, object]], parameters: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            result = await call_tool(service, parameters.name, parameters.arguments or {})
        except Exception as error:  # the agent gets errors of any class as results
            return types.CallToolResult(content=[types.TextContent(text=explain_failure(error))], is_error=True)
        text = json.dumps(result, ensure_ascii=False)
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=result)

    return Server(
        "bookwheel",
        version=version("bookwheel"),
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call,
    )


async def _serve_mcp(target: FollowedRef | PulledFolder, settings: ServiceSettings) -> None:
    async with stdio_server() as (read_stream, write_stream), anyio.create_task_group() as task_group:
        service = Service(target, settings)
        service.start()
        try:
            task_group.start_soon(_end_by_signal, service)
            server = create_mcp_server(service)
            await server.run(read_stream, write_stream, server.create_initialization_options())
        finally:
            service.close()
            task_group.cancel_scope.cancel()


async def _end_by_signal(service: Service) -> None:
    """Exit at the first signal; do not wait for the thread that reads standard input."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received_signals:
        async for _ in received_signals:
            service.close()
            os._exit(0)


@dataclass(frozen=True, slots=True)
class LocatedPassage:
    """A passage with the ids of its neighbours on the page, from which an agent can read on."""

    row: int  # global row
    passage: Passage
    previous: str | None  # id of the previous passage; None at the beginning of the page
    next: str | None  # id of the next passage; None at the end of the page


def locate_passage(snapshot: Snapshot, passage_id: str) -> LocatedPassage:
    """Return the passage with this id, and the ids of its neighbours.

    Only parts that may contain the page or document are read. Imported snapshots are not sorted by
    id, so all of their parts are read.

    Raises:
        NotFoundError: The snapshot has no such passage.
        StoreError: A passage file is missing or damaged.
    """
    row = _find_row(snapshot, passage_id) if _is_text(passage_id) else None
    if row is None:
        raise NotFoundError(
            f"snapshot {snapshot.id[:12]} has no passage {passage_id[:_MAX_QUOTED]!r}: use an id "
            "from a search of this snapshot"
        )
    near_rows = [near_row for near_row in (row - 1, row, row + 1) if 0 <= near_row < snapshot.n]
    passage_by_row = dict(zip(near_rows, snapshot.passages(near_rows), strict=True))
    page_id = passage_by_row[row].page_id
    previous_id, next_id = (
        neighbour.id if (neighbour := passage_by_row.get(row + row_step)) and neighbour.page_id == page_id else None
        for row_step in (-1, 1)
    )
    return LocatedPassage(row, passage_by_row[row], previous_id, next_id)


def _is_text(passage_id: str) -> bool:
    """Return whether an id can be encoded as UTF-8; otherwise no passage has this id."""
    try:
        passage_id.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_row(snapshot: Snapshot, passage_id: str) -> int | None:
    first_row, may_contain_passage = 0, _create_part_filter(snapshot, passage_id)
    for part in snapshot.parts:
        part_row = _find_row_in_part(snapshot, part.name, passage_id) if may_contain_passage(part) else None
        if part_row is not None:
            return first_row + part_row
        first_row += part.rows
    return None


def _find_row_in_part(snapshot: Snapshot, part_name: str, passage_id: str) -> int | None:
    first_row = 0
    for batch in snapshot.batches(part_name, ["id"]):
        position = int(pc.index(batch["id"], passage_id).as_py())
        if position >= 0:
            return first_row + position
        first_row += batch.num_rows
    return None


def _create_part_filter(snapshot: Snapshot, passage_id: str) -> Callable[[PartEntry], bool]:
    """Return a function that tells whether a part may contain the passage, by its range of ids."""
    corpus_kind, (page, separator, _) = snapshot.manifest.content.corpus.get("kind"), passage_id.rpartition(":")
    if corpus_kind == "wiki" and separator and page.isdecimal() and len(page) < _MAX_PAGE_DIGITS:
        page_key = int(page)
    elif corpus_kind == "documents" and separator:
        page_key = hash_id(page)
    elif corpus_kind == "passages":
        page_key = hash_id(passage_id)
    else:
        return lambda part: True
    return lambda part: part.first_page <= page_key <= part.last_page
