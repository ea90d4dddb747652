"""`bookwheel serve --mcp`, called by the client of the MCP library over standard input and output."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import cli
from rag_model.retrieve.factory import open_retriever
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import TIMEOUT, Library, round_floats

QUESTION = "who was the king of river number 7?"
BOOKWHEEL = str(Path(sys.executable).with_name("bookwheel"))


def converse(options: list[str], log: Path, talk: Callable[[Any], Awaitable[None]]) -> None:
    """Talk with a server in a process of its own; its standard error goes to `log`."""
    import mcp  # noqa: PLC0415 - takes half a second, and only one test worker needs it

    command = ["serve", "--mcp", "--poll", "0.05", *options]
    environment = {name: os.environ[name] for name in ("BOOKWHEEL_CACHE", "PYTHONPATH") if name in os.environ}
    environment["OMP_NUM_THREADS"] = "1"
    server = mcp.StdioServerParameters(command=BOOKWHEEL, args=command, env=environment)

    async def run_session() -> None:
        with log.open("w") as errors:
            async with mcp.stdio_client(server, errlog=errors) as streams, mcp.ClientSession(*streams) as session:
                await session.initialize()
                await talk(session)

    asyncio.run(run_session())


def get_text(result: Any) -> str:
    (content,) = result.content
    assert content.type == "text"
    return content.text


async def call_tool(session: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call_tool(tool, arguments)
    assert not result.is_error, get_text(result)
    assert json.loads(get_text(result)) == result.structured_content
    return dict(result.structured_content)


async def call_tool_with_error(session: Any, tool: str, arguments: dict[str, Any]) -> str:
    result = await session.call_tool(tool, arguments)
    assert result.is_error
    return get_text(result)


BAD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("search", {}, "question is missing: give it"),
    ("search", {"question": 3}, "question is not a text"),
    ("search", {"question": " "}, "question 1 is empty"),
    ("search", {"question": "a" * 2_001}, "2001 characters"),
    ("search", {"question": "a", "k": 0}, "at least 1"),
    ("search", {"question": "a", "k": 101}, "at most 100"),
    ("search", {"question": "a", "k": 41}, "holds 40 passages"),
    ("search", {"question": "a", "k": 41.0}, "holds 40 passages"),
    ("search", {"question": "a", "k": 1.5}, "k is not a whole number"),
    ("search", {"question": "a", "k": "5"}, "k is not a whole number"),
    ("search", {"question": "a", "top_k": 5}, "top_k is not an argument of this tool"),
    ("search", {"question": "a", "retriever": "nothing"}, "not served here"),
    ("search", {"question": "a", "retriever": "rrf(hnsw"}, "not closed"),
    ("passage", {"id": "../../etc/passwd"}, "has no passage"),
    ("passage", {"id": "a" * 1_001}, "longer than 1000 characters"),
    ("snapshot", {"ref": "latest"}, "ref is not an argument"),
    ("shell", {"command": "ls"}, "there is no tool 'shell': call one of search, passage, snapshot"),
]


@pytest.mark.slow
def test_agent_searches_reads_passages_gets_error_messages_and_follows_the_ref(
    library: Library, trial_record: Path, tmp_path: Path
) -> None:
    with Snapshot.open(library.url) as snapshot:
        expected = [hit.to_json() for hit in open_retriever(snapshot).search([QUESTION], 3)[0]]

    async def talk(session: Any) -> None:
        tools = (await session.list_tools()).tools
        assert {tool.name for tool in tools} == {"search", "passage", "snapshot"}
        assert all(tool.annotations and tool.annotations.read_only_hint and tool.description for tool in tools)
        assert tools[0].input_schema["required"] == ["question"]
        reply = await call_tool(session, "search", question=QUESTION, k=3)
        assert reply == round_floats({"snapshot": library.red, "hits": expected})
        passage = await call_tool(session, "passage", id=expected[0]["id"])
        assert {key: passage[key] for key in ("text", "title", "url", "revised")} == {
            key: expected[0][key] for key in ("text", "title", "url", "revised")
        }
        assert passage["revised"] == "2026-11-01T12:00:00Z"
        state = await call_tool(session, "snapshot")
        assert (state["snapshot"], state["ref"], state["indexes"]) == (library.red, "latest", ["hnsw"])
        for tool, arguments, expected_words in BAD_CALLS:
            error_message = await call_tool_with_error(session, tool, arguments)
            assert expected_words in error_message
            assert "\n" not in error_message
        library.move(library.blue)
        async with asyncio.timeout(TIMEOUT):
            while (await call_tool(session, "snapshot"))["snapshot"] != library.blue:
                await asyncio.sleep(0.05)
        reply = await call_tool(session, "search", question=QUESTION, k=1)
        assert "blue" in reply["hits"][0]["text"]
        live_children = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
        (process,) = [child for child in live_children if "--mcp" in child.cmdline()]
        process.send_signal(signal.SIGINT)  # ends the process although its standard input is open
        assert psutil.wait_procs([process], TIMEOUT)[0] == [process]

    shutil.copytree(trial_record, tmp_path / "dest" / trial_record.name)
    converse(["--store", library.url, "--dest", str(tmp_path / "dest")], tmp_path / "log", talk)


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (["--store", "{0}/nowhere"], "there is no bookwheel store", 1),
        (["--folder", "{0}/nowhere"], "there is no pulled snapshot", 1),
        (["--folder", "{0}", "--model", "reader"], "leave --model out", 2),
        (["--store", "{0}", "--model", "reader"], "leave --model out", 2),
        ([], "give --store, or --folder", 2),
    ],
)
def test_snapshot_that_cannot_be_served_ends_with_one_sentence(
    options: list[str], words: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "--mcp", *(option.format(tmp_path) for option in options)]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err
