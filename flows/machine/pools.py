"""Work pools, which give runs of a deployment their machines, and the job variables that each type of pool takes."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import Signature, getdoc, signature
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from beam_jobs.workers import MEMORY, worker_memory
from flows import artifacts
from flows.stage import deployed, stage
from rag_model.cores import CORES, cores
from rag_model.errors import UsageError
from rag_model.index.sizing.amounts import gigabytes, parse_bytes
from rag_model.needs.machine import PROCESS, Most, Needs, Work, needs_of

HOURS = 6.0  # the default duration: one night
THREADS = "OMP_NUM_THREADS"  # torch and faiss would use every core that they see
HERE = "process"  # the type of a work pool whose runs share the worker's machine
_SCRATCH = 100  # GiB for downloads, the cache, and Beam's temporary files

Weigh = Callable[..., Work]  # from the bytes that a run may use, and its parameters by name


@dataclass(frozen=True, slots=True)
class Launched:
    """A run that was started, and its resources."""

    run: str  # id
    name: str
    job_variables: dict[str, Any]
    needs: Needs


def launching(name: str, target: Flow[..., Any], weigh: Weigh, *left_out: str) -> Flow[..., Launched]:
    """Return a flow that estimates the needs of a run of `target`, and starts a deployment of it with them.

    Its parameters, and their descriptions in Prefect's form, are those of `target` without `left_out`; then
    `deployment`, `most` and `hours` of `start`.

    Args:
        name: the name of the flow.
        target: the flow whose runs are estimated; the run gets its parameters.
        weigh: returns a run's work.
        left_out: parameters of `target` that a launch does not take: other flows that it may start lack them.
    """
    own = [*signature(start).parameters.values()][2:]
    own[0] = own[0].replace(default=f"{target.name}/library")
    asked = [one for one in signature(target.fn).parameters.values() if one.name not in left_out]

    def launch(*args: Any, **kwargs: Any) -> Launched:
        bound = taken.bind(*args, **kwargs)
        bound.apply_defaults()
        chosen = [bound.arguments.pop(one.name) for one in own]
        return start(bound.arguments, stage(weigh), *chosen)

    taken = launch.__dict__["__signature__"] = Signature([*asked, *own], return_annotation=Launched)  # Prefect's form
    args = "\n".join((getdoc(one) or "").partition("Args:\n")[2].partition("\n\n")[0] for one in (target.fn, start))
    launch.__doc__ = f"Estimate the needs of a run of `{target.name}`, and start it with them.\n\nArgs:\n{args}"
    launch.__name__, launch.__module__ = name.replace("-", "_"), weigh.__module__
    return deployed(name)(launch)


def start(
    parameters: Mapping[str, Any], weigh: Weigh, deployment: str, most: Most | None = None, hours: float | None = None
) -> Launched:
    """Start a run of a deployment with the resources that its work needs, and do not wait for it.

    A launch that is retried finds the run that it started.

    Args:
        parameters: the run's parameters; for those that are None or empty the deployment's own are used.
        weigh: returns the work of the run from the bytes that it may use and its parameters.
        deployment: the deployment to start, FLOW/NAME; the type of its work pool decides how a machine is requested.
        most: the most memory, cores and GPUs for the run; by default those of this machine.
        hours: the intended duration, approximately: a longer run gets more cores, or a GPU. By default 6, or the
            shortest possible if runs share this machine.

    Raises:
        ResourceError: the work would not fit; nothing was started.
        UsageError: there is no such deployment, or its pool is not on this machine and no limits are given.
    """
    pool = pool_of(deployment)
    limits, usual = limits_of(most, pool), 0.0 if pool == HERE else HOURS
    needs = needs_of(weigh(parse_bytes(limits.memory), **parameters), limits, usual if hours is None else hours)
    show(needs)
    given = {k: v for k, v in parameters.items() if v not in (None, [], ())}
    variables, once = job_variables(pool, needs), f"launch-{flow_run.id}" if flow_run.id else None
    run: Any = run_deployment(deployment, parameters=given, timeout=0, job_variables=variables, idempotency_key=once)
    return Launched(str(run.id), run.name, variables, needs)


def pool_of(deployment: str) -> str:
    """Return the type of the work pool that a deployment runs in.

    Raises:
        UsageError: there is no such deployment, or it has no pool.
    """
    with get_client(sync_client=True) as client, suppress(ObjectNotFound, ValueError):
        if name := client.read_deployment_by_name(deployment).work_pool_name:
            return str(client.read_work_pool(name).type)
    raise UsageError(f"there is no deployment {deployment} in a work pool: deploy it, or name another as FLOW/NAME")


def limits_of(most: Most | None, pool: str) -> Most:
    """Return the limits of a run; by default the resources of this machine, if runs share it.

    Raises:
        UsageError: the limits are not valid amounts, or have to be given.
    """
    if most is None and pool != HERE:
        raise UsageError(f"runs of this deployment get machines of their own ({pool}): say how large in `most`")
    most = most or Most(str(worker_memory(())), cores(), len([*Path("/dev").glob("nvidia[0-9]*")]))
    if not (1 <= most.cores <= 1024 and 0 <= most.gpus <= 64):  # of one machine
        raise UsageError(f"a run needs a core, and cannot have {most.cores} cores and {most.gpus} GPUs: correct `most`")
    return most


def job_variables(pool: str, needs: Needs) -> dict[str, Any]:
    """Return the job variables with which Prefect's workers of a type of pool start a run.

    Docker's own template has all of them; Kubernetes' has no GPUs and no scratch, but ours in `infra/kubernetes` has.
    """
    env = {CORES: str(needs.cores), MEMORY: str(max(1, needs.memory - PROCESS)), THREADS: str(needs.cores)}
    if pool == "docker":
        gpus = {"device_requests": [{"count": needs.gpus, "capabilities": [["gpu"]]}]} if needs.gpus else {}
        sized = {"nano_cpus": needs.cores * 10**9, **gpus}
        return {"env": env, "mem_limit": f"{needs.memory}b", "container_create_kwargs": sized}
    if pool == "kubernetes":
        sized = {"memory": f"{-(-needs.memory // 2**20)}Mi", "cpu": str(needs.cores)}
        asked = {f"{what}_{bound}": size for what, size in sized.items() for bound in ("request", "limit")}
        return {"env": env, **asked, "gpus": needs.gpus, "scratch": f"{_SCRATCH + needs.work.disk // 2**30}Gi"}
    return {"env": env | ({} if needs.gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def show(needs: Needs) -> None:
    """Write the estimate as an artifact of the run."""
    stages = {f"memory, {stage}": gigabytes(size) for stage, size in needs.work.held(needs.cores).items()}
    rows = {**needs.work.sizes, **stages, "disk": gigabytes(needs.work.disk), "hours, about": f"{needs.hours:.1f}"}
    told = f"The run gets {gigabytes(needs.memory)} of memory, {needs.cores} × core, {needs.gpus} × GPU"
    artifacts.table([{"what": what, "value": value} for what, value in rows.items()], "launch-needs", told)
