"""Start a fine-tuning or an evaluation on a machine of the estimated size.

Purpose: for runs that get their own machines (Docker, Kubernetes). A run that would not fit into
the allowed resources is refused before it waits for a machine.
Not cached: it only starts another run.
Requires: the extras `model` and `train`; the deployment to start; this run must be able to read the
examples or questions, the models' files and the store.
"""

from typing import Any

from flows.evaluate import evaluate
from flows.finetune import finetune, prepare_training
from flows.machine.pools import create_start_flow
from rag_model.encoders.files import resolve_folder
from rag_model.resources import WorkEstimate, estimates
from rag_model.snapshots.existing import list_stale_indexes, read_reencode_recipe
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import PASSAGE
from rag_model.training.finetuning import estimate_work as estimate_training
from rag_model.training.origins import NamedModels


def estimate_training_run(
    memory: int, kind: str, store: str, train: str | None, dev: str | None, ref: str, **parameters: Any
) -> WorkEstimate:
    """Estimate the resources of a fine-tuning.

    The settings and the examples are read in the same way as by the fine-tuning.
    """
    model_names = NamedModels(parameters["encoder"], parameters["generator"], parameters["teacher"])
    tables, max_steps = parameters["recipe"] or {}, parameters["max_steps"]
    training = prepare_training(Store.open(store), kind, train, dev, ref, model_names, tables, max_steps)
    content, encoder = training.snapshot.manifest.content, training.job.origins.names.get(PASSAGE)
    if encoder is None or not training.objective.result.rebuilds:
        return estimate_training(training)
    stale_indexes = list_stale_indexes(content, read_reencode_recipe(content))
    rebuild_estimate = estimates.estimate_build(training.snapshot.n, resolve_folder(encoder), stale_indexes, memory)
    return estimate_training(training, rebuild_estimate)


def estimate_evaluation_run(memory: int, **parameters: Any) -> WorkEstimate:
    """Estimate the resources of an evaluation, which do not depend on the memory limit."""
    return estimates.estimate_evaluation(**parameters)


start_finetune = create_start_flow("launch-finetune", finetune, estimate_training_run, "work")
start_evaluate = create_start_flow("launch-evaluate", evaluate, estimate_evaluation_run)
