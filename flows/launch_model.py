"""Start a fine-tuning or an evaluation on a machine of the right size, estimated from its models, data and snapshot.

Purpose: for people, if runs get machines of their own (Docker, Kubernetes): a run that cannot fit is refused before it
waits for a machine.
Caching: none: nothing is trained or answered here.
Requires: the extras model and train; the deployment to start; this run must be able to read the examples or questions,
the models' files and the store.
"""

from typing import Any

from flows.evaluate import evaluate
from flows.finetune import Given, finetune, prepare
from flows.machine.pools import launching
from rag_model.encoders.resolve import resolve_folder
from rag_model.needs import build, evaluation
from rag_model.needs.machine import Work
from rag_model.snapshots.reencoded import recipe_for, stale
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import PASSAGE
from rag_model.training.needs import work_of as of_training
from rag_model.training.origins import Named


def weigh_training(
    memory: int, kind: str, store: str, train: str | None, dev: str | None, ref: str, **given: Any
) -> Work:
    """Estimate what a fine-tuning needs; settings and examples are read as the fine-tuning itself does."""
    named = Named(given["encoder"], given["generator"], given["teacher"])
    job = prepare(Store.open(store), kind, train, dev, ref, Given(named, given["recipe"] or {}, given["max_steps"]))
    content, encoder = job.snapshot.manifest.content, job.job.origins.names.get(PASSAGE)
    if encoder is None or not job.objective.result.rebuilds:
        return of_training(job)
    indexes = stale(content, recipe_for(content))
    return of_training(job, build.work_of(job.snapshot.n, resolve_folder(encoder), indexes, memory))


def weigh_evaluation(memory: int, **given: Any) -> Work:
    """Estimate what an evaluation needs; its work does not depend on the memory."""
    return evaluation.work_of(**given)


launch_finetune = launching("launch-finetune", finetune, weigh_training, "work")
launch_evaluate = launching("launch-evaluate", evaluate, weigh_evaluation)
