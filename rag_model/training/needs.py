"""Estimate the work of a fine-tuning from the sizes of its models, examples and snapshot."""

from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.resolve import resolve_folder
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import CORE, Work
from rag_model.needs.reading import weights
from rag_model.training.finetuning import Finetuning
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import LEARNED, Costs


def work_of(finetuning: Finetuning) -> Work:
    """Return the work of a fine-tuning, without loading a model and without mining.

    Raises:
        InputError: a model's folder is incomplete.
        UsageError: the snapshot has no such index.
    """
    job = finetuning.job
    models = {part: architecture_of(resolve_folder(name)) for part, name in job.origins.names.items()}
    loop, costs = job.settings.loop, finetuning.objective.costs(job, models)
    every = [_spent(one, one.loop or loop) for one in (*costs.before, costs)]
    steps, operations = (sum(column) for column in zip(*every, strict=True))
    stages = {name: held for one in (*costs.before, costs) for name, held in one.stages.items()}
    held = weights(*models.values())
    read = (
        {"examples": len(job.examples["train"])} if finetuning.objective.takes_examples else {"texts": job.snapshot.n}
    )
    sizes = {"steps": f"{steps:,}", **{name: f"{n:,}" for name, n in read.items()}, "weights": gigabytes(held)}
    if costs.rebuilds:
        seconds = costs.rebuild / CORE
        sizes["rebuilds of the index"] = (
            f"{costs.rebuilds:,}, each {seconds:,.0f} s of a core ({costs.rebuild:.1e} FLOPs)"
        )
    if costs.once:
        sizes["scores of the generator"] = f"{costs.once / CORE:,.0f} s of a core ({costs.once:.1e} FLOPs)"
    return Work(sizes, stages, operations, disk=len(every) * (loop.keep + 1) * (LEARNED - 1) * held)


def _spent(costs: Costs, loop: LoopSettings) -> tuple[int, float]:
    """Return the steps of a stage, and its operations."""
    steps = loop.steps(costs.batches, 1)
    looks, rebuilds = 2 + steps // loop.evaluate_every, costs.rebuilds * costs.rebuild
    return steps, costs.once + steps * loop.accumulation * costs.step + looks * costs.look + rebuilds
