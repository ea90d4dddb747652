"""Start a rebuild on a machine of the right size: look at the dump and the encoder first, then ask for what they need.

Purpose: what a schedule or a person starts where runs get machines of their own (Docker, Kubernetes), and where a
rebuild that cannot fit should be refused before it waits for a machine.
Caching: none: nothing is built here.
Requires: the deployment that shall run, and the dump's and encoder's files in reach of this run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL

from beam_jobs.workers import CORES, MEMORY, cores, here, worker_memory
from flows import artifacts
from flows.reindex import DEFAULT_ENCODER
from flows.stage import deployed, stage
from rag_model.build.needs import LAUNCHER, Limits, Needs, bulk_of, needs_of
from rag_model.build.recipe import Recipe
from rag_model.encoders.resolve import resolve_folder
from rag_model.errors import UsageError
from rag_model.index.amounts import gigabytes, parse_bytes
from rag_model.retrieve.named import encoder_names
from rag_model.store.store import Store

DEPLOYMENT = "reindex/library"
HOURS = 6.0  # a night
_SCRATCH = 100  # GiB at least, for downloads, the cache, and what Beam writes by the way
_HERE = "process"  # the type of a work pool whose runs share the worker's machine


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


@deployed("launch")
def launch(
    dump: str,
    store: str,
    encoder: str = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    limit: int | None = None,
    beam_options: Sequence[str] = (),
    deployment: str = DEPLOYMENT,
    most: Most | None = None,
    hours: float | None = None,
) -> Launched:
    """Estimate what a rebuild needs, and start one with that much memory, and so many cores and GPUs.

    Args:
        dump: URL, path or glob of a MediaWiki dump, of JSONL or Parquet documents, or of psgs_w100.tsv.
        store: URL or folder of the store; made if there is none.
        encoder: folder or hub name of the passage encoder.
        recipe: everything else that decides the snapshot; the default recipe if none is given.
        ref: the name that shall mean the new snapshot.
        limit: read only so many articles, for a quick look.
        beam_options: options of Beam and of its runner, as on their own command lines.
        deployment: what to start, FLOW/NAME; its work pool decides how a machine is asked for.
        most: what one run may be given; else what this machine has.
        hours: how long the rebuild may take, about: more cores, or a GPU, where fewer would take longer. Else 6, and as
            short as can be where runs share this machine.

    Raises:
        ResourceError: it would not fit; nothing was started.
        UsageError: there is no such deployment, or its pool is not this machine's and no limits are given.
    """
    pool = pool_of(deployment)
    if hours is None:
        hours = 0.0 if pool == _HERE else HOURS
    needs = weigh(store, dump, encoder, recipe or Recipe(), limit, beam_options, limits_of(most, pool), hours)
    show(needs)
    given: dict[str, Any] = {"dump": dump, "store": store, "encoder": encoder, "ref": ref}
    given |= {"recipe": asdict(recipe)} if recipe else {}
    given |= {"limit": limit} if limit is not None else {}
    given |= {"beam_options": list(beam_options)} if beam_options else {}
    variables = job_variables(pool, needs)
    run = start(deployment, given, variables)
    if PREFECT_UI_URL.value():
        artifacts.link(f"{PREFECT_UI_URL.value()}/runs/flow-run/{run.id}", f"The rebuild: {run.name}", key="launch-run")
    return Launched(str(run.id), run.name, variables, needs)


@stage
def weigh(
    store: str,
    dump: str,
    encoder: str,
    recipe: Recipe,
    limit: int | None,
    beam_options: Sequence[str],
    limits: Limits,
    hours: float,
) -> Needs:
    """Estimate what the rebuild needs."""
    named = encoder_names(Store.open(store), encoder).passage if encoder.startswith("model:") else encoder
    folder = resolve_folder(named or encoder)
    local = here(beam_options)
    return needs_of(bulk_of(dump, folder, recipe, limit), recipe, limits, hours, local=local)


@stage
def start(deployment: str, parameters: dict[str, Any], variables: dict[str, Any]) -> FlowRun:
    """Start a run of the deployment, and leave it to itself; a launch that is tried again finds the one it started."""
    key = f"launch-{flow_run.id}" if flow_run.id else None
    run = run_deployment(deployment, parameters=parameters, job_variables=variables, timeout=0, idempotency_key=key)
    return cast(FlowRun, run)


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
    if pool != _HERE:
        raise UsageError(f"runs of this deployment get machines of their own ({pool}): say how large in `most`")
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Limits((worker_memory(()) or 0), cores(), gpus)


def job_variables(pool: str, needs: Needs) -> dict[str, Any]:
    """Return what Prefect's workers of a type of pool are told to give a run.

    Docker's own template knows all of it; Kubernetes' knows neither GPUs nor scratch, ours in `infra/kubernetes` does.
    """
    told = {CORES: str(needs.cores), MEMORY: str(max(1, needs.memory - LAUNCHER))}
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
        "passages, about": f"{needs.bulk.passages:,}",
        "dimensions": f"{needs.bulk.dim:,}",
        "weights of the encoder": gigabytes(needs.bulk.weights),
        "cores": f"{needs.cores:,}",
        "GPUs": f"{needs.gpus:,}",
        "memory": gigabytes(needs.memory),
        **{f"memory, {stage}": gigabytes(size) for stage, size in needs.stages.items()},
        "disk": gigabytes(needs.disk),
        "time, about": f"{needs.hours:.1f} hours" if needs.hours >= 1 else f"{60 * needs.hours:.0f} minutes",
    }
    described = f"The rebuild gets {gigabytes(needs.memory)} of memory, {needs.cores} × core, {needs.gpus} × GPU"
    artifacts.table(
        [{"what": what, "value": value} for what, value in rows.items()], key="launch-needs", description=described
    )
