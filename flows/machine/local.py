"""Run all services on this machine: Prefect, workers, an object store and the deployments.

    python -m flows.machine.local up | down [FOLDER]

`up` starts the services that are not running yet, and prints the addresses. `down` stops exactly
the processes that `up` started, which are identified by number and start time, and keeps the data.
All files are in one folder, by default `.bookwheel`.

Servers get free ports of the loopback interface. A server binds its port some time after the port
was chosen. The ports are below the range that Linux assigns to outgoing connections and for port 0
(`net.ipv4.ip_local_port_range`, from 32768). In that range, a connection of any other program could
take the port before the server binds it, and the server would fail to start.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from flows.demo import QUESTIONS, demo_dump
from flows.stage import WEBHOOK_VARIABLE
from rag_model.atomic_write import atomic_write
from rag_model.errors import BookwheelError, ResourceError, UsageError

_FIRST_PORT, _LAST_PORT = 15_000, 32_767
POOLS = ("bookwheel-cpu", "bookwheel-gpu")
_KEY, _SECRET = "bookwheel", "bookwheel-secret"  # credentials of the local object store
_START_TIMEOUT = 180.0  # seconds until a start counts as failed, twice what a busy machine needs
_STOP_TIMEOUT = 20.0  # seconds between asking a process to end and killing it
_BIN = Path(sys.executable).parent
_DEPLOYMENTS = Path("infra/prefect.yaml")
# A run holds a lease on its deployment's concurrency limit, and ends if it cannot renew the lease.
# Leases must therefore survive a restart of the server, and last longer than the restart.
_LEASE_SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "3600",
}


def find_free_ports(count: int, preferred: int = 0) -> list[int]:
    """Return different free ports, chosen at random; the first is `preferred` if it is free.

    Raises:
        ResourceError: fewer than `count` ports are free.
    """
    port_candidates = [preferred] if preferred else []
    port_candidates += random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT + 1), _LAST_PORT - _FIRST_PORT + 1)
    ports: list[int] = []
    with ExitStack() as sockets:  # stay open, so that no port is chosen twice
        for port in port_candidates:
            if len(ports) == count:
                return ports
            probe_socket = sockets.enter_context(socket.socket())
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe_socket.bind(("127.0.0.1", port))
                ports.append(port)
    raise ResourceError("there are too few free ports on 127.0.0.1: stop other servers")


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """One process that `up` started."""

    name: str
    pid: int  # process id, which is also the id of its process group
    began: str  # start time in kernel ticks, to recognize a later process with the same pid


@dataclass(frozen=True, slots=True)
class LocalServices:
    """The addresses of the services that `up` started."""

    ui: str
    api: str
    store: str
    environment: Mapping[str, str]  # variables with the addresses of the services


def up(
    folder: Path, deployments: Path = _DEPLOYMENTS, on_step: Callable[[str], None] = lambda step: None
) -> LocalServices:
    """Start a server, an object store and workers, deploy the flows, and return the addresses.

    Running processes are not restarted. After a failure, the processes that this call has started
    are stopped.

    Args:
        folder: the folder for data, logs and the list of processes.
        deployments: the file of deployments.
        on_step: called with a sentence before each step, since a step takes up to a minute.

    Raises:
        ResourceError: a process did not start; the message names its log.
        UsageError: the file of deployments is missing.
    """
    if not deployments.is_file():
        raise UsageError(f"there is no {deployments} here: run this in bookwheel's source folder, or name the file")
    # the folder contains the store's credentials
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _list_running(folder):
        return _read_services(folder)
    try:
        on_step("starting an object store, a Prefect server and the workers …")
        # an absolute path, because runs have other working folders
        local_services = _start_services(folder.resolve())
        on_step(f"deploying the flows of {deployments} …")
        _deploy(folder, local_services, deployments)
    except BaseException:
        down(folder)
        raise
    return local_services


def down(folder: Path) -> list[str]:
    """Stop the processes that `up` started in a folder.

    Return the names of the processes that were running.

    Data is kept. Processes are stopped in reverse order, one at a time, because a worker that
    cannot reach its server any more does not end.
    """
    running_processes = _list_running(folder)
    for process in reversed(running_processes):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        _wait_until(partial(_has_ended, process), _STOP_TIMEOUT)
    for process in _list_running(folder):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in running_processes:
        with suppress(ChildProcessError):  # only its parent, such as init, can reap a process
            os.waitpid(process.pid, os.WNOHANG)
    (folder / "processes.json").unlink(missing_ok=True)
    return [process.name for process in running_processes]


def _start_services(folder: Path) -> LocalServices:
    prefect_port, s3_port = find_free_ports(1, 4200)[0], find_free_ports(1, 8333)[0]
    api = f"http://127.0.0.1:{prefect_port}/api"
    server_environment = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        **_LEASE_SETTINGS,
    }
    store, credentials = _start_object_store(folder, s3_port)
    services = LocalServices(
        api.removesuffix("/api"), api, store, {**server_environment, **credentials, "BOOKWHEEL_STORE": store}
    )
    with atomic_write(folder / "places.json") as file:
        file.write_text(json.dumps(asdict(services)))
    start_prefect_server(folder, services)
    for pool in POOLS:  # each worker creates its pool if there is none
        arguments = ["worker", "start", "--pool", pool, "--type", "process", "--limit", "1"]
        _start_process(folder, pool, [str(_BIN / "prefect"), *arguments], services.environment)
    for pool in POOLS:
        _wait_for(folder, pool, partial(_is_reachable, f"{api}/work_pools/{pool}"))
    return services


def start_prefect_server(folder: Path, services: LocalServices) -> None:
    """Start the Prefect server with its database in the folder, and wait until it answers.

    Raises:
        ResourceError: the service did not start; the message names its log.
    """
    address = urlsplit(services.api)
    arguments = ["server", "start", "--host", str(address.hostname), "--port", str(address.port)]
    _start_process(folder, "prefect", [str(_BIN / "prefect"), *arguments], services.environment)
    _wait_for(folder, "prefect", lambda: _is_reachable(f"{services.api}/health"))


def _start_object_store(folder: Path, port: int) -> tuple[str, dict[str, str]]:
    """Start an S3 server with a bucket if one is installed; otherwise use a folder as the store."""
    weed_path = shutil.which("weed", path=os.pathsep.join([str(_BIN), os.environ.get("PATH", "")]))
    if weed_path is None:
        return (folder / "library").resolve().as_uri(), {}
    data_folder = folder / "s3"
    data_folder.mkdir(exist_ok=True)
    identity = {"name": "bookwheel", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    port_options = [
        "s3.port.grpc",
        *(f"{name}.port{kind}" for name in ("master", "volume", "filer") for kind in ("", ".grpc")),
    ]
    server_options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": data_folder,
        "master.telemetry": "false",
        "volume.preStopSeconds": 0,  # stop at once, since no other program reads this store
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port": port,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **dict(zip(port_options, find_free_ports(len(port_options)), strict=True)),
    }
    credentials = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    arguments = [f"-{name}={option}" for name, option in server_options.items()]
    _start_process(folder, "s3", [weed_path, "server", *arguments], credentials)
    health_url = f"{credentials['AWS_ENDPOINT_URL']}/healthz"
    _wait_for(folder, "s3", lambda: _is_reachable(health_url) and _create_bucket(credentials))
    return "s3://library/bookwheel", credentials


def _create_bucket(credentials: Mapping[str, str]) -> bool:
    """Create the bucket; return whether it exists."""
    python_code = "import s3fs; fs = s3fs.S3FileSystem(); fs.mkdir('library') if not fs.exists('library') else None"
    process = subprocess.run(
        [sys.executable, "-c", python_code], env={**os.environ, **credentials}, capture_output=True, check=False
    )
    return process.returncode == 0


def _deploy(folder: Path, services: LocalServices, deployments: Path) -> None:
    downloads_folder = str((folder / "downloads").resolve())
    environment = {
        "BOOKWHEEL_DUMP": _choose_dump(downloads_folder),
        "BOOKWHEEL_DOWNLOADS": downloads_folder,
        "BOOKWHEEL_QUESTIONS": os.environ.get("BOOKWHEEL_QUESTIONS") or str(QUESTIONS),
        **services.environment,
    }
    deploy_arguments = ["--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    _run_program(folder, environment, "prefect", *deploy_arguments)
    if os.environ.get(WEBHOOK_VARIABLE):
        automations_file = str(deployments.with_name("prefect-automations.yaml"))
        _run_program(folder, environment, "python", "-m", "flows.machine.automations", automations_file)


def _choose_dump(downloads: str) -> str:
    """Return the dump of a first run: the demo's dump, or a pattern that matches downloads."""
    if dump := os.environ.get("BOOKWHEEL_DUMP"):
        return dump
    with suppress(BookwheelError):
        return demo_dump()
    return f"{downloads}/*.bz2"


def _start_process(folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file_actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    file_actions += [(os.POSIX_SPAWN_OPEN, stream, str(folder / f"{name}.log"), log_flags, 0o600) for stream in (1, 2)]
    process_environment = {**os.environ, **environment}
    # The automation calls the webhook; runs would call it a second time.
    process_environment.pop(WEBHOOK_VARIABLE, None)
    # `setsid` starts a new process session, since the service outlives this process
    pid = os.posix_spawn(command[0], list(command), process_environment, file_actions=file_actions, setsid=True)
    processes = [*_read_processes(folder), StartedProcess(name, pid, _get_start_time(pid))]
    with atomic_write(folder / "processes.json") as file:
        file.write_text(json.dumps([asdict(process) for process in processes]))


def _run_program(folder: Path, environment: Mapping[str, str], program: str, *arguments: str) -> None:
    """Run a program of this Python environment and wait for its end."""
    command, process_environment = [str(_BIN / program), *arguments], {**os.environ, **environment}
    completed_process = subprocess.run(command, env=process_environment, capture_output=True, text=True, check=False)
    if completed_process.returncode:
        (folder / "prefect-cli.log").write_text(completed_process.stdout + completed_process.stderr)
        raise ResourceError(f"`{program} {' '.join(arguments)}` failed: see {folder / 'prefect-cli.log'}")


def _wait_for(folder: Path, name: str, is_ready: Callable[[], bool]) -> None:
    def has_ended() -> bool:
        return all(process.name != name for process in _list_running(folder))

    if not _wait_until(lambda: is_ready() or has_ended(), _START_TIMEOUT) or has_ended():
        raise ResourceError(f"{name} did not start: see {folder / f'{name}.log'}")


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return is_met


def _read_services(folder: Path) -> LocalServices:
    return LocalServices(**json.loads((folder / "places.json").read_text()))


def _read_processes(folder: Path) -> list[StartedProcess]:
    with suppress(FileNotFoundError):
        return [StartedProcess(**fields) for fields in json.loads((folder / "processes.json").read_text())]
    return []


def _list_running(folder: Path) -> list[StartedProcess]:
    return [process for process in _read_processes(folder) if not _has_ended(process)]


def _has_ended(process: StartedProcess) -> bool:
    return _get_start_time(process.pid) != process.began


def _get_start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks of the kernel.

    Return "" if the process has ended or is a zombie.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _is_reachable(url: str) -> bool:
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


def main(argv: Sequence[str]) -> int:
    """Start or stop the services of a folder; print their addresses."""
    if not argv or argv[0] not in {"up", "down"} or len(argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(argv[1] if len(argv) > 1 else ".bookwheel")
    try:
        if argv[0] == "down":
            print(f"stopped {', '.join(down(folder)) or 'nothing: nothing was running'}")
            return 0
        services = up(folder, on_step=partial(print, file=sys.stderr, flush=True))
    except BookwheelError as error:
        print(f"bookwheel: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"Prefect   {services.ui}/deployments\nstore     {services.store}\nlogs      {folder}\nfor a shell of your own:"
    )
    print("\n".join(f"  export {name}='{value}'" for name, value in services.environment.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
