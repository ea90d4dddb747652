"""Runs the commands of a page, with the replacements below."""

import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flows import cli
from flows.machine.local import find_free_ports
from rag_model.store.store import Store
from tests.docs.blocks import Block, split_command

# Replacements in the commands, because the dump of the tests has three articles and there is no bucket.
REPLACEMENTS = {
    "--limit 1000": "--limit 2",
    "--limit 5000": "--limit 3",
    "s3://bucket/library": "library",
    "localhost:8000": "localhost:{port}",
    "bookwheel serve": "bookwheel serve --port {port} --poll 0.1",
}
TIMEOUT = 400  # seconds; a busy machine takes a while to import torch
_SHELL = set("|<&;$")  # characters of commands that only a shell can run


class Shell:
    """Runs blocks in a folder: `bookwheel` in this process, `serve` in its own process, other commands in bash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {}  # global names of the page's Python code
        self._service: subprocess.Popen[bytes] | None = None
        (self.port,) = find_free_ports(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._service is not None:
            self._service.kill()
            self._service.wait()

    def run(self, block: Block) -> list[str]:
        """Run a block's commands, write its file, or execute its Python; return the output of each command."""
        if block.mark == "file":
            (self.folder / block.note).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(self._apply_replacements(block.text), block.location, "exec"), self.names)
        return [self._run_command(self._apply_replacements(command), block.location) for command in block.commands]

    def _apply_replacements(self, text: str) -> str:
        for page_text, replacement in REPLACEMENTS.items():
            text = text.replace(page_text, replacement.format(port=self.port))
        return text

    def _run_command(self, command: str, location: str) -> str:
        line, _, target = command.partition(" > ")
        arguments = [name for word in split_command(line) for name in _expand_pattern(word)]
        if arguments[:2] == ["bookwheel", "serve"]:
            return self._start_service(arguments)
        if arguments[:1] != ["bookwheel"] or _SHELL & set(line):
            return self._run_in_bash(command, location)
        with redirect_stdout(io.StringIO()) as out:
            code = cli.run(arguments[1:])
        assert code == 0, f"{location}: {command} ends with {code}"
        self._wait_until_served()
        if target:
            (self.folder / target).write_text(out.getvalue(), encoding="utf-8")
        return out.getvalue()

    def _run_in_bash(self, command: str, location: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        arguments = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(
            arguments, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert done.returncode == 0, f"{location}: {command} ends with {done.returncode}: {done.stderr}"
        return done.stdout

    def _start_service(self, words: list[str]) -> str:
        assert self._service is None, "one page starts one service"
        self._service = subprocess.Popen([Path(sys.executable).with_name("bookwheel"), *words[1:]])
        self._wait_until(lambda: self._get("/readyz") is not None)
        return ""

    def _wait_until_served(self) -> None:
        """Wait until the service, if there is one, serves the snapshot that `latest` names."""
        if self._service is not None:
            move = Store.open("library").refs.find_current("latest")
            self._wait_until(
                lambda: move is not None and json.loads(self._get("/snapshot") or "{}")["number"] == move.number
            )

    def _wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self._service is not None
            assert self._service.poll() is None, "the service has ended"
            assert time.monotonic() < deadline, "the service is not ready"
            time.sleep(0.05)

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=TIMEOUT) as reply:
                return str(reply.read().decode())
        except (urllib.error.HTTPError, ConnectionError, urllib.error.URLError):
            return None


def _expand_pattern(word: str) -> list[str]:
    """Return the files that a pattern matches, or the word itself, as a shell does."""
    paths = [str(path) for path in Path().glob(word)] if {"*", "?"} & set(word) else []
    return sorted(paths) or [word]
