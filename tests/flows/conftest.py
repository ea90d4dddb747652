"""A small real dump, a tiny real encoder, the command line in this process or not, and a Prefect server if asked for.

Most tests run the flow as the command runs a small job, without workers. `tests/beam_jobs`, and the tests that name
a runner or a number of workers, have Beam run it; of these `IN_PROCESS` starts fastest. Most run it without a Prefect
server, as the command does where none is configured; at least one test of every flow, and all that look at what Prefect
shows, ask for `prefect_server`.
"""

import base64
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
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from beam_jobs.workers import START_VARIABLE
from flows import cli
from flows.machine.local import LocalServices, down, find_free_ports, start_prefect_server
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE

for _name, _value in cli._ENVIRONMENT.items():  # as the command does, before Prefect and transformers are imported
    os.environ.setdefault(_name, _value)
os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "300")  # seconds; a busy machine's server takes more than 60

from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: E402

from tests.fixtures.machine_requirements import OF_TESTS  # noqa: E402
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
        """The error sentence: one line without a stack trace, after progress lines only."""
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
    """The path of a migrated database, which `prefect_url` writes for later servers, also of this user's later runs.

    A server without a database creates one in more than a hundred migrations, which take 4 CPU seconds.
    """
    folder = tmp_path_factory.getbasetemp()
    user_folders = (parent for parent in folder.parents if parent.name.startswith("pytest-of-"))
    return next(user_folders, folder) / f"prefect-{version('prefect')}.db"


@pytest.fixture(scope="session")
def prefect_url(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one real Prefect server, on a database of its own."""
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
    """Let this test's flows, and the processes it starts, use the Prefect server."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)


@pytest.fixture(autouse=True)
def no_other_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without `prefect_server` no server is configured, whether or not another test has started one."""
    unchanged = "prefect_server" in request.fixturenames or PREFECT_API_URL.value() is None  # other settings take .03 s
    with nullcontext() if unchanged else temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting and no cached blob of the person who runs the tests reaches them."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("BOOKWHEEL_") and name not in OF_TESTS]:
            environment.delenv(name)
        environment.delenv("PREFECT_API_URL", raising=False)
        environment.setenv("PREFECT_PROFILES_PATH", str(tmp_path_factory.mktemp("profiles") / "none.toml"))
        environment.setenv("BOOKWHEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        environment.setenv(START_VARIABLE, "1000")  # seconds: no job is so long that workers start unasked
        environment.chdir(tmp_path_factory.mktemp("here"))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT."""
    return save_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of another space."""
    return save_bert(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small graph, and parts so small that there are two."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def bookwheel(capfd: pytest.CaptureFixture[str]) -> Bookwheel:
    """Run a verb in this process."""

    def run(*argv: object) -> CommandResult:
        capfd.readouterr()
        code = cli.run([str(word) for word in argv])
        return CommandResult(code, *capfd.readouterr())

    return run


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trust file, whose signing key is in the environment."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "trusted").write_text(f"library {base64.b64encode(public).decode()}\n")
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, pem)
    return tmp_path / "trusted"


@pytest.fixture
def reindex(bookwheel: Bookwheel, mini_dump: Path, tiny: Path, recipe: Path) -> Bookwheel:
    """Run `reindex --json` in this process, over the small dump unless told otherwise: `reindex(store, dump=…)`."""

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
    """Run a verb as people do, in a process of its own."""

    def run(*argv: object, stdin: str | None = None, **environment: str) -> CommandResult:
        done = subprocess.run(
            [executable, *map(str, argv)],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
            timeout=300,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

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
    """A file of the `QUESTIONS` of the test's module."""
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
    """A store whose snapshot has no graph: its one index is `ivfpq`; tests only read it."""
    store = tmp_path_factory.mktemp("lists")
    recipe = store.with_name("lists.toml")
    recipe.write_text(RECIPE.replace("[index.hnsw]", "[index.ivfpq]").replace("HNSW8", "IVF,PQ"))
    options = ["--dump", mini_dump, "--encoder", tiny, "--recipe", recipe, "--store", store]
    assert cli.run(["reindex", *map(str, options)]) == 0
    return store
