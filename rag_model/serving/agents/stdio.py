"""An MCP server over standard input and output: what `bookwheel serve --mcp` runs.

Standard output carries messages of the protocol alone: while it is served, whatever else this process and its children
print there goes to standard error.
"""

import json
import os
import signal
from importlib.metadata import version

import anyio
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from rag_model.serving.agents.tools import TOOLS, called, failure
from rag_model.serving.following.folder import Pulled
from rag_model.serving.following.follower import Followed
from rag_model.serving.process import prepare
from rag_model.serving.service import Service
from rag_model.serving.service_settings import ServiceSettings

_ABOUT = "Passages of a library, each with the line of credit to show with it. Search first, then read on by id."
_ONLY_READS = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)


def run(followed: Followed | Pulled, settings: ServiceSettings) -> None:
    """Serve the tools until standard input ends, or a signal comes.

    Raises:
        StoreError: there is no such snapshot, or nothing was pulled to the folder.
        UsageError: the snapshot has no such index.
    """
    prepare()
    followed.check()
    anyio.run(_serve, followed, settings)


def server_of(service: Service) -> "Server[dict[str, object]]":
    """Return the MCP server of a service; it serves over any transport of the library."""

    async def listed(
        context: ServerRequestContext[dict[str, object]], asked: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.about,
                    input_schema=tool.arguments.model_json_schema(),
                    annotations=_ONLY_READS,
                )
                for tool in TOOLS.values()
            ]
        )

    async def call(
        context: ServerRequestContext[dict[str, object]], asked: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            given = await called(service, asked.name, asked.arguments or {})
        except Exception as error:  # of any library: the agent is told, and may ask something else
            return types.CallToolResult(content=[types.TextContent(text=failure(error))], is_error=True)
        text = json.dumps(given, ensure_ascii=False)
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=given)

    return Server(
        "bookwheel", version=version("bookwheel"), instructions=_ABOUT, on_list_tools=listed, on_call_tool=call
    )


async def _serve(followed: Followed | Pulled, settings: ServiceSettings) -> None:
    async with stdio_server() as (read, write), anyio.create_task_group() as beside:
        service = Service(followed, settings)
        service.start()
        try:
            beside.start_soon(_end_by_signal, service)
            server = server_of(service)
            await server.run(read, write, server.create_initialization_options())
        finally:
            service.close()
            beside.cancel_scope.cancel()


async def _end_by_signal(service: Service) -> None:
    """End the process at the first signal: the thread that reads standard input cannot be woken, so it is left."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            service.close()
            os._exit(0)
