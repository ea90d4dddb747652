"""Runs the commands of a page as they stand, but for the replacements named here."""

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
from tests.docs.blocks import Block, words

# What a reader types, and what is run instead: the test's dump has three articles and there is no bucket.
REPLACED = {
    "--limit 1000": "--limit 2",
    "--limit 5000": "--limit 3",
    "s3://bucket/library": "library",
    "localhost:8000": "localhost:{port}",
    "bookwheel serve": "bookwheel serve --port {port} --poll 0.1",
}
PATIENCE = 400  # seconds; a busy machine takes a while to import torch
_SHELL = set("|<&;$")  # what only a shell does


class Shell:
    """Runs blocks in a folder: `bookwheel` in this process, `serve` beside it, all else in bash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {}  # of the page's Python
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
        """Run a block's commands, write its file, or execute its Python; return what each command printed."""
        if block.mark == "file":
            (self.folder / block.note).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(self._replaced(block.text), block.place, "exec"), self.names)
        return [self._command(self._replaced(command), block.place) for command in block.commands]

    def _replaced(self, text: str) -> str:
        for shown, run in REPLACED.items():
            text = text.replace(shown, run.format(port=self.port))
        return text

    def _command(self, command: str, place: str) -> str:
        line, _, target = command.partition(" > ")
        given = [name for word in words(line) for name in _expanded(word)]
        if given[:2] == ["bookwheel", "serve"]:
            return self._serve(given)
        if given[:1] != ["bookwheel"] or _SHELL & set(line):
            return self._bash(command, place)
        with redirect_stdout(io.StringIO()) as out:
            code = cli.run(given[1:])
        assert code == 0, f"{place}: {command} ends with {code}"
        self._until_served()
        if target:
            (self.folder / target).write_text(out.getvalue(), encoding="utf-8")
        return out.getvalue()

    def _bash(self, command: str, place: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(
            given, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, f"{place}: {command} ends with {done.returncode}: {done.stderr}"
        return done.stdout

    def _serve(self, words: list[str]) -> str:
        assert self._service is None, "one page starts one service"
        self._service = subprocess.Popen([Path(sys.executable).with_name("bookwheel"), *words[1:]])
        self._until(lambda: self._get("/readyz") is not None)
        return ""

    def _until_served(self) -> None:
        """Where a service follows `latest`, wait until it has what `latest` names by now."""
        if self._service is not None:
            move = Store.open("library").refs.find_current("latest")
            self._until(
                lambda: move is not None and json.loads(self._get("/snapshot") or "{}")["number"] == move.number
            )

    def _until(self, true: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert self._service is not None
            assert self._service.poll() is None, "the service has ended"
            assert time.monotonic() < deadline, "the service is not ready"
            time.sleep(0.05)  # between two looks

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as reply:
                return str(reply.read().decode())
        except (urllib.error.HTTPError, ConnectionError, urllib.error.URLError):
            return None


def _expanded(word: str) -> list[str]:
    """Do as a shell does with a pattern: the files that it matches, or the word itself."""
    found = [str(path) for path in Path().glob(word)] if {"*", "?"} & set(word) else []
    return sorted(found) or [word]
