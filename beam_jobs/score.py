"""The score job: a generator's likelihood of answers after each of their passages, block by block."""

from collections.abc import Sequence

from beam_jobs.job import run_job
from beam_jobs.launch import Launch, OnProgress, Report
from rag_model.needs.machine import CORE
from rag_model.training.data.answer_scores import STAGE, ScoreTask, score

_TOKENS = 320  # of a passage, an input and an output: an upper bound
_OPERATIONS = 2 / 4  # per token and byte of weights: two per weight of four bytes
_BESIDE = 1 << 30  # bytes of a worker without its weights: torch, transformers, and a batch's logits


def run(tasks: Sequence[ScoreTask], tell: OnProgress | None = None, *, launch: Launch) -> list[Report]:
    """Score all blocks; return their reports, in order. As many local workers load the generator as fit in memory."""
    held = max((task.weights for task in tasks), default=0)
    return run_job(STAGE, score, tasks, launch.for_tasks(2 * held + _BESIDE), tell, _seconds, memoised=True)


def _seconds(task: ScoreTask) -> float:
    return task.contexts * _TOKENS * _OPERATIONS * task.weights / CORE
