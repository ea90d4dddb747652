"""A small dump, a tiny encoder, the command line in this or in a new process, and a Prefect server.

Most tests run a flow without workers, like the command for a small job. Tests that name a runner or a number of workers
run it with Beam; the runner `IN_PROCESS` starts fastest. Most tests run without a Prefect server, like the command if
none is configured. At least one test of each flow, and all tests of data that Prefect shows, use `prefect_server`.
"""

import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from beam_jobs.workers import START_VARIABLE
from flows import cli
from flows.machine.local import LocalServices, down, find_free_ports, start_prefect_server
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE

for _name, _value in cli._ENVIRONMENT.items():  # like the command, before Prefect and transformers are imported
    os.environ.setdefault(_name, _value)
os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "300")  # seconds; a busy machine's server takes more than 60

from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: E402

from tests.fixtures.machine_requirements import TEST_VARIABLES  # noqa: E402
from tests.fixtures.publisher import Publisher  # noqa: E402
from tests.fixtures.tiny import save_bert  # noqa: E402

IN_PROCESS = "--runner=FnApiRunner"
RECIPE = """
part_bytes = 50_000

[index.hnsw]
factory = "HNSW8"
recall_target = 0.98
"""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """The error message: one line, without a stack trace, after progress lines only."""
        error_lines = [line for line in self.err.splitlines() if line.startswith("bookwheel: ")]
        assert len(error_lines) == 1, self.err
        progress_lines = [line for line in self.err.splitlines() if line not in error_lines]
        assert all(line.endswith(("…", " s", " min", " h", " left")) for line in progress_lines), self.err
        sentence = error_lines[0].removeprefix("bookwheel: ")
        assert self.out == "" or self.json == {"error": sentence, "exit_code": self.code}
        return sentence


Bookwheel = Callable[..., CommandResult]


@dataclass(frozen=True, slots=True)
class LibraryBuild:
    """A store, and the reply of the `reindex --json` that built its snapshot."""

    store: Path
    reply: Any


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a migrated database that `prefect_url` writes for later servers, also in later runs of the tests.

    Without it, a server creates its database with more than a hundred migrations, which take 4 CPU seconds.
    """
    folder = tmp_path_factory.getbasetemp()
    user_folders = (parent for parent in folder.parents if parent.name.startswith("pytest-of-"))
    return next(user_folders, folder) / f"prefect-{version('prefect')}.db"


@pytest.fixture(scope="session")
def prefect_url(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prefect server with a database of its own."""
    from prefect.events.worker import EventsWorker  # noqa: PLC0415 - only tests with a server need it
    from prefect.logging.handlers import APILogWorker  # noqa: PLC0415

    folder, url = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{find_free_ports(1)[0]}/api"
    if is_migrated := prefect_database.exists():
        shutil.copy(prefect_database, folder / "prefect.db")
    # Without the UI and the services that schedule runs.
    environment = {"PREFECT_HOME": str(folder), "PREFECT__SERVER_EPHEMERAL": "1"}
    try:
        start_prefect_server(folder, LocalServices("", url, "", environment))
        if not is_migrated:
            databases = [closing(sqlite3.connect(folder / name)) for name in ("prefect.db", "copy")]
            with databases[0] as database, databases[1] as copy:
                database.backup(copy)
            (folder / "copy").replace(prefect_database)
        with temporary_settings({PREFECT_API_URL: url}):
            yield url
            APILogWorker.drain_all()
            EventsWorker.drain_all()
    finally:
        down(folder)


@pytest.fixture
def prefect_server(prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the flows of a test, and the processes that it starts, use the Prefect server."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)


@pytest.fixture(autouse=True)
def unset_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Configure no server for tests without `prefect_server`, also if another test has started it."""
    is_unchanged = "prefect_server" in request.fixturenames or PREFECT_API_URL.value() is None  # a change takes .03 s
    with nullcontext() if is_unchanged else temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


@pytest.fixture(scope="session", autouse=True)
def isolate_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the settings and the blob cache of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("BOOKWHEEL_") and name not in TEST_VARIABLES]:
            environment.delenv(name)
        environment.delenv("PREFECT_API_URL", raising=False)
        environment.setenv("PREFECT_PROFILES_PATH", str(tmp_path_factory.mktemp("profiles") / "none.toml"))
        environment.setenv("BOOKWHEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        environment.setenv(START_VARIABLE, "1000")  # seconds; no job takes as long, so that no workers start
        environment.chdir(tmp_path_factory.mktemp("working-folder"))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT."""
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with another encoder space."""
    return save_bert(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a recipe with one small graph, and parts so small that the dump has two."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def bookwheel(capfd: pytest.CaptureFixture[str]) -> Bookwheel:
    """Return a function that runs a verb in this process."""

    def run(*argv: object) -> CommandResult:
        capfd.readouterr()
        code = cli.run([str(word) for word in argv])
        return CommandResult(code, *capfd.readouterr())

    return run


@pytest.fixture
def trust_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trust file; its signing key is in the environment."""
    library = Publisher("library")
    (tmp_path / "trusted").write_text(library.trust_line)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, library.pem)
    return tmp_path / "trusted"


@pytest.fixture
def reindex(bookwheel: Bookwheel, mini_dump: Path, tiny: Path, recipe: Path) -> Bookwheel:
    """Return a function that runs `reindex --json` in this process; the default of its `dump` is the small dump."""

    def run(store: object, *flags: object, beam: Sequence[str] = (), **options: object) -> CommandResult:
        named_options = {"dump": mini_dump, "encoder": tiny, "recipe": recipe, **options}
        option_words = [word for name, value in named_options.items() for word in (f"--{name}", value)]
        return bookwheel("reindex", "--store", store, *option_words, *flags, "--json", "--", *beam)

    return run


@pytest.fixture(scope="session")
def executable() -> Path:
    """The installed `bookwheel` command."""
    return Path(sys.executable).with_name("bookwheel")


@pytest.fixture(scope="session")
def command(executable: Path) -> Callable[..., CommandResult]:
    """Return a function that runs a verb in a new process."""

    def run(*argv: object, stdin: str | None = None, **environment: str) -> CommandResult:
        process = subprocess.run(
            [executable, *map(str, argv)],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
            timeout=300,
        )
        return CommandResult(process.returncode, process.stdout, process.stderr)

    return run


@pytest.fixture(scope="session")
def library_build(mini_dump: Path, tiny: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> LibraryBuild:
    """A store with the snapshot of the small dump, and the reply of `reindex`; tests only read it."""
    store, out = tmp_path_factory.mktemp("library"), io.StringIO()
    options = ["--dump", mini_dump, "--encoder", tiny, "--recipe", recipe, "--store", store]
    with redirect_stdout(out):
        assert cli.run(["reindex", *map(str, options), "--json"]) == 0
    return LibraryBuild(store, json.loads(out.getvalue()))


@pytest.fixture
def questions(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with the `QUESTIONS` of the test's module."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in request.module.QUESTIONS))
    return path


@pytest.fixture
def store(library: Path, tmp_path: Path) -> Path:
    """A copy of the library."""
    return Path(shutil.copytree(library, tmp_path / "store"))


@pytest.fixture(scope="session")
def library(library_build: LibraryBuild) -> Path:
    """The store of `library_build`."""
    return library_build.store


@pytest.fixture(scope="session")
def ivf_library(mini_dump: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose snapshot has `ivfpq` as its only index; tests only read it."""
    store = tmp_path_factory.mktemp("ivf")
    recipe = store.with_name("ivf.toml")
    recipe.write_text(RECIPE.replace("[index.hnsw]", "[index.ivfpq]").replace("HNSW8", "IVF,PQ"))
    options = ["--dump", mini_dump, "--encoder", tiny, "--recipe", recipe, "--store", store]
    assert cli.run(["reindex", *map(str, options)]) == 0
    return store
