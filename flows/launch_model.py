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
from flows.stage import stage
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.generate.folder import rag_settings
from rag_model.generate.named import rag_folder, rag_id
from rag_model.needs.evaluation import work_of as of_evaluation
from rag_model.needs.machine import Work
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.needs import work_of as of_training
from rag_model.training.origins import Named


@stage
def weigh_training(
    memory: int, kind: str, store: str, train: str | None, dev: str | None, ref: str, **given: Any
) -> Work:
    """Estimate what a fine-tuning needs; settings and examples are read as the fine-tuning itself does."""
    named = Named(given["encoder"], given["generator"], given["teacher"])
    told = Given(named, given["recipe"] or {}, given["max_steps"])
    return of_training(prepare(Store.open(store), kind, train, dev, ref, told))


@stage
def weigh_evaluation(
    memory: int, store: str, model: str, questions: str, ref: str, settings: Evaluation | None, **_: Any
) -> Work:
    """Estimate what an evaluation needs."""
    opened, asked, settings = Store.open(store), read_questions(questions), settings or Evaluation()
    folder = rag_folder(opened, rag_id(opened, model))
    k = settings.k or rag_settings(folder).k
    return of_evaluation(Snapshot.from_store(opened, ref), folder, k, len(asked.questions), settings)


launch_finetune = launching("launch-finetune", finetune, weigh_training, "work")
launch_evaluate = launching("launch-evaluate", evaluate, weigh_evaluation)
