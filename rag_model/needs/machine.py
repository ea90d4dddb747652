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
PROCESS = 700 << 20  # bytes of any process, without its data and models: 490 MB measured with Prefect, torch and faiss
LOOKED_UP = 6e-5  # seconds of a core to encode a passage with a static encoder: measured, 16,000 passages per second
CUT = 2e-4  # seconds of a core to cut a passage: measured on the demo's dump

_ALONE = ("train", "merge")  # stages of one task; in other stages each core runs one task


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
        tasks = cores if self.workers else 1
        return {stage: PROCESS + size * (1 if stage in _ALONE else tasks) for stage, size in self.stages.items()}

    def on(self, cores: int, gpus: int) -> "Needs":
        """Return the memory and the hours that it takes on so many cores and GPUs."""
        rate = gpus * GPU or cores * CORE
        hours = (self.operations / rate + self.seconds / cores) / 3600
        return Needs(self, ceil(SPARE * max(self.held(cores).values())), cores, gpus, hours)


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of a run, and its work."""

    work: Work
    memory: int  # bytes, launcher and workers together
    cores: int
    gpus: int
    hours: float


def needs_of(work: Work, most: Most, hours: float) -> Needs:
    """Return the fewest GPUs, then the fewest cores, with which a run takes `hours`; if none do, the fastest.

    Only what fits into the limit of memory is considered.

    Args:
        work: the work of the run.
        most: the limits of the run.
        hours: the target time; 0: as little as possible, but a core is not requested for less than a second of work.

    Raises:
        ResourceError: it does not fit into the limits; the message gives the memory needed.
    """
    free, gpus = parse_bytes(most.memory), most.gpus if work.workers else min(1, most.gpus)
    every = [work.on(c, g) for g in range(gpus + 1) for c in range(max(1, g), most.cores + 1)]
    fitting = [needs for needs in every if needs.memory <= free]
    if not fitting:
        stages = work.held(1)
        raise ResourceError(
            f"it takes {gigabytes(every[0].memory)} of memory to {max(stages, key=stages.__getitem__)}, and a run may "
            f"have {gigabytes(free)}: raise the limit, or take smaller batches, fewer passages or a smaller model"
        )
    in_time = (needs for needs in fitting if needs.hours <= max(hours, 1 / 3600))
    return next(in_time, min(fitting, key=lambda needs: needs.hours))
