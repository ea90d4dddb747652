"""Check everything that a run needs before it starts: one line for each finding, with advice if it is not ok."""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, WorkerOptions
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from beam_jobs.options import checked
from beam_jobs.workers import worker_memory
from flows.machine import cluster
from flows.machine.finding import AMISS, Finding, ask, unanswered
from rag_model.cores import cores
from rag_model.errors import BookwheelError, ReadOnlyError
from rag_model.extras import faiss_packages
from rag_model.index.sizing.amounts import gigabytes
from rag_model.secrets import without_secrets
from rag_model.store.objects.cache import cache_folder, existing
from rag_model.store.objects.probe import probe
from rag_model.store.store import Store

LEAST_MEMORY = 2e9  # bytes: a worker with MiniLM takes 0.7 GB, and so does the launcher
LEAST_DISK = 5e9  # bytes: an encoder, a cache and one index of a small corpus
MOST_SKEW = 60.0  # seconds: with more, `created_at` misleads people, and S3 refuses signatures at 900


def examine(store: str | None, beam_options: Sequence[str]) -> Iterator[Finding]:
    """Check versions, memory, disk, GPU, the store, Prefect and Beam, in that order.

    Args:
        store: URL of an existing store to test; None: none. No file is left in it.
        beam_options: the options that `reindex` would get.
    """
    yield from versions()
    yield _memory()
    yield from (_disk(name, folder) for name, folder in (("disk, temporary", gettempdir()), ("disk, cache", None)))
    yield _gpu()
    if store is not None:
        yield from _store(store)
    yield _prefect()
    yield from _beam(beam_options)


def versions() -> Iterator[Finding]:
    """Compare the installed versions with those that this version of bookwheel was tested with."""
    yield Finding("bookwheel", True, f"{version('bookwheel')}, Python {platform.python_version()}")
    known = {requirement.name: requirement for requirement in map(Requirement, requires("bookwheel") or ())}
    for requirement in known.values():
        if "faiss" in requirement.name:
            continue  # below: one of several
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue  # a missing extra is reported where it is needed
        fits = requirement.specifier.contains(installed, prereleases=True)
        if not fits or requirement.name in {"torch", "transformers", "apache-beam", "prefect"}:
            todo = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(requirement.name, fits, installed, todo)
    if (wanted := known.get("faiss-cpu")) is not None:
        yield _faiss(wanted.specifier)


def _faiss(wanted: SpecifierSet) -> Finding:
    """Say which distribution the module faiss is of."""
    found = faiss_packages()
    told = " and ".join(f"{name} {own}" for name, own in found.items())
    if len(found) > 1:
        todo = f"pip uninstall --yes {' '.join(found)}, then pip install --no-deps '{[*found][-1]}{wanted}'"
        return Finding("faiss", False, f"{told}, over each other", todo)
    fits = all(wanted.contains(own, prereleases=True) for own in found.values())
    return Finding(
        "faiss", fits and bool(found), told or "none", f"pip install '{next(iter(found), 'faiss-cpu')}{wanted}'"
    )


def _memory() -> Finding:
    free = worker_memory(()) or 0
    found = f"{gigabytes(free)} free, {cores()} cores"
    return Finding("memory", free >= LEAST_MEMORY, found, "end other programs: a worker needs about 1 GB")


def _disk(what: str, folder: str | None) -> Finding:
    place = existing(Path(folder) if folder else cache_folder())
    free = shutil.disk_usage(place).free
    variable = "TMPDIR" if folder else "BOOKWHEEL_CACHE"
    todo = f"free some, or point {variable} at another disk"
    return Finding(what, free >= LEAST_DISK and os.access(place, os.W_OK), f"{gigabytes(free)} free in {place}", todo)


def _gpu() -> Finding:
    if find_spec("torch") is None:
        return Finding("gpu", True, "torch is not installed: nothing is encoded here")
    import torch  # noqa: PLC0415 - takes seconds, and only this check needs it

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        return Finding("gpu", True, f"{names}, CUDA {torch.version.cuda}")
    driver = shutil.which("nvidia-smi") is not None
    found = "a driver, but torch does not see the GPU" if driver else "none: encoding runs on the CPU"
    return Finding("gpu", not driver, found, "install a torch that is built for the driver's CUDA version")


def _store(url: str) -> Iterator[Finding]:
    try:
        probed = probe(Store.open(url))
    except ReadOnlyError:
        yield Finding("store", True, f"{url} reads; it is never written where it lies")
        return
    except BookwheelError as failed:
        yield Finding("store", False, str(failed), "correct this first: nothing can be built or read")
        return
    yield Finding("store", True, f"{url} reads and writes, {probed.seconds} s")
    found = "a second writer is refused" if probed.excludes else "a second writer overwrites the first"
    yield Finding("store, conditional create", probed.excludes, found, "use a bucket that honours If-None-Match")
    skewed = f"{probed.skew:+.1f} s beside this machine's"
    yield Finding("store, clock", abs(probed.skew) <= MOST_SKEW, skewed, "set this machine's clock (NTP)")


def _prefect() -> Finding:
    api = os.environ.get("PREFECT_API_URL") or _profile_api()
    if not api:
        return Finding("prefect", True, "no server is named: builds run without, other flows start one for the run")
    todo = f"start it (`prefect server start`), or unset PREFECT_API_URL ({without_secrets(api)})"
    url = f"{api.rstrip('/')}/version"
    try:
        return Finding("prefect", True, f"server {ask(url)} at {without_secrets(api)}{_leases(api)}")
    except AMISS as failed:
        return unanswered("prefect", without_secrets(url), failed, todo)


def _leases(api: str) -> str:
    """Say whether a restart of the server would end runs: those under a concurrency limit hold a lease there."""
    storage = ask(f"{api.rstrip('/')}/admin/settings")["server"]["concurrency"]["lease_storage"]
    if not str(storage).endswith(".memory"):
        return ""
    return (
        "; its leases are in memory, so a restart of it ends runs under a limit (infra/prefect.yaml says what to set)"
    )


def _profile_api() -> str | None:
    from prefect.settings import PREFECT_API_URL  # noqa: PLC0415 - reads the profile when asked, not when imported

    api: str | None = PREFECT_API_URL.value()
    return api


def _beam(flags: Sequence[str]) -> Iterator[Finding]:
    try:
        options = PipelineOptions(list(checked(flags)))
    except BookwheelError as refused:
        yield Finding("beam", False, str(refused), "correct the options after `--`")
        return
    runner = options.view_as(StandardOptions).runner
    yield Finding("beam", True, runner or f"local workers, one per core ({cores()})")
    if runner == "FlinkRunner":
        yield from cluster.look(options)
    image = options.view_as(WorkerOptions).sdk_container_image
    if image:
        fits = f":{version('bookwheel')}" in image
        todo = f"use the image of bookwheel {version('bookwheel')}: workers must run the launcher's code"
        yield Finding("beam, image", fits, image, todo)
