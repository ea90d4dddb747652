"""What one run may have of a machine, and what it shall be given: the words in which a scheduler is asked for one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SPARE = 1.25  # times the memory of the largest stage
LAUNCHER = 700 << 20  # bytes: Prefect, Beam and faiss in the process that runs a flow
CORE = 1.5e11  # operations a second that a core does of a transformer's in fp32: MiniLM, 47 passages a second
GPU = 2e13  # the same of a GPU of the last years: a fifth of what its vendor says


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may have at most."""

    memory: int  # bytes
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run shall be given, and what for."""

    work: Mapping[str, str]  # what there is to do, as people read it
    stages: Mapping[str, int]  # bytes of memory that each takes, its workers side by side
    memory: int  # bytes, launcher and workers together
    cores: int
    gpus: int
    disk: int  # bytes beside the store's
    hours: float
    env: Mapping[str, str] = field(default_factory=dict)  # variables of its environment that say so to libraries
