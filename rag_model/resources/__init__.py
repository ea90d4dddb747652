"""Before a run starts, estimate from the data and model sizes which resources it needs.

This module defines the work of a run (`WorkEstimate`), its limits (`RunLimits`) and its resources
(`RunResources`), the cost of reading passages with a model, and constants of hardware and processes
with their units and sources. Each index kind has its own constants. `resources.estimates` estimates
builds, evaluations and retrievers.

The costs of reading passages are upper bounds, because every passage is assumed to be long.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from rag_model.errors import ResourceError
from rag_model.process import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rag_model.encoders.architecture import Architecture

# Factor for the memory of the largest stage, to cover costs that the constants below omit.
MEMORY_MARGIN = 1.25
# Floating-point operations per second of a core for a transformer in fp32; measured with MiniLM at
# 47 passages per second.
CORE_FLOPS = 1.5e11
# Operations per second of a small recent GPU such as an L4, at a third of its specified
# performance. An H200 reached 3.3e14, a third of its specified performance, so hours for larger
# GPUs are upper bounds.
GPU_FLOPS = 2e13
# Bytes of a process without data and models; 490 MB were measured with Prefect, torch and faiss.
PROCESS_BYTES = 700 << 20
# Seconds of a core to encode a passage with a static encoder; measured at 16,000 passages per
# second.
STATIC_ENCODE_SECONDS = 6e-5
CHUNK_SECONDS = 2e-4  # seconds of a core to chunk a passage; measured on the demo's dump

QUESTION_TOKENS = 32  # assumed number of tokens of a question
PASSAGE_TOKENS = 160  # assumed number of tokens of a passage and its title
# Tokens of a generator's input, without the answer.
PROMPT_TOKENS = QUESTION_TOKENS + PASSAGE_TOKENS + 32
FLOAT32_BYTES = 4  # bytes of a float32

# Stages with one task; in other stages each core runs one task.
_SINGLE_TASK_STAGES = ("train", "merge")


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The maximum memory, cores and GPUs for one run."""

    memory: str  # maximum memory as text, such as 64GB
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class WorkEstimate:
    """The estimated work of a run."""

    sizes: Mapping[str, str]  # sizes of the inputs by name, as text for users
    stages: Mapping[str, int]  # memory of one task in bytes, by stage, without the process itself
    operations: float = 0.0  # floating-point operations that a GPU can execute
    seconds: float = 0.0  # seconds of one core for all other work
    disk: int = 0  # bytes on disk, without the store
    # Whether worker processes share the work, one per core; False: one process with at most one
    # GPU.
    workers: bool = False

    def compute_stage_memory(self, cores: int) -> dict[str, int]:
        """Return the memory of each stage in bytes on `cores` cores, with the flow's process."""
        n_tasks = cores if self.workers else 1
        return {
            stage: PROCESS_BYTES + stage_bytes * (1 if stage in _SINGLE_TASK_STAGES else n_tasks)
            for stage, stage_bytes in self.stages.items()
        }

    def estimate_resources(self, cores: int, gpus: int) -> "RunResources":
        """Return the required memory and the hours on `cores` cores and `gpus` GPUs."""
        flops = gpus * GPU_FLOPS or cores * CORE_FLOPS
        hours = (self.operations / flops + self.seconds / cores) / 3600
        return RunResources(
            self, ceil(MEMORY_MARGIN * max(self.compute_stage_memory(cores).values())), cores, gpus, hours
        )


@dataclass(frozen=True, slots=True)
class RunResources:
    """The resources of a run, with its work and its duration."""

    work: WorkEstimate
    memory: int  # bytes of the flow's process and its workers together
    cores: int
    gpus: int
    hours: float  # estimated duration


def choose_resources(work: WorkEstimate, limits: RunLimits, hours: float) -> RunResources:
    """Return the resources with the fewest GPUs, and then the fewest cores, for a run of at most
    `hours`.

    If no resources reach this time, return the fastest. Only resources within the memory limit are
    considered.

    Args:
        work: the work of the run.
        limits: the limits of the run.
        hours: target time in hours; 0 means as fast as possible, down to one second.

    Raises:
        ResourceError: The run does not fit into the limits; the message states the required memory.
    """
    memory_limit, max_gpus = parse_bytes(limits.memory), limits.gpus if work.workers else min(1, limits.gpus)
    candidates = [
        work.estimate_resources(cores, gpus)
        for gpus in range(max_gpus + 1)
        for cores in range(max(1, gpus), limits.cores + 1)
    ]
    fitting_candidates = [candidate for candidate in candidates if candidate.memory <= memory_limit]
    if not fitting_candidates:
        stage_memory = work.compute_stage_memory(1)
        largest_stage = max(stage_memory, key=stage_memory.__getitem__)
        raise ResourceError(
            f"the stage {largest_stage} needs {format_bytes(candidates[0].memory)} of memory, and a run may use "
            f"{format_bytes(memory_limit)}: raise the limit, or use smaller batches, fewer passages or a smaller model"
        )
    fast_candidates = (candidate for candidate in fitting_candidates if candidate.hours <= max(hours, 1 / 3600))
    return next(fast_candidates, min(fitting_candidates, key=lambda candidate: candidate.hours))


def estimate_weight_bytes(*models: "Architecture") -> int:
    """Return the bytes of the models' weights in float32."""
    return FLOAT32_BYTES * sum(architecture.parameters for architecture in models)


def estimate_decoding_bytes(generator: "Architecture", n_texts: int, answer_tokens: int) -> int:
    """Estimate the bytes to decode `n_texts` answers of `answer_tokens` tokens at once."""
    # Each token has a key and a value in every layer.
    n_cache_values = 2 * generator.layers * generator.hidden * (PROMPT_TOKENS + answer_tokens)
    return (
        FLOAT32_BYTES * n_texts * (2 * n_cache_values + 2 * generator.vocabulary + 8 * generator.hidden * PROMPT_TOKENS)
    )
