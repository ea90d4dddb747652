"""Determine where the workers of a run are, their number, memory and start-up time.

Beam is not imported here, because that takes a second and a small rebuild does not need it.

A lock ties local worker processes to the launcher that started them. The launcher holds an
exclusive lock on a file while its job runs, and every worker waits for that lock in a thread. The
kernel releases the lock when the launcher ends, even by `kill -9`, and a worker that gets the lock
exits at once. So no worker is left running, and no worker has to poll.

If a deployment starts a run, its Beam options are the operator's defaults and options from the
form. The operator sets the defaults, and which options a form may set, in the environment of the
worker. `BOOKWHEEL_BEAM_OPTIONS` has the options of every run, as on Beam's command line, for
example `--runner=FlinkRunner --flink_master=flink:8081`; bookwheel's command line uses them too if
a command names no options. The form may set sizes and numbers, but no option that names code, a
file, a host or a credential. `BOOKWHEEL_ALLOWED_BEAM_OPTIONS` allows further options: by name, or
as `name=value` with this value only.
"""

import fcntl
import os
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path

import pyarrow as pa

from rag_model.errors import UsageError
from rag_model.extras import get_versions, hide_modules
from rag_model.process import count_cores, get_free_bytes, limit_by_environment, temporary_folder

CPU_FLOAT32 = "cpu float32"
# device types and dtypes that encoders use by default, depending on the machine
PRECISIONS = (CPU_FLOAT32, "cpu bfloat16", "cuda bfloat16")
_GPU_DEVICE = re.compile(r"nvidia[0-9]+")
_WORKERS_OPTION = "--direct_num_workers"
_RUNNER_OPTION = "--runner"
# bytes of memory that the launcher grants to this process
MEMORY_VARIABLE = "BOOKWHEEL_WORKER_MEMORY"
START_VARIABLE = "BOOKWHEEL_START_SECONDS"
# for a job of fewer core seconds, starting local workers costs more time than they save
LOCAL_START_SECONDS = 4.0
# More than half of Beam's import time is spent on importing pandas and the installed cloud clients.
# Jobs do not need them, because they read dumps and stores without Beam.
UNUSED_MODULES = (
    "apache_beam.io.aws.s3filesystem",
    "apache_beam.io.azure.blobstoragefilesystem",
    "apache_beam.io.gcp.bigquery",
    "apache_beam.io.gcp.gcsfilesystem",
    "apache_beam.io.hadoopfilesystem",
    "pandas",
)
# core seconds that an empty job on a cluster was measured to take
_START_SECONDS = {"flink": 10.0, "spark": 17.0}
ALLOWED_VARIABLE = "BOOKWHEEL_ALLOWED_BEAM_OPTIONS"
DEFAULT_VARIABLE = "BOOKWHEEL_BEAM_OPTIONS"
# Beam's options that a form may always set.
_SIZE_OPTIONS = frozenset([
    "autoscaling_algorithm", "default_sdk_harness_log_level", "direct_num_workers",
    "direct_running_mode", "disk_size_gb", "element_processing_timeout_minutes", "flexrs_goal",
    "flink_version", "job_server_timeout", "max_cache_memory_usage_mb", "max_num_workers",
    "max_parallelism", "num_workers", "number_of_worker_harness_threads", "parallelism",
    "sdk_worker_parallelism", "spark_version", "worker_machine_type",
])  # fmt: skip
# Beam's own runners. Beam imports any other name as a class, which may be in any module.
_RUNNERS = frozenset([
    "DataflowRunner", "DirectRunner", "FlinkRunner", "FnApiRunner", "PortableRunner",
    "SparkRunner", "SwitchingDirectRunner",
])  # fmt: skip


def is_local(flags: Sequence[str]) -> bool:
    """Return whether workers are processes on this machine: if Beam's flags name no `--runner`."""
    return _find_runner(flags) is None


def _find_runner(flags: Sequence[str]) -> str | None:
    """Return the last runner in Beam's flags without its module: `flink` for `FlinkRunner`."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    runners = [runner for word, runner in pairwise([*words, ""]) if word == _RUNNER_OPTION]
    return runners[-1].lower().rpartition(".")[2].removesuffix("runner") if runners else None


def hide_unused_modules() -> AbstractContextManager[None]:
    """Block imports of `UNUSED_MODULES` while Beam is imported; afterwards they can be imported."""
    return hide_modules(*UNUSED_MODULES)


def prevent_pandas_import() -> None:
    """Prevent Arrow from importing pandas when it converts its first list.

    This works because Arrow tries to import pandas only once. Conversions of tables to data frames
    still import pandas.
    """
    with hide_modules("pandas"):
        pa.array([0])


def import_beam(flags: Sequence[str]) -> None:
    """Import Beam; if the workers are local, without `UNUSED_MODULES`.

    Other runners may stage files in a cloud, so they need the cloud clients in `UNUSED_MODULES`.
    """
    if is_local(flags):
        with hide_unused_modules():
            import_module("apache_beam")
        return
    for name in ("apache_beam", *UNUSED_MODULES):
        with suppress(ImportError):
            import_module(name)


def get_start_seconds(flags: Sequence[str]) -> float:
    """Return the minimum core seconds of a job for which the workers of its runner are started.

    `BOOKWHEEL_START_SECONDS` sets this number for every runner. By default it is 0 for runners that
    were not measured, so that every job goes to workers.

    Raises:
        UsageError: the variable is not a number of seconds.
    """
    value = os.environ.get(START_VARIABLE)
    if value is None:
        return LOCAL_START_SECONDS if is_local(flags) else _START_SECONDS.get(_find_runner(flags) or "", 0.0)
    with suppress(ValueError):
        if (seconds := float(value)) >= 0:
            return seconds
    raise UsageError(
        f"{START_VARIABLE} is {value!r}: set it to a number of seconds, 0 gives every job to workers, or unset it"
    )


def sets_worker_count(flags: Sequence[str]) -> bool:
    """Return whether Beam's flags set the number of local workers."""
    return any(flag.partition("=")[0] == _WORKERS_OPTION for flag in flags)


def limit_workers(flags: Sequence[str], task_bytes: int, memory_bytes: int | None = None) -> tuple[str, ...]:
    """Return flags that limit the number of local workers to as many as fit in memory; other
    runners are not limited.

    Args:
        flags: Beam's flags; a number of workers in them is kept.
        task_bytes: memory of one task.
        memory_bytes: memory of all workers; None uses the free memory.
    """
    free_bytes = get_worker_memory(flags)
    if free_bytes is None or sets_worker_count(flags):
        return tuple(flags)
    n_workers = max(1, (memory_bytes or free_bytes) // task_bytes)
    return (*flags, f"{_WORKERS_OPTION}={n_workers}") if n_workers < count_cores() else tuple(flags)


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that a local worker may use, without importing torch.

    This counts the files of the NVIDIA driver in `devices`, limited to as many as
    `CUDA_VISIBLE_DEVICES` names. The number is 0 if torch is built without CUDA.
    """
    n_gpus = len([path for path in devices.glob("nvidia*") if _GPU_DEVICE.fullmatch(path.name)])
    device_ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device_ids is not None:  # CUDA ignores all entries after an invalid one
        visible_gpus = takewhile(lambda device: device.strip() not in {"", "-1", "NoDevFiles"}, device_ids.split(","))
        n_gpus = min(n_gpus, len([*visible_gpus]))
    return 0 if "+cpu" in get_versions("torch")["torch"] else n_gpus


def detect_precision(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the default device type and dtype of encoders in this process, such as `cuda
    bfloat16`, without importing torch.

    torch uses bfloat16 on GPUs and on processors with AVX512-BF16; see `choose_fastest_dtype`.
    """
    if count_gpus():
        return "cuda bfloat16"
    with suppress(OSError):
        has_bf16 = "avx512_bf16" in cpu_info.read_text().split()
        if has_bf16 and os.environ.get("ATEN_CPU_CAPABILITY", "avx512") not in {"avx2", "default"}:
            return "cpu bfloat16"
    return CPU_FLOAT32


def limit_to_gpus(flags: Sequence[str], n_gpus: int) -> tuple[str, ...]:
    """Return flags that start one local worker for each of `n_gpus` GPUs; the given flags if
    `n_gpus` is 0.

    Two processes on one GPU would wait for each other, and each would need memory for a model and a
    cache. A number of workers below `n_gpus` in Beam's flags is kept.
    """
    if not n_gpus or not is_local(flags):
        return tuple(flags)
    other_flags = [flag for flag in flags if flag.partition("=")[0] != _WORKERS_OPTION]
    worker_counts = [int(flag.partition("=")[2]) for flag in flags if flag.startswith(f"{_WORKERS_OPTION}=")]
    return (
        *other_flags,
        f"{_WORKERS_OPTION}={min([n_gpus, *(worker_count for worker_count in worker_counts if worker_count > 0)])}",
    )


def get_worker_memory(flags: Sequence[str]) -> int | None:
    """Return the bytes of memory that are free for workers, at most `BOOKWHEEL_WORKER_MEMORY` if it is
    set; None if workers run on other machines, or if the free memory is unknown.

    Raises:
        UsageError: the variable is not a number of bytes.
    """
    free_bytes = get_free_bytes() if is_local(flags) else None
    return None if free_bytes is None else limit_by_environment(free_bytes, MEMORY_VARIABLE, "number of bytes")


@contextmanager
def hold_launcher_lock() -> Iterator[Path]:
    """Lock a new file while the block runs; yield its path, for the workers to wait on."""
    with temporary_folder("lease") as folder, (folder / "lock").open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield Path(file.name)


def exit_with_launcher(lock: Path) -> None:
    """End this process as soon as the launcher that holds `lock` has ended; returns at once."""
    threading.Thread(target=_wait_and_exit, args=(lock,), daemon=True, name="launcher lock").start()


def _wait_and_exit(lock: Path) -> None:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        pass  # deleted before this worker started: the launcher has ended
    os._exit(1)


def resolve_options(form_options: Sequence[str]) -> tuple[str, ...]:
    """Return Beam's options for a deployment's run: the operator's options, then the form's.

    If an option is set twice, Beam takes the last value. Options that this function has returned
    before are returned unchanged.

    Raises:
        UsageError: as for `refuse_unlisted`.
    """
    options, default_options = tuple(form_options), read_default_options()
    refuse_unlisted(options)
    is_resolved = options[: len(default_options)] == default_options
    return options if is_resolved else (*default_options, *options)


def refuse_unlisted(flags: Sequence[str]) -> None:
    """Check that a form is allowed to set all of these options.

    A form may repeat the operator's defaults with the same values. Option names must match in full,
    although Beam's parser would also accept unambiguous prefixes.

    Raises:
        UsageError: an option is not allowed, or `BOOKWHEEL_BEAM_OPTIONS` or
            `BOOKWHEEL_ALLOWED_BEAM_OPTIONS` cannot be parsed.
    """
    allowed_by_operator = {option.removeprefix("--") for option in _read_words(ALLOWED_VARIABLE)}
    allowed_by_operator |= {f"{name}={value}" for name, value in _iter_options(read_default_options())}
    for name, option_value in _iter_options(flags):
        is_allowed = name in _SIZE_OPTIONS or (name == "runner" and option_value in _RUNNERS)
        if not is_allowed and not allowed_by_operator & {name, f"{name}={option_value}"}:
            raise UsageError(
                f"a form may not set Beam's option {name[:60]!r} to this value: to allow it, set "
                f"{ALLOWED_VARIABLE}={name[:60]} in the worker's environment"
            )


def read_default_options() -> tuple[str, ...]:
    """Return the Beam options that the operator sets for every run in the environment.

    Raises:
        UsageError: the variable cannot be parsed, or does not begin with an option.
    """
    options = tuple(_read_words(DEFAULT_VARIABLE))
    if options and not options[0].startswith("--"):
        raise UsageError(
            f"{DEFAULT_VARIABLE} begins with {options[0][:60]!r}, but Beam's options begin with "
            f"--: write it as --{options[0][:60]}, or allow it in forms with {ALLOWED_VARIABLE}"
        )
    return options


def _read_words(variable: str) -> list[str]:
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UsageError(f"{variable} cannot be read ({error}): separate options by spaces and quote values") from error


def _iter_options(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option's name and value; the value may be the next flag (`--runner
    FlinkRunner`).
    """
    remaining_flags = list(flags)
    while remaining_flags:
        name, equals_sign, option = remaining_flags.pop(0).partition("=")
        if not equals_sign and remaining_flags and not remaining_flags[0].startswith("-"):
            option = remaining_flags.pop(0)
        yield name.removeprefix("--"), option
