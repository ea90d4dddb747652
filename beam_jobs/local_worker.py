"""Fork local worker processes from one process that has already imported Beam and the jobs.

Otherwise each worker of each job would spend more than a second of CPU time on these imports.
The first job of a launcher starts a fork server, `python -m beam_jobs.local_worker`. The fork
server reads a request for each worker from standard input. To standard output it writes the exit
code of each worker, and the CPU seconds of the server and of its workers so far. The server exits
when its input is closed, which also happens if the launcher is killed. Each worker exits when its
launcher's lock is released (see `workers`).
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from google.protobuf import json_format, text_format

from beam_jobs.workers import hide_unused_modules, prevent_pandas_import
from rag_model.process import report_cpu_seconds

with hide_unused_modules():
    from apache_beam.runners.portability.fn_api_runner import worker_handlers
    from apache_beam.runners.worker import sdk_worker_main
    from apache_beam.transforms.environments import SubprocessSDKEnvironment

WORKER_DIED = "Worker process exited with code"
_URN = "bookwheel:environment:forked:v1"
_READ_BYTES = 1 << 16
_PRELOADED_JOBS = ("pipeline", "chunk", "embed", "index", "gate")


class ForkedEnvironment(SubprocessSDKEnvironment):
    """Beam's environment for forked workers; its command string is the path of their log file."""

    def to_runner_api_parameter(self, context: Any) -> tuple[str, bytes]:
        """Return the name under which `ForkedWorkerHandler` is registered, and the log file."""
        return _URN, self.command_string.encode()


@worker_handlers.WorkerHandler.register_environment(_URN, bytes)
class ForkedWorkerHandler(worker_handlers.GrpcWorkerHandler):
    """Starts one worker of a job, and reports its death as an exception in a thread."""

    def __init__(self, log: bytes, *beam_arguments: Any) -> None:
        super().__init__(*beam_arguments)
        self._log = log.decode()
        self._thread = threading.Thread(target=self._wait_for_exit, name="run_worker")

    def start_worker(self) -> None:
        """Fork the worker, whose log messages go to the log file as well."""
        control_service = self.control_api_service_descriptor()
        pipeline_options = self.provision_info.provision_info.pipeline_options
        variables = {
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(control_service),
            "PIPELINE_OPTIONS": json_format.MessageToJson(pipeline_options),
            "WORKER_ID": self.worker_id,
        }
        fork_server = ForkServer.get(self._log)
        self._exit_code_queue = fork_server.start_worker({**os.environ, **variables}, self._log)
        self._thread.start()

    def stop_worker(self) -> None:
        """Wait until the worker ends."""
        self._thread.join()

    def _wait_for_exit(self) -> None:
        if exit_code := self._exit_code_queue.get():
            raise RuntimeError(f"{WORKER_DIED} {exit_code}")


class ForkServer:
    """The process that forks the workers of this launcher."""

    _lock = threading.Lock()
    _instance: "ForkServer | None" = None

    def __init__(self, log_path: str) -> None:
        """Start the process; errors of the fork server itself go to the file `log_path`."""
        self._launcher_pid = os.getpid()
        self._queues: list[SimpleQueue[int]] = []
        with Path(log_path).open("ab") as error_log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "beam_jobs.local_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error_log,
                text=True,
            )
        threading.Thread(target=self._read_exit_codes, daemon=True, name="fork-server").start()
        atexit.register(self._process.kill)

    @classmethod
    def get(cls, log_path: str) -> "ForkServer":
        """Return the fork server of this process; start it if there is none."""
        with cls._lock:
            server = cls._instance
            if server is None or not server._is_running():
                server = cls._instance = cls(log_path)
            return server

    def _is_running(self) -> bool:
        """Return False also in forks of the launcher, which must not use the server's pipes."""
        return self._launcher_pid == os.getpid() and self._process.poll() is None

    def start_worker(self, environment: Mapping[str, str], log_path: str) -> SimpleQueue[int]:
        """Fork a worker; return the queue into which its exit code is put."""
        assert self._process.stdin is not None
        with self._lock:
            request = len(self._queues), dict(environment), _get_current_folder(), log_path
            self._queues.append(SimpleQueue())
            self._process.stdin.write(f"{json.dumps(request)}\n")
            self._process.stdin.flush()
            return self._queues[-1]

    def _read_exit_codes(self) -> None:
        assert self._process.stdout is not None
        reported_seconds = 0.0
        for line in self._process.stdout:
            request_number, exit_code, cpu_seconds = line.split()
            report_cpu_seconds(float(cpu_seconds) - reported_seconds)
            reported_seconds = float(cpu_seconds)
            self._queues[int(request_number)].put(int(exit_code))
        # The server died, so its workers get its exit code. Workers that ended earlier get it too,
        # but nothing reads their queues again.
        server_exit_code = self._process.wait()
        for queue in self._queues:
            queue.put(server_exit_code or 1)


def _get_current_folder() -> str:
    """Return the current folder; return "" if the folder was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def serve_requests() -> None:
    """Fork a worker for each request on standard input, until standard input ends."""
    prevent_pandas_import()
    for name in _PRELOADED_JOBS:
        import_module(f"beam_jobs.{name}")
    gc.freeze()  # otherwise garbage collection in workers would copy shared memory
    # On an interrupt, the launcher decides which workers stop, so this process ignores it.
    interrupt_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If a worker exits just before a read starts, the signal does not interrupt the read, so each
    # exit also writes a byte, for which `select` waits.
    exit_signals, signal_writer = os.pipe()
    os.set_blocking(signal_writer, False)
    signal.set_wakeup_fd(signal_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    request_by_pid: dict[int, int] = {}  # request numbers by process id
    partial_line = b""
    while True:
        readable_descriptors, _, _ = select.select([0, exit_signals], [], [])
        if exit_signals in readable_descriptors:
            os.read(exit_signals, _READ_BYTES)
            _report_exits(request_by_pid)
        if 0 in readable_descriptors:
            if not (request_bytes := os.read(0, _READ_BYTES)):
                return
            *lines, partial_line = (partial_line + request_bytes).split(b"\n")
            for request_line in lines:
                request_number, *arguments = json.loads(request_line)
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, interrupt_handler)
                    _run_worker(*arguments)
                request_by_pid[pid] = request_number


def _report_exits(request_by_pid: dict[int, int]) -> None:
    with suppress(OSError):  # there are no more children, or the launcher has ended
        while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            exit_code = os.waitstatus_to_exitcode(pid_and_status[1])
            # seconds of this process and of all workers that ended
            cpu_seconds = sum(os.times()[:4])
            request_number = request_by_pid.pop(pid_and_status[0])
            os.write(1, f"{request_number} {exit_code} {cpu_seconds}\n".encode())


def _run_worker(environment: Mapping[str, str], folder: str, log_path: str) -> NoReturn:
    exit_code = 1
    try:
        output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor, source in enumerate([os.open(os.devnull, os.O_RDONLY), output, output]):
            os.dup2(source, descriptor)
        os.environ.clear()
        os.environ.update(environment)
        if folder:
            os.chdir(folder)
        # The launcher may have changed its folder or `PYTHONPATH` since the server started.
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        if sys.flags.safe_path:
            sys.path[:0] = paths
        else:
            sys.path[:1] = [folder, *paths]
        sdk_worker_main.main(sys.argv)  # type: ignore[no-untyped-call]
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    serve_requests()
