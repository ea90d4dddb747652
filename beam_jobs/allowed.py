"""The Beam options that a deployment's form may set.

A form may set sizes and numbers, but no option that names code, a file, a host or a credential. The
operator of a worker can allow more in the worker's environment: `BOOKWHEEL_BEAM_OPTIONS` lists
option names, or `name=value` pairs that allow one value only, for example `"flink_master=flink:8081
environment_type=EXTERNAL sdk_harness_log_level_overrides"`.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence

from rag_model.errors import UsageError

ALLOWED_VARIABLE = "BOOKWHEEL_BEAM_OPTIONS"
_SIZES = frozenset(
    [
        "autoscaling_algorithm",
        "default_sdk_harness_log_level",
        "direct_num_workers",
        "direct_running_mode",
        "disk_size_gb",
        "element_processing_timeout_minutes",
        "flexrs_goal",
        "flink_version",
        "job_server_timeout",
        "max_cache_memory_usage_mb",
        "max_num_workers",
        "max_parallelism",
        "num_workers",
        "number_of_worker_harness_threads",
        "parallelism",
        "sdk_worker_parallelism",
        "spark_version",
        "worker_machine_type",
    ]
)
# Beam's own runners. Beam imports any other name as a class, which may be in any module.
_RUNNERS = frozenset(
    [
        "DataflowRunner",
        "DirectRunner",
        "FlinkRunner",
        "FnApiRunner",
        "PortableRunner",
        "SparkRunner",
        "SwitchingDirectRunner",
    ]
)


def refuse_unlisted(flags: Sequence[str]) -> None:
    """Check that all options are allowed by default or by the environment of this process.

    Option names must match in full, although Beam's parser also accepts unambiguous prefixes.

    Raises:
        UsageError: an option is not allowed, or the environment's list cannot be parsed.
    """
    allowed_by_operator = frozenset(_parse_allowed(os.environ.get(ALLOWED_VARIABLE, "")))
    for name, value in _settings(flags):
        is_allowed = name in _SIZES or (name == "runner" and value in _RUNNERS)
        if not is_allowed and not allowed_by_operator & {name, f"{name}={value}"}:
            raise UsageError(
                f"a form may not set Beam's option {name[:60]!r} to this value: to allow it, set "
                f"{ALLOWED_VARIABLE}={name[:60]} in the worker's environment"
            )


def _parse_allowed(variable: str) -> Iterable[str]:
    try:
        return [option.removeprefix("--") for option in shlex.split(variable)]
    except ValueError as error:
        raise UsageError(
            f"{ALLOWED_VARIABLE} cannot be read ({error}): separate names by spaces and quote values"
        ) from error


def _settings(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option's name and value; the value may be a flag of its own (`--runner
    FlinkRunner`).
    """
    remaining_flags = list(flags)
    while remaining_flags:
        name, equals_sign, value = remaining_flags.pop(0).partition("=")
        if not equals_sign and remaining_flags and not remaining_flags[0].startswith("-"):
            value = remaining_flags.pop(0)
        yield name.removeprefix("--"), value
