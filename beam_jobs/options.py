"""Build Beam's options: by default local worker processes, else any runner by its flags."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from apache_beam.options.pipeline_options import (
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.runner import create_runner

from beam_jobs.local_worker import ForkedEnvironment
from beam_jobs.workers import sets_worker_count
from rag_model.errors import UsageError
from rag_model.process import count_cores
from rag_model.secrets import refuse_secrets

_SECRET = re.compile(r"--(?P<name>\w*(?:secret|password|token|connection_string)\w*)", re.IGNORECASE)


_ACCELERATOR_OPTION = "worker_accelerator="
_GPU_MACHINE = re.compile(r"g2-standard-(?=\d)")  # machine types that always have a GPU


def build_pipeline_options(flags: Sequence[str], n_elements: int, *, uses_gpu: bool = True) -> PipelineOptions:
    """Return the options of a job with `n_elements` tasks.

    `flags` are passed to Beam unchanged. Without `--runner` the job runs on this machine, with one
    worker process per core (`--direct_num_workers` sets another number), but not more than tasks.
    On Dataflow, only a job that `uses_gpu` gets the requested accelerators; other jobs get machines
    of the same size without a GPU (`g2-standard-8` becomes `n2-standard-8`).
    """
    options = PipelineOptions(list(flags))
    if not uses_gpu:
        _remove_accelerators(options)
    if is_local(options):
        direct_options = options.view_as(DirectOptions)
        requested_workers = direct_options.direct_num_workers if sets_worker_count(flags) else 0
        direct_options.direct_num_workers = max(1, min(requested_workers or count_cores(), n_elements))
    return options


def _remove_accelerators(options: PipelineOptions) -> None:
    cloud_options, worker_options = options.view_as(GoogleCloudOptions), options.view_as(WorkerOptions)
    cloud_options.dataflow_service_options = [
        option for option in cloud_options.dataflow_service_options or () if not option.startswith(_ACCELERATOR_OPTION)
    ] or None
    if worker_options.machine_type:
        worker_options.machine_type = _GPU_MACHINE.sub("n2-standard-", worker_options.machine_type)


def check_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Check that Beam can read its flags and knows the runner in them; return the flags.

    Raises:
        UsageError: a flag has a wrong value, or may contain a secret, or there is no such runner.
    """
    refuse_secrets(flags)
    if secret_flags := [secret_match for flag in flags if (secret_match := _SECRET.match(flag))]:
        raise UsageError(
            f"Beam's option --{secret_flags[0]['name']} is a secret, and options appear in logs "
            "and process lists: set a variable such as AWS_SECRET_ACCESS_KEY in the environment "
            "of the workers"
        )
    argparse_output = io.StringIO()
    try:
        with redirect_stderr(argparse_output):  # argparse would print all options before its error
            options = PipelineOptions(list(flags)).view_as(DirectOptions)
            runner = options.view_as(StandardOptions).runner
        if runner is not None:
            create_runner(runner)
    except SystemExit as error:
        parser_error = argparse_output.getvalue().strip().rpartition("error: ")[2]
        raise UsageError(f"Beam refuses the options after `--`: {parser_error}") from error
    except (ValueError, ImportError, AttributeError) as error:
        raise UsageError(f"Beam has no runner {runner}: {' '.join(str(error).split())}") from error
    return tuple(flags)


def is_local(options: PipelineOptions) -> bool:
    """Return whether the workers are processes on this machine, which run only this job."""
    return options.view_as(StandardOptions).runner is None


def get_runner_name(options: PipelineOptions) -> str:
    """Return the class name of the runner (`FlinkRunner` also for `--runner=flink`), or "" for
    local workers.
    """
    runner = options.view_as(StandardOptions).runner
    return type(create_runner(runner)).__name__ if runner else ""


def create_local_runner(log: Path) -> FnApiRunner:
    """Return the runner of local worker processes, whose output goes to `log` instead of the
    terminal.

    Beam's default runner is not used, because it would download a program.
    """
    return FnApiRunner(ForkedEnvironment.from_command_string(str(log)))


def count_worker_threads(options: PipelineOptions) -> int:
    """Return how many threads a local worker may use, which is its share of the cores.

    Return 0, which means no limit, if workers run on other machines.
    """
    if not is_local(options):
        return 0
    return max(1, count_cores() // int(options.view_as(DirectOptions).direct_num_workers))
