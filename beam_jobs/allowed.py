"""The options of Beam that a deployment's form may set: sizes and numbers, and no code, file, host or credential.

The operator of a worker allows more in its environment: `BOOKWHEEL_BEAM_OPTIONS` holds names, or names with the only
value to take, as `"flink_master=flink:8081 environment_type=EXTERNAL sdk_harness_log_level_overrides"`.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence

from rag_model.errors import UsageError

MORE = "BOOKWHEEL_BEAM_OPTIONS"
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
# Names of Beam's own; another one would be imported as a class of any module.
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
    """Check that a form sets only options that are allowed by default or by the environment of this process.

    Names are compared as a whole, although Beam's parser takes the beginning of a name too.

    Raises:
        UsageError: another option is set, or the environment's list cannot be read.
    """
    more = frozenset(_more(os.environ.get(MORE, "")))
    for name, value in _settings(flags):
        known = name in _SIZES or (name == "runner" and value in _RUNNERS)
        if not known and not more & {name, f"{name}={value}"}:
            raise UsageError(
                f"a form may not set Beam's option {name[:60]!r} to this value: the operator of the worker allows it "
                f"with {MORE}={name[:60]} in the worker's environment"
            )


def _more(listed: str) -> Iterable[str]:
    try:
        return [one.removeprefix("--") for one in shlex.split(listed)]
    except ValueError as broken:
        raise UsageError(f"{MORE} cannot be read ({broken}): separate names by spaces and quote values") from broken


def _settings(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option's name and value, which may also be the next flag: `--runner`, `FlinkRunner`."""
    rest = list(flags)
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if not given and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        yield name.removeprefix("--"), value
