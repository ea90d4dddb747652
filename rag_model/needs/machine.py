"""The work of a run (`Work`), its limits (`Most`), and the resources it gets (`Needs`).

The constants of hardware and of processes are here, each with its unit and its source; an index kind has its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rag_model.errors import ResourceError
from rag_model.index.sizing.amounts import gigabytes, parse_bytes

SPARE = 1.25  # factor on the memory of the largest stage, for what the bounds below leave out
CORE = 1.5e11  # operations per second of a core in a transformer in fp32: measured, MiniLM at 47 passages per second
GPU = 2e13  # the same for a recent GPU: a fifth of its vendor's figure
PROCESS = 1 << 30  # bytes of a process with Prefect, torch, transformers and faiss: 700 MB measured
LAUNCHER = 700 << 20  # bytes of a process with Prefect, Beam and faiss, which runs a flow while its workers do the work
CHUNKER = 256 << 20  # bytes of a worker that cuts pages: 209 MB measured
ENCODER = 600 << 20  # bytes of a worker that encodes, without twice its weights: 720 MB measured with MiniLM's 90
LOOKED_UP = 6e-5  # seconds of a core to encode a passage with a static encoder: measured, 16,000 passages per second
CUT = 2e-4  # seconds of a core to cut a passage: measured on the demo's dump

_ALONE = ("launcher", "train", "merge")  # stages of one task; in other stages each core runs one task


@dataclass(frozen=True, slots=True)
class Most:
    """The most memory, cores and GPUs for one run."""

    memory: str  # as people write it: 64GB
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a run."""

    sizes: Mapping[str, str]  # as text for people
    stages: Mapping[str, int]  # bytes of one task of each stage, without its process
    operations: float = 0.0  # floating-point operations, which a GPU can do
    seconds: float = 0.0  # of a core, for the rest
    disk: int = 0  # bytes, without the store
    workers: bool = False  # whether worker processes share it, one per core; else one process with at most one GPU

    def held(self, cores: int) -> dict[str, int]:
        """Return the bytes of each stage on so many cores, the process that runs the flow included."""
        flow, tasks = (LAUNCHER, cores) if self.workers else (PROCESS, 1)
        return {stage: flow + size * (1 if stage in _ALONE else tasks) for stage, size in self.stages.items()}


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of a run, and its work."""

    work: Work
    memory: int  # bytes, launcher and workers together
    cores: int
    gpus: int
    hours: float


def needs_of(work: Work, most: Most, hours: float) -> Needs:
    """Return the resources with which a run takes about `hours`, or as close to it as its limits allow.

    A GPU is requested only if cores alone would take longer. Cores are limited by memory, and a core is not requested
    for less than a second of work.

    Args:
        work: the work of the run.
        most: the limits of the run.
        hours: the target time; 0: as little as possible.

    Raises:
        ResourceError: it does not fit into the limits; the message gives the memory needed.
    """
    wanted, free = max(1.0, 3600 * hours), parse_bytes(most.memory)
    left, gpus = work.operations / CORE + work.seconds, 0
    if left / most.cores > wanted:
        gpus = min(most.gpus, ceil(work.operations / GPU / wanted) if work.workers else 1)
    left, on_gpus = (work.seconds, work.operations / GPU / gpus) if gpus else (left, 0.0)
    cores = min(most.cores, max(1, ceil(left / wanted), gpus))
    while cores > 1 and SPARE * max(work.held(cores).values()) > free:
        cores -= 1
    stages = work.held(cores)
    worst = max(stages, key=stages.__getitem__)
    memory = ceil(SPARE * stages[worst])
    if memory > free:
        raise ResourceError(
            f"it takes {gigabytes(memory)} of memory to {worst}, and a run may have {gigabytes(free)}: raise the "
            "limit, or take smaller batches, fewer passages or a smaller model"
        )
    return Needs(work, memory, cores, gpus, (left / cores + on_gpus) / 3600)
