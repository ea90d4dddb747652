"""The score job: a model's scores of texts before a training, block by block
(`training.data.blocks`).
"""

from collections.abc import Sequence

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from beam_jobs.workers import count_gpus
from rag_model.resources import CORE_FLOPS
from rag_model.training.data.blocks import ScoreBlock, score_block

_TOKENS_PER_CONTEXT = 320  # of a passage, an input and an output: an upper bound
_OPERATIONS_PER_TOKEN_BYTE = 2 / 4  # per token and byte of weights: two per weight of four bytes
# bytes of a worker without its weights: torch, transformers, and a batch's logits
_WORKER_BYTES = 1 << 30


def run(blocks: Sequence[ScoreBlock], on_progress: OnProgress | None = None, *, launch: Launch) -> list[Report]:
    """Score all blocks of one stage; return their reports, in order."""
    if not blocks:
        return []
    return run_job(
        blocks[0].stage,
        score_block,
        blocks,
        size_launch(blocks, launch, count_gpus()),
        on_progress,
        _seconds,
        memoised=True,
    )


def size_launch(blocks: Sequence[ScoreBlock], launch: Launch, gpu_count: int) -> Launch:
    """Return a launch with as many local workers as models fit in memory, and one for each GPU that
    may be used.
    """
    sized_launch = launch.for_tasks(2 * max(block.weight_bytes for block in blocks) + _WORKER_BYTES)
    return sized_launch if all(block.uses_cpu_only for block in blocks) else sized_launch.for_gpus(gpu_count)


def _seconds(block: ScoreBlock) -> float:
    return block.contexts * _TOKENS_PER_CONTEXT * _OPERATIONS_PER_TOKEN_BYTE * block.weight_bytes / CORE_FLOPS
