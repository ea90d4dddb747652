"""A complete bookwheel on this machine: a Prefect server, a worker of its pools, an object store, and the deployments.

    python -m flows.machine.local up | down [FOLDER]

`up` starts what is not running yet and prints the addresses; `down` stops exactly the processes that `up` started,
identified by number and start time, and keeps the data. All files are in one folder, by default `.bookwheel`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from flows.demo import QUESTIONS, demo_dump
from flows.failure import WEBHOOK
from flows.machine.ports import free_ports
from rag_model.errors import BookwheelError, ResourceError, UsageError
from rag_model.landing import landing

POOLS = ("bookwheel-cpu", "bookwheel-gpu")
_KEY, _SECRET = "bookwheel", "bookwheel-secret"
_PATIENCE = 180.0  # seconds until a start counts as failed; a busy machine needs half of it
_GRACE = 20.0  # seconds between asking a process to end and killing it
_BIN = Path(sys.executable).parent
_DEPLOYMENTS = Path("infra/prefect.yaml")
# A run holds a lease on its deployment's limit, and is ended if it cannot renew it: so leases must survive a restart of
# the server, and last longer than the restart.
_LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "3600",
}


@dataclass(frozen=True, slots=True)
class Started:
    """One process that `up` started."""

    name: str
    pid: int  # also its process group's
    began: str  # by the kernel's clock: distinguishes it from a later process with the same number


@dataclass(frozen=True, slots=True)
class Places:
    """The addresses of what `up` started."""

    ui: str
    api: str
    store: str
    environment: Mapping[str, str]  # variables with which `bookwheel` and `prefect` reach them


def up(folder: Path, deployments: Path = _DEPLOYMENTS) -> Places:
    """Start a server, an object store and a worker, deploy the flows, and return their addresses.

    Running processes are not restarted. A failure stops what this call started.

    Raises:
        ResourceError: a process did not start; the message names its log.
        UsageError: there is no such file of deployments.
    """
    if not deployments.is_file():
        raise UsageError(f"there is no {deployments} here: run it in bookwheel's source folder, or name the file")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it contains the store's credentials
    running = _running(folder)
    if running:
        return _places(folder)
    try:
        places = _serve(folder.resolve())  # runs have other working folders
        _deploy(folder, places, deployments)
    except BaseException:
        down(folder)
        raise
    return places


def down(folder: Path) -> list[str]:
    """Stop the processes that `up` started in a folder; return the names of those that were running. Data is kept.

    They are stopped in reverse order, one at a time: a worker that cannot reach its server any more does not end.
    """
    stopped = _running(folder)
    for started in reversed(stopped):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        _until(partial(_ended, started), _GRACE)
    for started in _running(folder):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    for started in stopped:
        with suppress(ChildProcessError):  # not a child of this process: init reaps it
            os.waitpid(started.pid, os.WNOHANG)
    (folder / "processes.json").unlink(missing_ok=True)
    return [started.name for started in stopped]


def _serve(folder: Path) -> Places:
    prefect, s3 = free_ports(1, 4200)[0], free_ports(1, 8333)[0]
    api = f"http://127.0.0.1:{prefect}/api"
    home = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        **_LEASES,
    }
    store, credentials = _object_store(folder, s3)
    places = Places(api.removesuffix("/api"), api, store, {**home, **credentials, "BOOKWHEEL_STORE": store})
    with landing(folder / "places.json") as file:
        file.write_text(json.dumps(asdict(places)))
    serve(folder, places)
    for pool in POOLS:
        _run(folder, places, "prefect", "work-pool", "create", pool, "--type", "process", "--overwrite")
        _start(folder, pool, [str(_BIN / "prefect"), "worker", "start", "--pool", pool, "--limit", "1"], places)
    return places


def serve(folder: Path, places: Places) -> None:
    """Start the Prefect server on its port, with the database in the folder, and wait until it answers.

    Raises:
        ResourceError: it did not start; the message names its log.
    """
    address = urlsplit(places.api)
    told = ["server", "start", "--host", str(address.hostname), "--port", str(address.port)]
    _start(folder, "prefect", [str(_BIN / "prefect"), *told], places)
    _wait(folder, "prefect", lambda: _answers(f"{places.api}/health"))


def _object_store(folder: Path, port: int) -> tuple[str, dict[str, str]]:
    """Start an S3 server if one is installed, with a bucket; otherwise the store is a folder."""
    weed = shutil.which("weed", path=os.pathsep.join([str(_BIN), os.environ.get("PATH", "")]))
    if weed is None:
        return (folder / "library").resolve().as_uri(), {}
    data = folder / "s3"
    data.mkdir(exist_ok=True)
    identity = {"name": "bookwheel", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    doors = [
        "s3.port.grpc",
        *(f"{name}.port{kind}" for name in ("master", "volume", "filer") for kind in ("", ".grpc")),
    ]
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": data,
        "master.telemetry": "false",
        "volume.preStopSeconds": 0,  # there is no other reader to wait for
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port": port,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **dict(zip(doors, free_ports(len(doors)), strict=True)),
    }
    credentials = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    places = Places("", "", "", credentials)
    _start(folder, "s3", [weed, "server", *(f"-{name}={value}" for name, value in options.items())], places)
    health = f"{credentials['AWS_ENDPOINT_URL']}/healthz"
    _wait(folder, "s3", lambda: _answers(health) and _bucket(credentials))
    return "s3://library/bookwheel", credentials


def _bucket(credentials: Mapping[str, str]) -> bool:
    """Create the bucket; return whether it exists."""
    code = "import s3fs; fs = s3fs.S3FileSystem(); fs.mkdir('library') if not fs.exists('library') else None"
    made = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **credentials}, capture_output=True, check=False
    )
    return made.returncode == 0


def _deploy(folder: Path, places: Places, deployments: Path) -> None:
    defaults = {
        "BOOKWHEEL_DUMP": _demo_dump(),
        "BOOKWHEEL_DOWNLOADS": str((folder / "downloads").resolve()),
        "BOOKWHEEL_QUESTIONS": os.environ.get("BOOKWHEEL_QUESTIONS") or str(QUESTIONS),
    }
    told = Places(places.ui, places.api, places.store, {**defaults, **places.environment})
    _run(folder, told, "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments))
    if os.environ.get(WEBHOOK):
        _run(
            folder,
            told,
            "python",
            "-m",
            "flows.machine.automations",
            str(deployments.with_name("prefect-automations.yaml")),
        )


def _demo_dump() -> str:
    """Return the dump for a first run."""
    if named := os.environ.get("BOOKWHEEL_DUMP"):
        return named
    with suppress(BookwheelError):
        return demo_dump()
    return ""


def _start(folder: Path, name: str, command: Sequence[str], places: Places) -> None:
    log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    streams += [(os.POSIX_SPAWN_OPEN, stream, str(folder / f"{name}.log"), log, 0o600) for stream in (1, 2)]
    environment = {**os.environ, **places.environment}
    environment.pop(WEBHOOK, None)  # the automation calls it; runs must not call it again
    # a new session, since it outlives this process
    pid = os.posix_spawn(command[0], list(command), environment, file_actions=streams, setsid=True)
    known = [*_known(folder), Started(name, pid, _began(pid))]
    with landing(folder / "processes.json") as file:
        file.write_text(json.dumps([asdict(started) for started in known]))


def _run(folder: Path, places: Places, program: str, *words: str) -> None:
    """Run a program of this environment once."""
    environment = {**os.environ, **places.environment}
    done = subprocess.run([str(_BIN / program), *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        (folder / "prefect-cli.log").write_text(done.stdout + done.stderr)
        raise ResourceError(f"`{program} {' '.join(words)}` failed: see {folder / 'prefect-cli.log'}")


def _wait(folder: Path, name: str, ready: Callable[[], bool]) -> None:
    def over() -> bool:
        return ready() or all(started.name != name for started in _running(folder))

    if not _until(over, _PATIENCE) or all(started.name != name for started in _running(folder)):
        raise ResourceError(f"{name} did not start: see {folder / f'{name}.log'}")


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := true()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return met


def _places(folder: Path) -> Places:
    return Places(**json.loads((folder / "places.json").read_text()))


def _known(folder: Path) -> list[Started]:
    with suppress(FileNotFoundError):
        return [Started(**value) for value in json.loads((folder / "processes.json").read_text())]
    return []


def _running(folder: Path) -> list[Started]:
    return [started for started in _known(folder) if not _ended(started)]


def _ended(started: Started) -> bool:
    return _began(started.pid) != started.began


def _began(pid: int) -> str:
    """Return the start time of a process, in the kernel's ticks; empty if it has ended, or is a zombie."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _answers(url: str) -> bool:
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def main(argv: Sequence[str]) -> int:
    """Start or stop; print the addresses."""
    if not argv or argv[0] not in {"up", "down"} or len(argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(argv[1] if len(argv) > 1 else ".bookwheel")
    try:
        if argv[0] == "down":
            print(f"stopped {', '.join(down(folder)) or 'nothing: nothing was running'}")
            return 0
        places = up(folder)
    except BookwheelError as failed:
        print(f"bookwheel: {failed}", file=sys.stderr)
        return failed.exit_code
    print(f"Prefect   {places.ui}/deployments\nstore     {places.store}\nlogs      {folder}\nfor a shell of your own:")
    print("\n".join(f"  export {name}='{value}'" for name, value in places.environment.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
