"""Estimate the work of a fine-tuning from the sizes of its models, examples and snapshot."""

from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.resolve import resolve_folder
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import CORE, Work
from rag_model.needs.reading import weights
from rag_model.training.finetuning import Finetuning
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import LEARNED, Costs


def work_of(finetuning: Finetuning, rebuild: Work | None = None) -> Work:
    """Return the work of a fine-tuning, without loading a model and without mining.

    `rebuild` is the work of one rebuild of its index, which is done beside the training; None: not counted.

    Raises:
        InputError: a model's folder is incomplete.
        UsageError: the snapshot has no such index.
    """
    objective, job = finetuning.objective, finetuning.job
    models = {part: architecture_of(resolve_folder(name)) for part, name in job.origins.names.items()}
    loop, costs = job.settings.loop, objective.costs(job, models)
    parts, held = (*costs.before, costs), weights(*models.values())
    every = [_spent(one, one.loop or loop) for one in parts]
    steps, operations = (sum(column) for column in zip(*every, strict=True))
    stages = {name: size for one in parts for name, size in one.stages.items()}
    disk = len(every) * (loop.keep + 1) * (LEARNED - 1) * held
    read, n = ("examples", len(job.examples["train"])) if objective.takes_examples else ("texts", job.snapshot.n)
    sizes = {"steps": f"{steps:,}", read: f"{n:,}", "weights": gigabytes(held)}
    if costs.rebuilds:
        sizes["rebuilds of the index"] = f"{costs.rebuilds:,}, each {_told(costs.rebuild)}"
    if rebuild is not None:
        peak, disk = max(rebuild.held(1).values()), disk + rebuild.disk
        stages["rebuild"] = max(costs.stages.values()) + peak
        sizes["a rebuild takes"] = f"{gigabytes(peak)} of memory, {gigabytes(rebuild.disk)} of disk"
    if costs.once:
        sizes["scores of the generator"] = _told(costs.once)
    return Work(sizes, stages, operations, disk=disk)


def _told(operations: float) -> str:
    return f"{operations / CORE:,.0f} s of a core ({operations:.1e} FLOPs)"


def _spent(costs: Costs, loop: LoopSettings) -> tuple[int, float]:
    """Return the steps of a stage, and its operations."""
    steps = loop.steps(costs.batches, 1)
    looks, rebuilds = 2 + steps // loop.evaluate_every, costs.rebuilds * costs.rebuild
    return steps, costs.once + steps * loop.accumulation * costs.step + looks * costs.look + rebuilds
