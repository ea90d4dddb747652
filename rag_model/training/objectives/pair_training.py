"""What DPR and MarginMSE share: settings and costs of training a question and a passage encoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rag_model.encoders.architecture import Architecture
from rag_model.needs.reading import PASSAGE, QUESTION, weights
from rag_model.training.data.negatives import NegativesRecipe, mining_bytes
from rag_model.training.objectives.group_task import GroupRecipe
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Job


@dataclass(frozen=True, slots=True)
class PairRecipe(GroupRecipe):
    """Settings of both."""

    shared: bool = False  # one encoder for questions and passages; DPR: two; the paper of MarginMSE: one
    freeze_passages: bool = False  # train only the question encoder: an index stays valid; the papers: both
    temperature: float = 1.0  # of the scores; the papers: 1. With vectors of unit length use 0.05


def pair_costs(
    job: Job[Any], mining: NegativesRecipe, recipe: PairRecipe, negatives: int, models: Mapping[str, Architecture]
) -> Costs:
    """Return the costs of encoding the questions and passages of a batch, each question with `negatives` more."""
    question = models["question"]
    passage = models.get("passage", question)
    learned = [question] if recipe.shared or recipe.freeze_passages else [question, passage]
    read = recipe.batch_size * (1 + negatives)
    kept = question.activations(recipe.batch_size, QUESTION)
    kept += 0 if recipe.freeze_passages else passage.activations(read, PASSAGE)
    stages = {
        "train": weights(question, passage) + (LEARNED - 1) * weights(*learned) + kept,
        "mine": mining_bytes(job.snapshot, mining),
    }
    forward = recipe.batch_size * QUESTION * question.operations + read * PASSAGE * passage.operations
    ranked = min(mining.ranked, job.snapshot.n) + len(job.examples["dev"])
    batches = max(1, len(job.examples["train"]) // recipe.batch_size)
    return Costs(stages, batches, BACKWARD * forward, ranked * PASSAGE * passage.operations)
