"""Reads the fenced blocks of the pages: commands, files, requests and replies, marked by a comment before them.

<!-- not run: needs a cluster -->        the block's commands are parsed and not run
<!-- file: questions.jsonl -->           the block is a file that later commands of the page read
<!-- request: /search -->                the block is the JSON of a request
<!-- reply: /search -->                  the block is the JSON of a reply, with the fields of a real one
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in {"_build", "reference"})
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "infra/README.md", "tests/benchmarks/README.md")]

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|file|request|reply): (?P<note>[^\n]+?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
_END = {"|", ">", ">>", "<", "&&", "||", ";", "&"}  # where a shell ends the words of a command


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # line number of the opening fence, from 1
    language: str
    text: str
    mark: str  # "not run", "file", "request", "reply" or ""
    note: str  # why it is not run, the file's name, or the path of a request

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands after a prompt, each with its continued lines, without their output."""
        if self.language != "console":
            return []
        lines = iter(self.text.splitlines())
        return [_join_lines(line.removeprefix("$ "), lines) for line in lines if line.startswith("$ ")]


def _join_lines(command: str, lines: Iterator[str]) -> str:
    while command.endswith("\\"):
        command = f"{command[:-1].rstrip()} {next(lines).strip()}"
    return command


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text[: match.start("fence")].count("\n") + 1,
            match["language"].strip(),
            match["text"],
            match["mark"] or "",
            match["note"] or "",
        )
        for match in _FENCE.finditer(text)
    ]


def read_exchanges() -> dict[str, tuple[Any, Any]]:
    """Return the request (None for a GET) and the reply of each path on the page of the HTTP API."""
    examples = {(block.mark, block.note): block for block in read_blocks(DOCS / "http-api.md")}
    return {
        path: (
            json.loads(examples["request", path].text) if ("request", path) in examples else None,
            json.loads(block.text),
        )
        for (mark, path), block in examples.items()
        if mark == "reply"
    }


def list_fields(value: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of a JSON value.

    >>> sorted(list_fields({"hits": [{"id": 1}, {"url": None}]}))
    ['.hits', '.hits.id', '.hits.url']
    """
    if isinstance(value, list):
        return {name for item in value for name in list_fields(item, path)}
    if not isinstance(value, dict):
        return set()
    return {name for key, item in value.items() for name in (f"{path}.{key}", *list_fields(item, f"{path}.{key}"))}


def split_command(command: str) -> list[str]:
    """Return the words of a command up to a pipe or a redirection, without comments and variables before it.

    >>> split_command("STORE=x bookwheel log --store library > log.txt  # all moves")
    ['bookwheel', 'log', '--store', 'library']
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    tokens = list(lexer)
    end = next((i for i, word in enumerate(tokens) if word in _END), len(tokens))
    start = next((i for i, word in enumerate(tokens[:end]) if not re.match(r"\w+=", word)), end)
    return tokens[start:end]
