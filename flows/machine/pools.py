"""Where runs of a deployment get their machines, and the words in which each kind of work pool is asked for one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL

from beam_jobs.workers import CORES, MEMORY, cores, worker_memory
from flows import artifacts
from rag_model.errors import UsageError
from rag_model.index.sizing.amounts import gigabytes, parse_bytes
from rag_model.needs.machine import LAUNCHER, Limits, Needs, Work, needs_of

HOURS = 6.0  # a night
HERE = "process"  # the type of a work pool whose runs share the worker's machine
_SCRATCH = 100  # GiB at least, for downloads, the cache, and what Beam writes by the way


@dataclass(frozen=True, slots=True)
class Most:
    """What one run may be given at most."""

    memory: str  # as people write it: 64GB
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    """A run that was started, and what it was given."""

    run: str  # id
    name: str
    job_variables: dict[str, Any]
    needs: Needs


def start(
    deployment: str,
    parameters: Mapping[str, Any],
    most: Most | None,
    hours: float | None,
    weigh: Callable[[Limits], Work],
) -> Launched:
    """Start a run of the deployment with what its work needs, and leave it to itself.

    A launch that is tried again finds the run it started.

    Args:
        deployment: what to start, FLOW/NAME.
        parameters: the run's; those that are None or empty are left to the deployment's own.
        most: what the run may be given; None: what this machine has.
        hours: the time it may take, about; None: a night where it gets a machine of its own, else as little as can be.
        weigh: tells what the run has to do, within these limits.

    Raises:
        UsageError: there is no such deployment, or its pool is not this machine's and no limits are given.
        ResourceError: it would not fit; nothing was started.
    """
    pool = pool_of(deployment)
    limits, night = limits_of(most, pool), 0.0 if pool == HERE else HOURS
    needs = needs_of(weigh(limits), limits, night if hours is None else hours)
    show(needs)
    variables = job_variables(pool, needs)
    key = f"launch-{flow_run.id}" if flow_run.id else None
    given = {name: value for name, value in parameters.items() if value not in (None, [])}
    begun = run_deployment(deployment, parameters=given, job_variables=variables, timeout=0, idempotency_key=key)
    run = cast(FlowRun, begun)
    if PREFECT_UI_URL.value():
        artifacts.link(f"{PREFECT_UI_URL.value()}/runs/flow-run/{run.id}", f"The run: {run.name}", key="launch-run")
    return Launched(str(run.id), run.name, variables, needs)


def pool_of(deployment: str) -> str:
    """Return the type of the work pool that a deployment runs in.

    Raises:
        UsageError: there is no such deployment, or it has no pool.
    """
    with get_client(sync_client=True) as client:
        try:
            name = client.read_deployment_by_name(deployment).work_pool_name
        except (ObjectNotFound, ValueError) as missing:
            raise UsageError(
                f"there is no deployment {deployment}: deploy it, or name another as FLOW/NAME"
            ) from missing
        if name is None:
            raise UsageError(f"the deployment {deployment} has no work pool: give it one, and a worker")
        return str(client.read_work_pool(name).type)


def limits_of(most: Most | None, pool: str) -> Limits:
    """Return what a run may be given; where nobody says, what this machine has, if runs share it.

    Raises:
        UsageError: the limits are no amounts, or have to be given.
    """
    if most is not None:
        if most.cores < 1 or most.gpus < 0:
            raise UsageError(
                f"a run needs a core, and cannot have {most.cores} cores and {most.gpus} GPUs: mend `most`"
            )
        return Limits(parse_bytes(most.memory), most.cores, most.gpus)
    if pool != HERE:
        raise UsageError(f"runs of this deployment get machines of their own ({pool}): say how large in `most`")
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Limits((worker_memory(()) or 0), cores(), gpus)


def job_variables(pool: str, needs: Needs) -> dict[str, Any]:
    """Return what Prefect's workers of a type of pool are told to give a run.

    Docker's own template knows all of it; Kubernetes' knows neither GPUs nor scratch, ours in `infra/kubernetes` does.
    """
    told = {CORES: str(needs.cores), MEMORY: str(max(1, needs.memory - LAUNCHER)), **needs.env}
    if pool == "docker":
        devices = [{"count": needs.gpus, "capabilities": [["gpu"]]}] if needs.gpus else []
        sized = {"nano_cpus": needs.cores * 10**9, **({"device_requests": devices} if devices else {})}
        return {"env": told, "mem_limit": f"{needs.memory}b", "container_create_kwargs": sized}
    if pool == "kubernetes":
        memory, count = f"{-(-needs.memory // 2**20)}Mi", str(needs.cores)
        asked = {"memory_request": memory, "memory_limit": memory, "cpu_request": count, "cpu_limit": count}
        scratch = f"{max(_SCRATCH, -(-5 * needs.disk // 2**32))}Gi"  # a quarter to spare
        return {"env": told, **asked, "gpus": needs.gpus, "scratch": scratch}
    return {"env": told | ({} if needs.gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def show(needs: Needs) -> None:
    """Put the estimate where the run's page shows it."""
    rows: Mapping[str, str] = {
        **needs.work,
        "cores": f"{needs.cores:,}",
        "GPUs": f"{needs.gpus:,}",
        "memory": gigabytes(needs.memory),
        **{f"memory, {stage}": gigabytes(size) for stage, size in needs.stages.items()},
        "disk": gigabytes(needs.disk),
        "time, about": f"{needs.hours:.1f} hours" if needs.hours >= 1 else f"{60 * needs.hours:.0f} minutes",
    }
    described = f"The run gets {gigabytes(needs.memory)} of memory, {needs.cores} × core, {needs.gpus} × GPU"
    artifacts.table(
        [{"what": what, "value": value} for what, value in rows.items()], key="launch-needs", description=described
    )
