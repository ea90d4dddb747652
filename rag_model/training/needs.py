"""What a fine-tuning will need, told by the sizes of its models, examples and snapshot before a weight is read."""

from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.resolve import resolve_folder
from rag_model.generate.needs import NUMBER, one_process, weights
from rag_model.index.sizing.amounts import gigabytes
from rag_model.machine import Limits, Needs
from rag_model.training.finetuning import Finetuning
from rag_model.training.objectives.objective import LEARNED


def needs_of(finetuning: Finetuning, limits: Limits, hours: float) -> Needs:
    """Return what a fine-tuning shall be given; it runs in one process, on cores or on one GPU.

    Args:
        finetuning: what is trained, on what, and how; no model of it is loaded, and nothing is mined.
        limits: what a run may have.
        hours: the time it may take, about; 0: as little as possible.

    Raises:
        InputError: a model's folder is incomplete.
        ResourceError: it does not fit into the limits; the sentence says how much would.
    """
    job = finetuning.job
    models = {part: architecture_of(resolve_folder(name)) for part, name in job.origins.names.items()}
    loop, costs = job.settings.loop, finetuning.objective.costs(job, models)
    steps = loop.steps(costs.batches, 1)
    looks = 2 + steps // loop.evaluate_every
    work = {
        "steps": f"{steps:,}",
        "examples": f"{len(job.examples['train']):,}",
        "weights": gigabytes(weights(*models.values())),
    }
    operations = steps * loop.accumulation * costs.step + looks * costs.look
    checkpoint = (LEARNED - 1) * NUMBER * sum(model.parameters for model in models.values())
    return one_process(work, costs.stages, operations, (loop.keep + 1) * checkpoint, limits, hours)
