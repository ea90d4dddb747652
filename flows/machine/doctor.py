"""Check the prerequisites of a run; report one finding for each, with advice if it is not met."""

import json
import os
import platform
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
    WorkerOptions,
)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from beam_jobs.options import check_flags, get_runner_name
from beam_jobs.workers import get_worker_memory
from flows.command.reply import Common, Reply
from flows.stage import find_prefect_server
from rag_model.errors import BookwheelError, ReadOnlyError
from rag_model.extras import list_faiss_packages
from rag_model.process import count_cores, format_bytes
from rag_model.secrets import mask_secrets
from rag_model.store.objects.cache import find_existing_ancestor, get_cache_folder
from rag_model.store.objects.files import Files
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import probe_store

_TIMEOUT_SECONDS = 5.0  # seconds until a server that does not answer counts as down
# errors if a server is down, or is not a server of the expected kind
RESPONSE_ERRORS = (OSError, ValueError, KeyError, TypeError)
_NO_RESTART = {"none", "off", "disable"}  # Flink's names of the strategy that never restarts a job
_RESTART_ADVICE = (
    "set restart-strategy.type: fixed-delay in Flink's configuration: without it the first failure fails the job"
)
MIN_MEMORY = 2e9  # bytes for the launcher and one worker with MiniLM, 0.7 GB each
MIN_DISK = 5e9  # bytes for an encoder, a cache and one index of a small corpus
# seconds; a larger clock difference makes `created_at` misleading, and from 900 s on S3 refuses
# requests
MAX_CLOCK_SKEW = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str  # name of the check
    ok: bool
    found: str  # observed version, value or state
    todo: str = ""  # advice if the check failed


def fetch_json(url: str) -> Any:
    """Return the JSON response of a server.

    Raises:
        OSError, ValueError: the server does not answer, or its response is not JSON.
    """
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
        return json.load(response)


def report_no_answer(what: str, url: str, error: Exception, advice: str) -> Finding:
    """Return the finding for a server that gave no valid response."""
    return Finding(what, False, f"{url} gave no valid response ({getattr(error, 'reason', error)})", advice)


def check_cluster(options: PipelineOptions) -> Iterator[Finding]:
    """Check slots, version and restart strategy of a cluster, and the job server on this machine.

    A cluster that Beam would start itself is not checked.
    """
    master = options.view_as(FlinkRunnerOptions).flink_master
    if master.startswith("["):
        return
    address = (master if "://" in master else f"http://{master}").rstrip("/")
    try:
        overview = fetch_json(f"{address}/overview")
        n_slots, version = int(overview["slots-available"]), str(overview["flink-version"])
    except RESPONSE_ERRORS as error:
        yield report_no_answer(
            "flink", f"{address}/overview", error, f"start the cluster, or correct --flink_master={master}"
        )
        return
    yield _check_slots(options, master, version, n_slots)
    yield from _check_job_server(options, version)
    try:
        settings = {setting["key"]: setting["value"] for setting in fetch_json(f"{address}/jobmanager/config")}
    except RESPONSE_ERRORS as error:
        yield report_no_answer("flink, restarts", f"{address}/jobmanager/config", error, f"is {master} a JobManager?")
        return
    strategy = settings.get("restart-strategy.type", settings.get("restart-strategy", "none"))
    yield Finding("flink, restarts", strategy not in _NO_RESTART, strategy, _RESTART_ADVICE)


def _check_slots(options: PipelineOptions, master: str, version: str, n_slots: int) -> Finding:
    n_required_slots = max(1, options.view_as(FlinkRunnerOptions).parallelism)
    advice = f"wait, add TaskManagers, or lower --parallelism={n_required_slots}: a job waits until all slots are free"
    return Finding("flink", n_slots >= n_required_slots, f"Flink {version} at {master}, {n_slots} free slots", advice)


def _check_job_server(options: PipelineOptions, version: str) -> Iterator[Finding]:
    """Check what Beam's job server needs, if it is started on this machine."""
    flink = options.view_as(FlinkRunnerOptions)
    if options.view_as(PortableOptions).job_endpoint:
        return
    java = options.view_as(JobServerOptions).job_server_java_launcher
    java_path = shutil.which(java)
    yield Finding("flink, java", java_path is not None, java_path or f"{java} is not on the PATH", "install Java 17")
    if flink.flink_job_server_jar:
        return
    minor_version = version.rpartition(".")[0]
    flink_versions = flink.PUBLISHED_FLINK_VERSIONS
    advice = (
        f"say --flink_version={minor_version}"
        if minor_version in flink_versions
        else f"run a Flink of {', '.join(flink_versions)}"
    )
    is_compatible = minor_version == flink.flink_version
    yield Finding("flink, version", is_compatible, f"cluster {version}, job server for {flink.flink_version}", advice)


def run_checks(store: str | None, beam_options: Sequence[str]) -> Iterator[Finding]:
    """Check versions, memory, disk, GPU, the store, Prefect and Beam, in that order.

    Args:
        store: URL of an existing store to test, or None. No file is left in the store.
        beam_options: Beam's options, as they would be given to `reindex`.
    """
    yield from check_versions()
    yield _check_memory()
    yield _check_disk("disk, temporary", gettempdir())
    yield _check_disk("disk, cache", None)
    yield _check_gpu()
    if store is not None:
        yield from _check_store(store)
    yield _check_prefect()
    yield from _check_beam(beam_options)


def check_versions() -> Iterator[Finding]:
    """Compare the installed versions with those that this version of bookwheel requires."""
    yield Finding("bookwheel", True, f"{version('bookwheel')}, Python {platform.python_version()}")
    requirements = {requirement.name: requirement for requirement in map(Requirement, requires("bookwheel") or ())}
    for requirement in requirements.values():
        if "faiss" in requirement.name:
            continue  # faiss is checked below, since several distributions provide it
        try:
            installed_version = version(requirement.name)
        except PackageNotFoundError:
            continue  # commands report a missing extra when they need it
        fits = requirement.specifier.contains(installed_version, prereleases=True)
        if not fits or requirement.name in {"torch", "transformers", "apache-beam", "prefect"}:
            advice = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(requirement.name, fits, installed_version, advice)
    if (faiss_requirement := requirements.get("faiss-cpu")) is not None:
        yield _check_faiss(faiss_requirement.specifier)


def _check_faiss(specifier: SpecifierSet) -> Finding:
    """Report the distribution that provides the module faiss."""
    # With two packages, the command ends before these checks: see `check_single_faiss`.
    name, installed_version = next(iter(list_faiss_packages().items()), ("faiss-cpu", ""))
    is_allowed = bool(installed_version) and specifier.contains(installed_version, prereleases=True)
    description = f"{name} {installed_version}" if installed_version else "none"
    return Finding("faiss", is_allowed, description, f"pip install '{name}{specifier}'")


def _check_memory() -> Finding:
    free_bytes = get_worker_memory(()) or 0
    description = f"{format_bytes(free_bytes)} free, {count_cores()} cores"
    return Finding("memory", free_bytes >= MIN_MEMORY, description, "end other programs: a worker needs about 1 GB")


def _check_disk(what: str, folder: str | None) -> Finding:
    folder_on_disk = find_existing_ancestor(Path(folder) if folder else get_cache_folder())
    free_bytes = shutil.disk_usage(folder_on_disk).free
    folder_variable = "TMPDIR" if folder else "BOOKWHEEL_CACHE"
    advice = f"free some, or point {folder_variable} at another disk"
    return Finding(
        what,
        free_bytes >= MIN_DISK and os.access(folder_on_disk, os.W_OK),
        f"{format_bytes(free_bytes)} free in {folder_on_disk}",
        advice,
    )


def _check_gpu() -> Finding:
    if find_spec("torch") is None:
        return Finding("gpu", True, "torch is not installed: nothing is encoded here")
    import torch  # noqa: PLC0415 - takes seconds, and only this check needs it

    if torch.cuda.is_available():
        gpu_names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("gpu", True, f"{gpu_names}, CUDA {torch.version.cuda}")
    has_driver = shutil.which("nvidia-smi") is not None
    description = "a driver, but torch does not see the GPU" if has_driver else "none: encoding runs on the CPU"
    return Finding("gpu", not has_driver, description, "install a torch that is built for the driver's CUDA version")


def _check_store(url: str) -> Iterator[Finding]:
    try:
        probe = probe_store(Store.open(url))
    except ReadOnlyError:
        yield Finding("store", True, f"{url} is readable; stores of this kind are never written")
        return
    except BookwheelError as error:
        yield Finding("store", False, str(error), "correct this first: nothing can be built or read")
        yield from _check_conditional_create(url)
        return
    yield Finding("store", True, f"{url} reads and writes, {probe.seconds} s")
    yield _describe_conditional_create(probe.creates_exclusively)
    clock_text = f"{probe.clock_skew:+.1f} s compared with this machine's"
    yield Finding("store, clock", abs(probe.clock_skew) <= MAX_CLOCK_SKEW, clock_text, "set this machine's clock (NTP)")


def _check_conditional_create(url: str) -> Iterator[Finding]:
    """Check that a bucket in which no store exists yet accepts conditional writes, as a store
    needs.
    """
    with suppress(BookwheelError):  # the caller has already reported why the store cannot be opened
        files = Files(url)
        if not files.is_local:
            yield _describe_conditional_create(files.supports_exclusive_creation())


def _describe_conditional_create(is_exclusive: bool) -> Finding:
    description = "a second writer is refused" if is_exclusive else "a second writer is not refused"
    return Finding("store, conditional create", is_exclusive, description, "use a bucket that honours If-None-Match")


def _check_prefect() -> Finding:
    api = os.environ.get("PREFECT_API_URL") or find_prefect_server()
    if not api:
        return Finding("prefect", True, "no server is named: builds run without, other flows start one for the run")
    advice = f"start it (`prefect server start`), or unset PREFECT_API_URL ({mask_secrets(api)})"
    url = f"{api.rstrip('/')}/version"
    try:
        return Finding("prefect", True, f"server {fetch_json(url)} at {mask_secrets(api)}{_describe_leases(api)}")
    except RESPONSE_ERRORS as error:
        return report_no_answer("prefect", mask_secrets(url), error, advice)


def _describe_leases(api: str) -> str:
    """Return a warning if runs would end when the Prefect server is restarted.

    A run under a concurrency limit holds a lease on the server, and ends if it loses the lease.
    """
    lease_storage = fetch_json(f"{api.rstrip('/')}/admin/settings")["server"]["concurrency"]["lease_storage"]
    if not str(lease_storage).endswith(".memory"):
        return ""
    return "; its leases are in memory, so a restart of the server ends runs under a limit (see infra/prefect.yaml)"


def _check_beam(flags: Sequence[str]) -> Iterator[Finding]:
    try:
        options = PipelineOptions(list(check_flags(flags)))
    except BookwheelError as error:
        yield Finding("beam", False, str(error), "correct the options after `--`")
        return
    runner = get_runner_name(options)
    yield Finding("beam", True, runner or f"local workers, one per core ({count_cores()})")
    if runner == "FlinkRunner":
        yield from check_cluster(options)
    container_image = options.view_as(WorkerOptions).sdk_container_image
    if container_image:
        fits = f":{version('bookwheel')}" in container_image
        advice = f"use the image of bookwheel {version('bookwheel')}: workers must run the launcher's code"
        yield Finding("beam, image", fits, container_image, advice)


def doctor(*beam_options: str, store: str | None = None, common: Common | None = None) -> Reply:
    """Check versions, memory, disk, GPU, the store, Prefect and Beam; exit 3 if a check fails.

    Args:
        beam_options: Options of Beam and its runner, after `--`, as for reindex.
        store: A store to test; no file is left in it.
    """
    findings = list(run_checks(store, beam_options))
    failed_findings = [finding for finding in findings if not finding.ok]
    document = {"ok": not failed_findings, "findings": [asdict(finding) for finding in findings]}
    refusal = (
        f"{len(failed_findings)} of {len(findings)} checks failed: {failed_findings[0].what}: {failed_findings[0].todo}"
        if failed_findings
        else ""
    )
    return Reply(document, "\n".join(map(_format_finding, findings)), refusal)


def _format_finding(finding: Finding) -> str:
    finding_line = f"{'ok' if finding.ok else 'AMISS':<6}{finding.what:<26}{finding.found}"
    return finding_line if finding.ok else f"{finding_line}; {finding.todo}"
