"""Decorators for flows and stages, which run in Prefect's engine or as plain functions.

Prefect's engine reports to a server. If no server is configured, the engine would start one for the
run, which takes longer than rebuilding a small library. So the command line then calls the function
directly. Importing Prefect takes most of a second, so it is imported only if a server may be
configured; processes that Prefect starts have already imported it.

A `StageClock` shows the progress of stages on standard error and as an artifact in the Prefect UI.

A failed run is retried only if that can help, and is reported to a webhook. Prefect's setting
for retries (`PREFECT_FLOWS_DEFAULT_RETRIES` in `infra/prefect.yaml`) does not distinguish errors.
That setting would also retry after a refusal of the gate, or an invalid factory string.
"""

import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, update_wrapper, wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast
from urllib.request import Request, urlopen
from uuid import UUID

from flows.command.console import ProgressReporter, format_seconds, show_progress
from flows.parameters import check_parameters, get_checked_flow_class, get_flow_run, get_run_context, is_deployment_run
from rag_model.errors import (
    InputError,
    MissingExtraError,
    RefusedError,
    ResourceError,
    ServiceError,
    StoreError,
    UnreachableError,
    UsageError,
)
from rag_model.process import count_cpu_seconds, trim_memory
from rag_model.secrets import mask_secrets, refuse_secrets
from rag_model.store.store import Store

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

# Variable with the URL to which failed runs are reported. It is not a parameter, because the URL is
# secret and Prefect shows parameters.
WEBHOOK_VARIABLE = "BOOKWHEEL_WEBHOOK"
# Errors after which a retry would fail in the same way, except their subclass `UnreachableError`
_FINAL_ERRORS = (InputError, MissingExtraError, RefusedError, ResourceError, UsageError)
_WEBHOOK_TIMEOUT = 30.0  # seconds until a webhook that does not answer counts as failed

Parameters = ParamSpec("Parameters")
FlowResult = TypeVar("FlowResult")
# Environment variables with the hours after which a run, or a stage of it, fails. They are set for
# deployments; a run of the command line has no limit.
RUN_HOURS_VARIABLE = "BOOKWHEEL_RUN_HOURS"
STAGE_HOURS_VARIABLE = "BOOKWHEEL_STAGE_HOURS"
# Prefixes of variables that do not name a server; the command line sets some of these itself.
_UNRELATED_PREFIXES = ("PREFECT_LOGGING_", "PREFECT_SERVER_")


def stop_retries_if_useless(function: Callable[Parameters, FlowResult]) -> Callable[Parameters, FlowResult]:
    """Wrap a function so that its run fails at once if a retry cannot help."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        try:
            return function(*args, **kwargs)
        except UnreachableError:
            raise
        except _FINAL_ERRORS:
            _cancel_retries()
            raise

    return run


def notify_webhook(flow: "Flow[..., Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """Report a run that failed after its last retry to the webhook, if the environment names one.

    The JSON has `flow`, `run`, `id`, `state`, `error`, and `store` and `ref` if the run has such
    parameters.

    Raises:
        UsageError: the setting is not a web address.
        OSError: the webhook does not answer, or its response is not a success.
    """
    webhook = os.environ.get(WEBHOOK_VARIABLE)
    if not webhook:
        return
    if not webhook.startswith(("http://", "https://")):
        raise UsageError(f"{WEBHOOK_VARIABLE} is not a web address: give one such as https://…")
    message = {
        "flow": flow.name,
        "run": flow_run.name,
        "id": str(flow_run.id),
        "state": state.name,
        "error": state.message,
    }
    message |= {name: flow_run.parameters[name] for name in ("store", "ref") if name in flow_run.parameters}
    request = Request(webhook, json.dumps(message).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=_WEBHOOK_TIMEOUT):
        pass


def _cancel_retries() -> None:
    flow_run = get_flow_run()
    if flow_run is None:
        return
    import httpx  # noqa: PLC0415 - imported together with Prefect
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - takes most of a second

    retry_policy = flow_run.empirical_policy.model_copy(update={"retries": 0})
    # the failure itself is reported, not an error of this request
    with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, empirical_policy=retry_policy)


def deployment_flow(
    name: str, *, starts_jobs: bool = True, takes_turns: bool = False
) -> "Callable[[Callable[Parameters, FlowResult]], Flow[Parameters, FlowResult]]":
    """Declare a flow for deployments, which posts failures to a webhook and persists no results.

    Results are in the store. A failure that a retry would only repeat, such as a refusal by the
    gate, is not retried.

    Args:
        name: the name of the flow.
        starts_jobs: as for `check_parameters`.
        takes_turns: whether a deployed run waits until earlier runs in the same store have ended,
            if their flows take turns too. This includes runs of other deployments and servers, and
            a run that a server has marked as crashed while its process still runs.
    """

    def declare(function: Callable[Parameters, FlowResult]) -> "Flow[Parameters, FlowResult]":
        checked_function = check_parameters(_take_turns(function) if takes_turns else function, starts_jobs=starts_jobs)
        command_flow = CommandFlow(stop_retries_if_useless(checked_function), name)
        if "prefect" in sys.modules:  # Prefect's loader of deployments requires Prefect's class
            return command_flow.get_prefect_flow()
        return cast("Flow[Parameters, FlowResult]", command_flow)

    return declare


class CommandFlow(Generic[Parameters, FlowResult]):
    """A flow that creates its Prefect flow on first use, because importing Prefect is slow."""

    def __init__(self, function: Callable[Parameters, FlowResult], name: str) -> None:
        """Create the flow `name` of a function that checks its parameters."""
        update_wrapper(cast(Callable[..., Any], self), function)
        self.fn, self.name = function, name
        self.get_prefect_flow = cache(self._make_prefect_flow)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        """Run the flow in Prefect's engine."""
        return self.get_prefect_flow()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Prefect's flow."""
        return getattr(self.get_prefect_flow(), name)

    def _make_prefect_flow(self) -> "Flow[Parameters, FlowResult]":
        flow_class = cast("type[Flow[Parameters, FlowResult]]", get_checked_flow_class())
        return flow_class(
            self.fn,
            name=self.name,
            timeout_seconds=read_time_limit(RUN_HOURS_VARIABLE),
            persist_result=False,
            result_serializer="json",
            on_failure=[notify_webhook],
            on_crashed=[notify_webhook],
        )


def stage(function: Callable[Parameters, FlowResult], name: str = "") -> Callable[Parameters, FlowResult]:
    """Declare a task that Prefect shows and times in a flow run, without caching or persisting it.

    Results are cached in the store's memo, because Prefect's default key contains the run's id, so
    that another run would never find the result. Outside a flow run the function is called
    directly. The task has the name of the function, or `name`.
    """

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        # The task itself has no parameters, because Prefect would search all their values for
        # futures.
        def call() -> FlowResult:
            return function(*args, **kwargs)

        return _declare_task(name or function.__name__)(call)() if is_in_flow_run() else call()

    return run


def _declare_task(name: str) -> Callable[[Callable[[], FlowResult]], Callable[[], FlowResult]]:
    from prefect import task  # noqa: PLC0415 - slow to import
    from prefect.cache_policies import NO_CACHE  # noqa: PLC0415

    time_limit = read_time_limit(STAGE_HOURS_VARIABLE)
    return task(name=name, cache_policy=NO_CACHE, persist_result=False, timeout_seconds=time_limit)


def run_flow(
    target_flow: "Flow[Parameters, FlowResult]", *args: Parameters.args, **kwargs: Parameters.kwargs
) -> FlowResult:
    """Run a flow in Prefect's engine if a server is configured; else call its function.

    `PREFECT_API_URL`, in the environment or in Prefect's profile, configures the server.

    Raises:
        ServiceError: the Prefect server cannot be reached.
        UsageError: a URL among the parameters, which a server records, may contain a secret.
    """
    refuse_secrets((args, kwargs))
    if not (server_url := find_prefect_server()):
        return target_flow.fn(*args, **kwargs)
    try:
        return target_flow(*args, **kwargs)
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):  # Prefect has no class for this error
            raise
        raise ServiceError(
            f"the Prefect server at {mask_secrets(server_url)} cannot be reached: start it "
            "(`prefect server start`), or unset PREFECT_API_URL, in the environment or in "
            "Prefect's profile, to run without it"
        ) from error


def find_prefect_server() -> str | None:
    """Return the address of the configured Prefect server; None if no server is configured.

    The environment, Prefect's profile, or a file of settings in the working folder may configure it.
    """
    if not _may_configure_prefect():
        return None
    from prefect.settings import PREFECT_API_URL  # noqa: PLC0415 - slow to import

    url: str | None = PREFECT_API_URL.value()
    return url


def _may_configure_prefect() -> bool:
    """Return whether a source of Prefect's settings may contain the address of a server."""
    if "prefect" in sys.modules or any(
        name.upper().startswith("PREFECT_") and not name.upper().startswith(_UNRELATED_PREFIXES) for name in os.environ
    ):
        return True
    for path in (Path.home() / ".prefect" / "profiles.toml", Path(".env")):
        with suppress(OSError):
            if b"prefect" in path.read_bytes().lower():
                return True
    with suppress(OSError):
        try:
            tool_settings = tomllib.loads(Path("pyproject.toml").read_text()).get("tool")
            if isinstance(tool_settings, dict) and "prefect" in tool_settings:
                return True
        except ValueError:  # Prefect reports what is wrong with the file
            return True
    return Path("prefect.toml").exists()


def read_time_limit(variable: str) -> float | None:
    """Return the limit that an environment variable sets, in seconds; None if it is not set.

    Raises:
        UsageError: the variable is not a number of hours.
    """
    hours_text = os.environ.get(variable)
    if not hours_text:
        return None
    try:
        hours = float(hours_text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < float("inf"):
        raise UsageError(f"{variable} is {hours_text[:60]!r}: set it to a number of hours above 0, or unset it")
    return 3600 * hours


def _take_turns(function: Callable[Parameters, FlowResult]) -> Callable[Parameters, FlowResult]:
    """Make deployed runs of a flow wait until no earlier run uses the store that they name."""
    flow_signature = signature(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> FlowResult:
        run_name = _name_run()
        flow_arguments = flow_signature.bind(*args, **kwargs).arguments
        # A flow that a release calls runs within the release's turn.
        needs_turn = is_deployment_run() and run_name not in _runs_with_turn and not flow_arguments.get("dry_run")
        store = None
        if needs_turn:
            with suppress(StoreError):  # no other run can use a store that does not exist yet
                store = Store.open(flow_arguments["store"])
        if store is None:
            return function(*args, **kwargs)

        def log_wait(other_run: str) -> None:
            log(f"waiting for the run {other_run} in the same store")

        with store.intents.hold_turn(run_name, log_wait):
            _runs_with_turn.add(run_name)
            try:
                return function(*args, **kwargs)
            finally:
                _runs_with_turn.discard(run_name)

    return run


_runs_with_turn: set[str] = set()  # names of the runs of this process whose turn it is


def _name_run() -> str:
    """Return a unique name of this run that users can read: its name in Prefect and its id."""
    flow_run = get_flow_run()
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', flow_run.name)[:60]}-{flow_run.id}" if flow_run else ""


def log(sentence: str) -> None:
    """Write a sentence into the log of the run, if there is one."""
    if is_in_flow_run():
        from prefect import get_run_logger  # noqa: PLC0415 - slow to import

        get_run_logger().info("%s", sentence)


def is_in_flow_run() -> bool:
    """Return whether the caller is part of a flow run on a server."""
    return get_run_context() is not None


@dataclass
class StageClock:
    """Shows the progress of a flow's stages, one after another, and measures their times.

    `cpu` counts the CPU seconds of this process, and of child processes and local workers that
    ended during a stage.
    """

    flow: str = "reindex"  # prefix of the names of the bars in the Prefect UI
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    cpu: dict[str, float] = field(default_factory=dict)  # by stage
    quiet: bool = False  # whether another process shows the progress on standard error

    @contextmanager
    def __call__(self, stage: str) -> Iterator[ProgressReporter]:
        """Yield a function to call with (done, total) during the stage, any number of times.

        After the stage, free memory is returned to the kernel, so that it does not add to the peak
        memory of the next stage.
        """
        start_time, cpu_start = time.monotonic(), count_cpu_seconds()
        with show_progress(stage, quiet=self.quiet) as progress_bar:
            artifact = _ProgressArtifact(self.flow, stage, progress_bar) if is_in_flow_run() else None
            yield artifact or progress_bar
            if artifact is not None:
                artifact.complete()
        trim_memory()
        seconds = time.monotonic() - start_time
        log(f"{stage}: done in {format_seconds(seconds)}")
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + seconds, 3)
        self.cpu[stage] = round(self.cpu.get(stage, 0.0) + count_cpu_seconds() - cpu_start, 3)


class _ProgressArtifact:
    """The bar of a stage in the Prefect UI, updated if the percentage or the sentence changes."""

    def __init__(self, flow: str, stage: str, progress_bar: ProgressReporter) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact  # noqa: PLC0415

        self._update = update_progress_artifact
        self._stage, self._progress_bar, self._percent = stage, progress_bar, 0
        artifact_key = re.sub(r"[^a-z0-9]+", "-", f"{flow}-{stage}".lower())
        self._id = cast(UUID, create_progress_artifact(0.0, key=artifact_key, description=f"{stage}: how much is done"))

    def __call__(self, done: int, total: int) -> None:
        self._progress_bar(done, total)
        percent = int(100 * done / total) if total else 100
        if percent != self._percent:
            self._percent = percent
            self._update(self._id, float(percent))

    def complete(self) -> None:
        """Show 100 %, also for a stage that reports no progress or had nothing to do."""
        if self._percent != 100:
            self._percent = 100
            self._update(self._id, 100.0)

    def say(self, sentence: str) -> None:
        self._progress_bar.say(sentence)
        log(f"{self._stage}: {sentence}")
        self._update(self._id, float(self._percent), description=f"{self._stage}: {sentence}")
