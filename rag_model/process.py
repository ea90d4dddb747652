"""Configure this process: processors, memory allocator, child processes, temporary folders.

**Allocator.** By default glibc returns large blocks to the kernel as soon as they are freed, and
the next layer of a model gets them back one zeroed page at a time. The zeroing costs hundreds of
page faults per passage, and parallel processes wait for one another in the kernel. Processes that
embed or serve therefore keep freed memory (`keep_freed_memory`); vectors do not depend on it.

Training does the opposite (`release_freed_memory`): keeping freed memory made no training step
faster and took 8 % more memory. Even with glibc's defaults, fragmentation wasted a third of a
step's memory, because batches differ in length, long-lived blocks lie between them, and torch's
aligned blocks need larger gaps than their size. Other allocators and C libraries are not changed.

**Children.** A child is `python -m MODULE`, whose last statement is `serve_call(function)` for one
call or `serve_calls(open_function)` for many. It reads JSON arguments and writes a JSON reply to
each; a crash or an exceeded limit ends only the child. The time limit is in CPU seconds: on a
busy machine even a small call can take 20 s. A child that waits instead of computing is killed
after `_ELAPSED_FACTOR` times as many seconds.

**Sizes.** `format_bytes`, `parse_bytes` and `check_disk` format and parse sizes of memory and disk.

**Temporary folders.** A process holds a lock on each of its temporary folders. The kernel releases
the lock when the process ends, even if it is killed, so a later process recognises abandoned
folders and removes them.
"""

import ctypes
import fcntl
import glob
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from rag_model.errors import BookwheelError, ResourceError, UsageError, error_from_dict, error_to_dict

INTERRUPTED = threading.Event()  # set after Ctrl-C: the requests that other threads wait for end
_MIB = 1 << 20
_TEMPORARY_PREFIX = "bookwheel-run-"
_ABANDONED_SECONDS = 60.0  # a younger folder may not be locked yet
# Parameter numbers of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEEP_SETTINGS = {
    _MMAP_THRESHOLD: 32 * _MIB,  # glibc's maximum; larger blocks are mapped and returned at once
    _TRIM_THRESHOLD: 128 * _MIB,  # one MiniLM layer over a batch needs 80 MiB in float32
    _TOP_PAD: 64 * _MIB,  # so that a thread's heap is kept when it is empty; costs no memory itself
}
_RELEASE_SETTINGS = {
    _MMAP_THRESHOLD: 4 * _MIB,  # larger blocks are mapped; mapping small blocks costs too much
    _TRIM_THRESHOLD: _MIB // 8,  # this value and the next are glibc's defaults
    _TOP_PAD: _MIB // 8,
}


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield an empty folder whose name contains `purpose`, and remove it at the end.

    The first call of a process also removes the folders of processes that were killed.
    """
    _remove_abandoned_folders()
    with (
        tempfile.TemporaryDirectory(prefix=f"{_TEMPORARY_PREFIX}{purpose}-", ignore_cleanup_errors=True) as folder_name,
        lock_folder(Path(folder_name)),
    ):
        yield Path(folder_name)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, so that `remove_unlocked_folders` keeps it; the kernel unlocks it if the
    process is killed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@cache
def _remove_abandoned_folders() -> None:
    remove_unlocked_folders(Path(tempfile.gettempdir()), _TEMPORARY_PREFIX)


def remove_unlocked_folders(parent: Path, prefix: str) -> None:
    """Remove the folders with this prefix that killed processes left, except those that changed
    within the last minute.
    """
    for folder in parent.glob(f"{glob.escape(prefix)}*/"):
        # An error means that a process uses or has removed the folder, or another user owns it.
        with suppress(OSError):
            # A new folder may not be locked yet.
            if time.time() - folder.stat().st_mtime < _ABANDONED_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


_MAX_CLAIMS = 64  # maximum claims per GPU; further processes choose a GPU by their process id
_gpu_lock = threading.Lock()


def claim_gpu(count: int) -> int:
    """Return the number of the visible GPU that this process uses; every call returns the same.

    The first call chooses a GPU that no other process of this user has claimed, or else one that
    the fewest processes have claimed. A claim is a lock on a file, which the kernel releases when
    the process ends, even if it is killed.

    Args:
        count: the number of GPUs that CUDA sees, at least 1.
    """
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # An entry names the same GPU in all processes, even if each of them sees other GPUs.
    gpu_names = (
        visible_gpus[:count]
        if len(visible_gpus) >= count > 0 and visible_gpus[0]
        else [str(gpu_number) for gpu_number in range(count)]
    )
    with _gpu_lock:
        return _claim_gpu(os.getpid(), tuple(re.sub(r"\W", "-", gpu_name.strip()) for gpu_name in gpu_names))


@cache
def _claim_gpu(process_id: int, gpu_names: tuple[str, ...]) -> int:
    for lock_number in range(_MAX_CLAIMS):
        for gpu_number, gpu_name in enumerate(gpu_names):
            lock_path = Path(tempfile.gettempdir()) / f"bookwheel-gpu-{os.getuid()}-{gpu_name}-{lock_number}.lock"
            with suppress(OSError):  # another process has the lock, or the folder is read-only
                descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(descriptor)
                    continue
                return gpu_number  # the descriptor stays open as long as the process lives
    return process_id % len(gpu_names)


def configure_native_libraries() -> None:
    """Make Arrow use the C library's allocator, and let OpenBLAS's idle threads sleep, also in
    child processes.

    Call it before Arrow and numpy are imported. Arrow's own allocator keeps the memory that a
    thread freed, even after the thread has ended: `diff` of half a million passages used 340 MB,
    and with this setting 200 MB. OpenBLAS's threads spin while they wait for the next product of matrices, for
    70 ms of CPU time. Environment variables that are already set are not changed.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # spin for 2^4 cycles, the minimum


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations of this process; return whether it does.

    Has no effect if the C library is not glibc, or if the environment chooses an allocator
    (`LD_PRELOAD`) or configures glibc's (`MALLOC_…_`, `GLIBC_TUNABLES`).
    """
    return not is_allocator_configured(os.environ) and _set_keep_options()


def release_freed_memory() -> bool:
    """Make glibc return large blocks to the kernel once freed; return whether it does.

    It reverses `keep_freed_memory`: the last call of the two functions decides for the process.
    """
    _set_keep_options.cache_clear()
    return not is_allocator_configured(os.environ) and _set_malloc_options(_RELEASE_SETTINGS)


def trim_memory() -> None:
    """Return free pages to the kernel, for example after a stage or after a large object is freed.

    Each thread keeps at most 64 MiB of free memory at the end of its heap. Arrow's memory pool is
    trimmed too.
    """
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()
    if libc := _load_glibc():
        libc.malloc_trim(0)


def is_allocator_configured(environment: Mapping[str, str]) -> bool:
    """Return whether an environment chooses another allocator or configures glibc's.

    >>> is_allocator_configured({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})
    True
    >>> is_allocator_configured({"MALLOC_ARENA_MAX": "2"}), is_allocator_configured({"PATH": "/bin"})
    (True, False)
    """
    return (
        "malloc" in environment.get("LD_PRELOAD", "")
        or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
        or any(variable.startswith("MALLOC_") for variable in environment)
    )


@cache
def _set_keep_options() -> bool:
    return _set_malloc_options(_KEEP_SETTINGS)


def _set_malloc_options(settings: Mapping[int, int]) -> bool:
    libc = _load_glibc()
    return libc is not None and all(libc.mallopt(name, value) for name, value in settings.items())


@cache
def _load_glibc() -> Any:
    """Return the C library of this process, or None if it is not glibc."""
    try:
        return ctypes.CDLL(None) if os.confstr("CS_GNU_LIBC_VERSION") else None
    except (ValueError, OSError):  # macOS and musl do not define that name
        return None


_CGROUP = Path("/sys/fs/cgroup")  # control group (version 2) with the limits of the container
CORES_VARIABLE = "BOOKWHEEL_CORES"  # environment variable: number of processors for this run


def count_cores() -> int:
    """Return the number of processors that this process may use, at most `BOOKWHEEL_CORES` if set.

    Raises:
        UsageError: The variable is not a positive whole number.
    """
    n_available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return limit_by_environment(n_available, CORES_VARIABLE, "number of processors")


def get_free_bytes() -> int | None:
    """Return the bytes of free memory of the machine, or of its container if less; None if unknown.

    Free memory includes caches that the kernel can free at once.
    """
    limits = [size for size in (_get_machine_bytes(), _get_container_bytes()) if size is not None]
    return min(limits, default=None)


def _get_machine_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    with suppress(OSError, ValueError):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _get_container_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):  # memory.max is "max" if there is no limit
        limit_bytes, used_bytes = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        reclaimable_bytes = int((_CGROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        return max(0, limit_bytes - used_bytes + reclaimable_bytes)
    return None


_reported_cpu_seconds = list[float]()


def count_cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its children that ended, and those that
    `report_cpu_seconds` added.
    """
    return sum(os.times()[:4]) + sum(_reported_cpu_seconds)


def report_cpu_seconds(seconds: float) -> None:
    """Add CPU seconds of processes that are not children of this one, such as forked workers."""
    _reported_cpu_seconds.append(seconds)


def limit_by_environment(n_available: int, variable: str, description: str) -> int:
    """Return `n_available`, or the value of an environment variable if it is set and smaller.

    Raises:
        UsageError: The variable is not a whole number of at least 1; `description` says what it
            means.
    """
    text = os.environ.get(variable)
    if not text:
        return n_available
    with suppress(ValueError):
        if (limit := int(text)) > 0:
            return min(limit, n_available)
    raise UsageError(f"{variable} is {text!r}: set it to a {description}, at least 1, or unset it")


_EXIT_SECONDS = 2.0  # time that a child has to end after it has closed its output
_ELAPSED_FACTOR = 10  # limit of a child's elapsed time, as a multiple of its CPU time limit
# A terminal or a service manager sends these signals to all processes when it stops the parent.
_STOP_SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


class ChildDiedError(BookwheelError):
    """The child crashed, timed out or ran out of memory; the message starts with a verb."""


def run_in_child(module: str, value: Any, *, seconds: float, memory: int) -> Any:
    """Call a function in a child process and return its result.

    Args:
        module: module to run; its last statement is `serve_call(function)`.
        value: argument of the function, a JSON value.
        seconds: CPU seconds that the child may use. The child is killed if it needs more, or if
            `_ELAPSED_FACTOR` times as many seconds pass.
        memory: bytes that the child may allocate in addition to Python and its modules; mapped
            files do not count.

    Raises:
        BookwheelError: The function raised this error, or another process stopped the child.
        ChildDiedError: The child crashed or exceeded a limit.
    """
    worker = ChildWorker(module, None, memory=memory)
    try:
        return worker.call(value, seconds)
    finally:
        worker.close()


class ChildWorker:
    """A child process that executes many calls, each with a limit of CPU time. Thread-safe.

    The child ends when this object is deleted or this process ends. If a call exceeds a limit, the
    child is killed, and the next call starts another child.
    """

    def __init__(self, module: str, state: Any, *, memory: int) -> None:
        """Store how to start the child; the first call starts it.

        Args:
            module: module to run; its last statement is `serve_calls(open_function)` or, without a
                state, `serve_call(function)`.
            state: JSON value that the child passes to `open_function`, once.
            memory: bytes that the child may allocate in addition to Python and its modules.
        """
        self._module, self._request, self._memory = module, {"state": state, "memory": memory}, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._granted_seconds = 0.0  # sum of the CPU limits of all calls to the process
        self._lock = threading.Lock()
        self._finalizer: Any = None

    def call(self, value: Any, seconds: float) -> Any:
        """Call the function of the child, and return its result.

        `seconds` are CPU seconds, as for `run_in_child`.

        Raises:
            BookwheelError: The function raised this error, or another process stopped the child.
            ChildDiedError: The child crashed or exceeded a limit.
        """
        with self._lock:
            # The user's limit (`ulimit -t`) counts the CPU seconds of all calls to a process, so a
            # new process starts before it could end a call that stays within its own limit.
            hard_limit = _get_hard_cpu_limit()
            if hard_limit != resource.RLIM_INFINITY and self._granted_seconds + seconds > hard_limit:
                self.close()
            process = self._process or self._start()
            self._granted_seconds += seconds
            is_late = threading.Event()
            timer = threading.Timer(_ELAPSED_FACTOR * seconds, _kill_late_process, (process, is_late))
            timer.start()
            try:
                _write_line(process.stdin, {"value": value, "seconds": seconds})
                line = process.stdout.readline() if process.stdout else b""
            except OSError:
                line = b""
            finally:
                timer.cancel()
            if line:
                return _parse_reply(line, self._memory)
            # `close` would kill a child that is ending by itself
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
            self.close()
        if is_late.is_set():
            raise ChildDiedError(f"did not end within {_ELAPSED_FACTOR * seconds:.0f} s")
        if process.returncode == -signal.SIGXCPU:
            raise ChildDiedError(f"took more than {seconds:.0f} s of CPU time")
        if process.returncode < 0:
            signal_name = signal.Signals(-process.returncode).name
            if -process.returncode in _STOP_SIGNALS:
                raise BookwheelError(f"a child process got {signal_name}, a request to stop: run it again")
            raise ChildDiedError(f"was ended by {signal_name}")
        raise ChildDiedError("ended without a reply")

    def _start(self) -> "subprocess.Popen[bytes]":
        search_path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # GPU memory cannot be limited and belongs to the parent.
            env=os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._process, self._finalizer = process, weakref.finalize(self, _end_process, process)
        with suppress(OSError):  # if the child died, the following call reports how
            _write_line(process.stdin, self._request)
        return process

    def close(self) -> None:
        """End the child; another call starts another child."""
        if self._finalizer is not None:
            self._finalizer()
        self._process, self._granted_seconds = None, 0.0


def _kill_late_process(process: "subprocess.Popen[bytes]", is_late: threading.Event) -> None:
    is_late.set()
    process.kill()


def _write_line(stream: Any, message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _parse_reply(output: bytes, memory: int) -> Any:
    try:
        reply = json.loads(output)
        error_name, reply_value = reply["error"], reply["value"]
    except (ValueError, KeyError, TypeError) as error:
        raise ChildDiedError("ended without a reply") from error
    if error_name == "MemoryError":
        raise ChildDiedError(f"needed more than {memory / (1 << 20):,.0f} MiB of memory")
    if error_name:
        raise error_from_dict(error_name, reply_value)
    return reply_value


def serve_call(function: Callable[[Any], Any]) -> None:
    """Execute the calls of `run_in_child`, or of a `ChildWorker` without a state."""
    serve_calls(lambda _: function)


def serve_calls(open_function: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Execute the calls of a `ChildWorker`: open the function once, and write one line per call."""
    reply_stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # From here on, libraries print to standard error, so their output does not mix with replies.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    open_request = json.loads(sys.stdin.buffer.readline())
    _limit_resources(open_request["memory"])
    opened_functions: list[Callable[[Any], Any]] = []

    def open_and_call(value: Any) -> Any:
        if not opened_functions:
            opened_functions.append(open_function(open_request["state"]))
        return opened_functions[0](value)

    for line in sys.stdin.buffer:
        call_message = json.loads(line)
        _limit_time(call_message["seconds"])
        reply = _answer_call(open_and_call, call_message["value"])
        signal.alarm(0)
        reply_stream.write(reply + "\n")
        reply_stream.flush()


def _limit_time(seconds: float) -> None:
    """Let the kernel end this process when a call exceeds a limit, even if the parent was killed.

    `run_in_child` describes the limits. `signal.alarm(0)` removes the limit of elapsed time.
    """
    hard_limit = _get_hard_cpu_limit()
    cpu_limit = max(ceil(time.process_time() + seconds), 1)
    if hard_limit != resource.RLIM_INFINITY:
        cpu_limit = min(cpu_limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, hard_limit))
    signal.alarm(ceil(_ELAPSED_FACTOR * seconds) + 1)


def _get_hard_cpu_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_CPU)[1]


def _limit_resources(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_get_data_bytes() + memory,) * 2)


def _answer_call(function: Callable[[Any], Any], argument: Any) -> str:
    """Return the reply to a call as JSON: its result or its error."""
    try:
        error_name, reply_value = "", function(argument)
    except MemoryError:
        error_name, reply_value = "MemoryError", ""
    except BookwheelError as error:
        error_name, reply_value = (
            ("MemoryError", "") if isinstance(error.__cause__, MemoryError) else error_to_dict(error).values()
        )
    except Exception as error:
        error_name, reply_value = "InputError", f"{type(error).__name__}: {error}"
    return json.dumps({"error": error_name, "value": reply_value})


# constants of the kernel's prctl.h and seccomp.h
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2
_IO_URING_SETUP = 425  # this call can open sockets too; its number is the same on all processors
# return values of a seccomp filter; `_REFUSE` makes the system call fail with EPERM
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
# By processor type: its number in the kernel's audit.h, and the number of the system call `socket`.
_SOCKET_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _SocketFilter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def block_sockets() -> bool:
    """Forbid this process to open sockets from now on; return whether the kernel enforces it.

    Linux enforces it on x86-64 and arm64. Threads that already run can still open sockets, so call
    it before any library is imported.
    """
    if sys.platform != "linux" or platform.machine() not in _SOCKET_CALLS:
        return False
    architecture_code, socket_call_number = _SOCKET_CALLS[platform.machine()]
    load_op, jump_if_equal_op, return_op_code = 0x20, 0x15, 0x06
    bpf_code = (
        (load_op, 0, 0, 4),  # load the number of the processor type
        (jump_if_equal_op, 0, 3, architecture_code),
        (load_op, 0, 0, 0),  # load the number of the system call
        (jump_if_equal_op, 2, 0, socket_call_number),
        (jump_if_equal_op, 1, 0, _IO_URING_SETUP),
        (return_op_code, 0, 0, _ALLOW),
        (return_op_code, 0, 0, _REFUSE),
    )
    instructions = (_Instruction * len(bpf_code))(*(_Instruction(*fields) for fields in bpf_code))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(_SocketFilter(len(bpf_code), instructions))) == 0
    )


def _get_data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts for this process; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


_POWER_BY_PREFIX = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BYTES_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 16GB is 16 * 1000^3, 512MiB is 512 * 1024^2, 512 is bytes.

    >>> parse_bytes("512MiB")
    536870912

    Raises:
        UsageError: the text is not an amount, or is 0.
    """
    match = _BYTES_PATTERN.fullmatch(text.strip())
    n_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWER_BY_PREFIX[match[2].upper()]) if match else 0
    if n_bytes < 1:
        raise UsageError(f"{text!r} is not an amount of memory: give one such as 16GB, 512MiB, or a number of bytes")
    return n_bytes


def format_bytes(count: float) -> str:
    """Format a number of bytes as GB, or as MB below 1 GB: 16.0 GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def check_disk(folder: Path, size: int, work: str, alternative: str) -> None:
    """Check that a folder's disk has `size` bytes free.

    Args:
        folder: the folder to write into.
        size: the bytes needed.
        work: the work that needs these bytes; it becomes the subject of the error message.
        alternative: what users can do instead of freeing space; it ends the error message.

    Raises:
        ResourceError: less than `size` bytes are free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if size > free_bytes:
        raise ResourceError(
            f"{work} needs {format_bytes(size)} of disk in {folder}, and "
            f"{format_bytes(free_bytes)} are free: free some, or {alternative}"
        )
