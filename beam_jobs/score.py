"""The score job: what a model makes of texts before a training, block by block (`training.data.blocks`)."""

from collections.abc import Sequence

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from beam_jobs.workers import gpus
from rag_model.needs.machine import CORE
from rag_model.training.data.blocks import Block, score

_TOKENS = 320  # of a passage, an input and an output: an upper bound
_OPERATIONS = 2 / 4  # per token and byte of weights: two per weight of four bytes
_BESIDE = 1 << 30  # bytes of a worker without its weights: torch, transformers, and a batch's logits


def run(blocks: Sequence[Block], tell: OnProgress | None = None, *, launch: Launch) -> list[Report]:
    """Score all blocks of one stage; return their reports, in order."""
    if not blocks:
        return []
    return run_job(blocks[0].stage, score, blocks, with_workers(blocks, launch, gpus()), tell, _seconds, memoised=True)


def with_workers(blocks: Sequence[Block], launch: Launch, gpu_count: int) -> Launch:
    """Return a launch with as many local workers as models fit in memory, and one for each GPU that may be used."""
    fitting = launch.for_tasks(2 * max(block.weights for block in blocks) + _BESIDE)
    return fitting if all(block.by_cpu for block in blocks) else fitting.for_gpus(gpu_count)


def _seconds(block: Block) -> float:
    return block.contexts * _TOKENS * _OPERATIONS * block.weights / CORE
