"""The Beam options of a deployment's run: the operator's defaults, and those that its form may set.

The operator of a worker sets both in the worker's environment. `BOOKWHEEL_BEAM_OPTIONS` has the
options of every run, as on Beam's command line, for example
`--runner=FlinkRunner --flink_master=flink:8081`; the command line of bookwheel takes them too if a
command has none of its own. A form may add sizes and numbers, but no option that names code, a
file, a host or a credential. `BOOKWHEEL_ALLOWED_BEAM_OPTIONS` allows more: option names, or
`name=value` pairs that allow one value only.
"""

import os
import shlex
from collections.abc import Iterator, Sequence

from rag_model.errors import UsageError

ALLOWED_VARIABLE = "BOOKWHEEL_ALLOWED_BEAM_OPTIONS"
DEFAULT_VARIABLE = "BOOKWHEEL_BEAM_OPTIONS"
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


def resolve_options(form_options: Sequence[str]) -> tuple[str, ...]:
    """Return the Beam options of a deployment's run: the operator's, then those of the form.

    If an option is set twice, Beam takes the last value. Options that were resolved before are
    returned unchanged.

    Raises:
        UsageError: as for `refuse_unlisted`.
    """
    options, default_options = tuple(form_options), read_default_options()
    refuse_unlisted(options)
    is_resolved = options[: len(default_options)] == default_options
    return options if is_resolved else (*default_options, *options)


def refuse_unlisted(flags: Sequence[str]) -> None:
    """Check that a form may set all options.

    The operator's defaults are allowed with their values. Option names must match in full, although
    Beam's parser also accepts unambiguous prefixes.

    Raises:
        UsageError: an option is not allowed, or the environment's lists cannot be parsed.
    """
    allowed_by_operator = {option.removeprefix("--") for option in _read_words(ALLOWED_VARIABLE)}
    allowed_by_operator |= {f"{name}={value}" for name, value in _settings(read_default_options())}
    for name, value in _settings(flags):
        is_allowed = name in _SIZES or (name == "runner" and value in _RUNNERS)
        if not is_allowed and not allowed_by_operator & {name, f"{name}={value}"}:
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
            f"{DEFAULT_VARIABLE} begins with {options[0][:60]!r}, but Beam's options begin with --: "
            f"write it as --{options[0][:60]}, or allow it in forms with {ALLOWED_VARIABLE}"
        )
    return options


def _read_words(variable: str) -> list[str]:
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UsageError(f"{variable} cannot be read ({error}): separate options by spaces and quote values") from error


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
