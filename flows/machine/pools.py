"""Start runs in work pools with the estimated resources."""

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

from beam_jobs.workers import MEMORY_VARIABLE, get_worker_memory
from flows import artifacts
from flows.stage import deployment_flow, stage
from rag_model.errors import UsageError
from rag_model.process import CORES_VARIABLE, count_cores, format_bytes, parse_bytes
from rag_model.resources import PROCESS_BYTES, RunLimits, RunResources, WorkEstimate, choose_resources

_HOURS = 6.0  # default duration of a run: one night
_THREADS_VARIABLE = "OMP_NUM_THREADS"  # without it, torch and faiss use all cores of the machine
SHARED_MACHINE = "process"  # the type of a work pool whose runs share the worker's machine
_SCRATCH_GIB = 100  # GiB for downloads, the cache, and Beam's temporary files

# arguments: the memory limit in bytes, and a run's parameters by name
EstimateFunction = Callable[..., WorkEstimate]


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that was started, and its resources."""

    run: str  # id
    name: str
    job_variables: dict[str, Any]
    needs: RunResources  # the estimated resources


def create_start_flow(
    name: str, flow: Flow[..., Any], estimate_work: EstimateFunction, *excluded_parameters: str
) -> Flow[..., StartedRun]:
    """Return a flow that starts a deployment of `flow` with the estimated resources.

    The flow has the parameters of `flow`, with their descriptions in Prefect's form, except
    `excluded_parameters`, and the parameters `deployment`, `most` and `hours` of `start_run`.

    Args:
        name: the name of the flow.
        flow: the flow whose runs are estimated and started.
        estimate_work: estimates the work of a run.
        excluded_parameters: parameters of `flow` to leave out, because flows whose deployments may
            be started in its place, such as `release`, do not have them.
    """
    start_parameters = [*signature(start_run).parameters.values()][3:]
    start_parameters[0] = start_parameters[0].replace(default=get_deployment_name(flow.name))
    flow_parameters = [p for p in signature(flow.fn).parameters.values() if p.name not in excluded_parameters]

    def start(*args: Any, **kwargs: Any) -> StartedRun:
        arguments = start_signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        start_arguments = [arguments.arguments.pop(parameter.name) for parameter in start_parameters]
        return start_run(flow, arguments.arguments, stage(estimate_work), *start_arguments)

    start_signature = start.__dict__["__signature__"] = Signature(
        [*flow_parameters, *start_parameters], return_annotation=StartedRun
    )  # Prefect's form
    docstrings = (getdoc(function) or "" for function in (flow.fn, start_run))
    args = "\n".join(docstring.partition("Args:\n")[2].partition("\n\n")[0] for docstring in docstrings)
    summary = f"Estimate the resources of a run of `{flow.name}`, and start it with them."
    note = "A parameter that is left at its default keeps the deployment's value."
    start.__doc__ = f"{summary}\n\n{note}\n\nArgs:\n{args}"
    start.__name__, start.__module__ = f"start_{flow.name}", estimate_work.__module__
    return deployment_flow(name, starts_jobs=False)(start)


def start_run(
    flow: Flow[..., Any],
    parameters: Mapping[str, Any],
    estimate_work: EstimateFunction,
    deployment: str,
    most: RunLimits | None = None,
    hours: float | None = None,
) -> StartedRun:
    """Start a run of a deployment with the resources that its work needs, and do not wait for it.

    If Prefect retries the flow that calls this, no second run is started.

    Args:
        flow: the flow whose parameters these are.
        parameters: the run's parameters; a parameter that is None or empty, or has the flow's
            default, keeps the deployment's value.
        estimate_work: estimates the work of the run from its memory limit in bytes and its
            parameters.
        deployment: the deployment to start, FLOW/NAME; the type of its work pool decides how a
            machine is requested.
        most: the most memory, cores and GPUs for the run; by default this machine's.
        hours: the intended duration, approximately: a longer run gets more cores, or a GPU. By
            default 6, or the shortest possible if runs share this machine.

    Raises:
        ResourceError: the work would not fit; nothing was started.
        UsageError: there is no such deployment, or its pool is not on this machine and no limits
            are given.
    """
    pool, deployment_parameters = read_deployment(deployment)
    limits, default_hours = get_limits(most, pool), 0.0 if pool == SHARED_MACHINE else _HOURS
    run_parameters = resolve_parameters(flow, parameters, deployment_parameters)
    work = estimate_work(parse_bytes(limits.memory), **run_parameters)
    resources = choose_resources(work, limits, default_hours if hours is None else hours)
    show_resources(resources)
    variables, idempotency_key = build_job_variables(pool, resources), f"launch-{flow_run.id}" if flow_run.id else None
    run: Any = run_deployment(
        deployment,
        parameters=_select_non_defaults(flow, parameters),
        timeout=0,
        job_variables=variables,
        idempotency_key=idempotency_key,
    )
    return StartedRun(str(run.id), run.name, variables, resources)


def get_deployment_name(flow_name: str) -> str:
    """Return the name FLOW/DEPLOYMENT of a flow's deployment in `infra/prefect.yaml`."""
    return f"{flow_name}/{flow_name}-library"


def read_deployment(name: str) -> tuple[str, dict[str, Any]]:
    """Return the type of the work pool that a deployment runs in, and the deployment's parameters.

    Raises:
        UsageError: there is no such deployment, or it has no pool.
    """
    with get_client(sync_client=True) as client, suppress(ObjectNotFound, ValueError):
        deployment = client.read_deployment_by_name(name)
        if deployment.work_pool_name:
            return str(client.read_work_pool(deployment.work_pool_name).type), dict(deployment.parameters)
    raise UsageError(f"there is no deployment {name} in a work pool: deploy it, or name another as FLOW/NAME")


def resolve_parameters(
    flow: Flow[..., Any], parameters: Mapping[str, Any], deployment_parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that `parameters` have in a run that `start_run` starts with them."""
    values = {**parameters, **deployment_parameters, **_select_non_defaults(flow, parameters)}
    # Prefect stores the deployment's values as JSON; validation creates objects such as a recipe.
    validated_values = flow.validate_parameters({name: values[name] for name in parameters})
    return {name: validated_values[name] for name in parameters}


def _select_non_defaults(flow: Flow[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are neither empty nor the flow's defaults.

    Prefect fills in the defaults, so a default that was given looks like a parameter that was not.
    """
    defaults = {name: parameter.default for name, parameter in signature(flow.fn).parameters.items()}
    return {name: value for name, value in parameters.items() if value not in (None, [], (), defaults[name])}


def get_limits(limits: RunLimits | None, pool: str) -> RunLimits:
    """Return the limits of a run; if the pool's runs share this machine, by default its resources.

    Raises:
        UsageError: the limits are not valid amounts, or are missing for a pool with machines of its
            own.
    """
    if limits is None and pool != SHARED_MACHINE:
        raise UsageError(f"runs of this deployment get machines of their own ({pool}): give their size in `most`")
    limits = limits or RunLimits(str(get_worker_memory(())), count_cores(), len([*Path("/dev").glob("nvidia[0-9]*")]))
    # plausible values for one machine
    if not (1 <= limits.cores <= 1024 and 0 <= limits.gpus <= 64):
        raise UsageError(
            f"a run needs a core, and cannot have {limits.cores} cores and {limits.gpus} GPUs: correct `most`"
        )
    return limits


def build_job_variables(pool: str, resources: RunResources) -> dict[str, Any]:
    """Return the job variables with which the workers of a pool of type `pool` start a run.

    Docker's default job template has all these variables. The default job template of Kubernetes
    has no variables for GPUs and scratch space, but the template in `infra/kubernetes` has them.
    """
    env = {
        CORES_VARIABLE: str(resources.cores),
        MEMORY_VARIABLE: str(max(1, resources.memory - PROCESS_BYTES)),
        _THREADS_VARIABLE: str(resources.cores),
    }
    if pool == "docker":
        gpus = {"device_requests": [{"count": resources.gpus, "capabilities": [["gpu"]]}]} if resources.gpus else {}
        limits = {"nano_cpus": resources.cores * 10**9, **gpus}
        return {"env": env, "mem_limit": f"{resources.memory}b", "container_create_kwargs": limits}
    if pool == "kubernetes":
        limits = {"memory": f"{-(-resources.memory // 2**20)}Mi", "cpu": str(resources.cores)}
        kubernetes_resources = {
            f"{resource_name}_{kind_of_limit}": limit
            for resource_name, limit in limits.items()
            for kind_of_limit in ("request", "limit")
        }
        return {
            "env": env,
            **kubernetes_resources,
            "gpus": resources.gpus,
            "scratch": f"{_SCRATCH_GIB + resources.work.disk // 2**30}Gi",
        }
    return {"env": env | ({} if resources.gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def show_resources(resources: RunResources) -> None:
    """Write the estimate as an artifact of the run."""
    work, cores, memory = resources.work, resources.cores, format_bytes(resources.memory)
    memory_by_stage = {
        f"memory, {stage}": format_bytes(size) for stage, size in work.compute_stage_memory(cores).items()
    }
    rows = {
        **work.sizes,
        **memory_by_stage,
        "disk": format_bytes(work.disk),
        "hours, about": f"{resources.hours:.1f}",
    }
    description = f"The run gets {memory} of memory, {cores} × core, {resources.gpus} × GPU"
    artifacts.create_table(
        [{"what": requirement, "value": value} for requirement, value in rows.items()], "launch-needs", description
    )
