"""What a run has to do (`Work`), what it may have (`Limits`), and what it is therefore given (`Needs`).

Every constant of hardware and of processes is here, each with its unit and its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from rag_model.errors import ResourceError
from rag_model.index.sizing.amounts import gigabytes

SPARE = 1.25  # times the memory of the largest stage: what the bounds below leave out
CORE = 1.5e11  # operations a second of a core in a transformer in fp32: measured, MiniLM at 47 passages a second
GPU = 2e13  # the same of a GPU of the last years: a fifth of what its vendor says
PROCESS = 1 << 30  # bytes of a process with Prefect, torch, transformers and faiss: 700 MB measured
LAUNCHER = 700 << 20  # bytes of a process with Prefect, Beam and faiss, which runs a flow whose work is its workers'
CHUNKER = 256 << 20  # bytes of a worker that cuts pages: 209 MB measured
ENCODER = 600 << 20  # bytes of a worker that encodes, beside twice its weights: 720 MB measured with MiniLM's 90
CUT = 2e-4  # seconds of a core to cut a passage: measured on the demo's dump
INDEXED = 180e-6 / 96  # seconds of a core to put a dimension of a vector into the indexes: measured at 96 dimensions

_ALONE = ("launcher", "train", "merge")  # stages of one task; of all others a core each does one


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may have at most."""

    memory: int  # bytes
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has to do."""

    sizes: Mapping[str, str]  # as people read them
    stages: Mapping[str, int]  # bytes of one task of each stage, beside its process's own
    operations: float = 0.0  # of floating point, which a GPU can take over
    seconds: float = 0.0  # of a core, for all else
    disk: int = 0  # bytes beside the store's
    workers: bool = False  # whether worker processes share it, on a core each; else it is one process, on one GPU
    takes: str = "it takes"  # the beginning of the refusal
    instead: str = ", or take smaller batches, fewer passages or a smaller model"  # its end


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run is given, and what for."""

    work: Mapping[str, str]  # what there is to do, as people read it
    stages: Mapping[str, int]  # bytes of memory that each takes, its workers side by side
    memory: int  # bytes, launcher and workers together
    cores: int
    gpus: int
    disk: int  # bytes beside the store's
    hours: float
    env: Mapping[str, str] = field(default_factory=dict)  # variables of its environment that say so to libraries


def needs_of(work: Work, limits: Limits, hours: float) -> Needs:
    """Return what a run is given so that it takes about `hours`, or as near to it as the limits allow.

    A GPU is asked for only where cores alone would take longer. Cores that memory has no room for are not asked for,
    nor one for less than a second's work.

    Args:
        work: what there is to do.
        limits: what the run may have.
        hours: the time it may take; 0: as little as possible.

    Raises:
        ResourceError: it does not fit into the limits; the sentence says how much would.
    """
    wanted, on_cores, gpus = max(1.0, 3600 * hours), work.operations / CORE + work.seconds, 0
    if on_cores / limits.cores > wanted:
        gpus = min(limits.gpus if work.workers else min(1, limits.gpus), ceil(work.operations / GPU / wanted))
    left = work.seconds if gpus else on_cores
    cores = min(limits.cores, max(1, ceil(left / wanted), gpus))
    while cores > 1 and _memory(work, cores) > limits.memory:
        cores -= 1
    memory, stages, sizes = _memory(work, cores), _stages(work, cores), dict(work.sizes)
    worst = max(stages, key=lambda stage: stages[stage])
    if memory > limits.memory:
        raise ResourceError(
            f"{work.takes} {gigabytes(memory)} of memory to {worst}, and a run may have {gigabytes(limits.memory)}: "
            f"raise the limit{work.instead}"
        )
    if gpus and not work.workers:
        sizes["of them on the GPU"] = gigabytes(work.stages[worst])
    threads = {} if work.workers else {"OMP_NUM_THREADS": str(cores)}  # torch would take every core that it sees
    seconds = left / cores + (work.operations / GPU / gpus if gpus else 0)
    return Needs(sizes, stages, memory, cores, gpus, work.disk, seconds / 3600, threads)


def _stages(work: Work, cores: int) -> dict[str, int]:
    """Return the bytes of each stage, the process that runs the flow included."""
    if not work.workers:
        return {stage: PROCESS + size for stage, size in work.stages.items()}
    return {stage: LAUNCHER + size * (1 if stage in _ALONE else cores) for stage, size in work.stages.items()}


def _memory(work: Work, cores: int) -> int:
    return ceil(SPARE * max(_stages(work, cores).values()))
