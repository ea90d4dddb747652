"""Estimate the work of a fine-tuning from the sizes of its models, examples and snapshot."""

from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.resolve import resolve_folder
from rag_model.index.sizing.amounts import gigabytes
from rag_model.needs.machine import CORE, Work
from rag_model.needs.reading import weights
from rag_model.training.finetuning import Finetuning
from rag_model.training.objectives.objective import LEARNED


def work_of(finetuning: Finetuning, rebuild: Work | None = None) -> Work:
    """Return the work of a fine-tuning, without loading a model and without mining.

    `rebuild` is the work of one rebuild of its index, which is done beside the training; None: not counted.

    Raises:
        InputError: a model's folder is incomplete.
        UsageError: the snapshot has no such index.
    """
    objective, job = finetuning.objective, finetuning.job
    models = {part: architecture_of(resolve_folder(name)) for part, name in job.origins.names.items()}
    costs, held = objective.costs(job, models), weights(*models.values())
    stages: dict[str, int] = {}
    steps, operations, disk = 0, costs.rebuilds * costs.rebuild, 0
    for part in (*costs.before, costs):
        loop = part.loop or job.settings.loop
        taken = loop.steps(part.batches, 1)
        looks = 2 + taken // loop.evaluate_every
        steps += taken
        operations += part.once + taken * loop.accumulation * part.step + looks * part.look
        disk += (loop.keep + 1) * (LEARNED - 1) * held
        stages |= part.stages
    read, n = ("examples", len(job.examples["train"])) if objective.takes_examples else ("texts", job.snapshot.n)
    sizes = {"steps": f"{steps:,}", read: f"{n:,}"}
    if costs.rebuilds:
        sizes["rebuilds of the index"] = f"{costs.rebuilds:,}, each {costs.rebuild / CORE:,.0f} s of a core"
    if costs.once:
        sizes["scores of the generator"] = f"{costs.once / CORE:,.0f} s of a core"
    if rebuild is not None:
        peak, disk = max(rebuild.held(1).values()), disk + rebuild.disk
        stages["rebuild"] = max(costs.stages.values()) + peak
        sizes["a rebuild takes"] = f"{gigabytes(peak)} of memory, {gigabytes(rebuild.disk)} of disk"
    return Work(sizes, stages, operations, disk=disk)
