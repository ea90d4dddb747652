"""Cross-encoder: train a reranker with a listwise loss over hard negatives (Gao et al. 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.torch_cross_encoder import TrainableCrossEncoder
from rag_model.resources import PASSAGE_TOKENS, QUESTION_TOKENS, estimate_weight_bytes
from rag_model.store.versions.model_manifest import CROSS_ENCODER as PART
from rag_model.training.data.batches import IncompletePolicy, ListBatch, build_list_batch
from rag_model.training.data.negatives import NegativesRecipe, estimate_mining_bytes
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.losses import listwise_loss, pad_lists
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    TrainingCosts,
)
from rag_model.training.objectives.task_bases import GroupRecipe, ListTask, MiningObjective

GoalName = Literal["MRR", "Success@1", "loss"]
LOOP = LoopSettings(epochs=2, learning_rate=1e-5, warmup_share=0.1, weight_decay=0.01, max_gradient_norm=1.0)
"""Values of the authors' code, github.com/luyug/Reranker: examples/msmarco-doc and the trainer."""


@dataclass(frozen=True, slots=True)
class CrossEncoderRecipe(GroupRecipe):
    """Settings of a cross-encoder. "Code" is github.com/luyug/Reranker, of Gao et al. 2021."""

    # number of questions per batch and process; 4 in one process instead of 1 on each of 4 GPUs,
    # because a step then has the same number of questions
    batch_size: int = 4
    # number of negatives per question, drawn again in each epoch; code: train_group_size 8, which
    # includes the positive
    negatives: int = 7
    # number of hard negatives that are ranked together with the positive of a dev question; mining
    # selects up to 30
    ranked: int = 30
    # what to do with examples without a positive or a negative passage: drop them, or refuse the
    # file
    missing: IncompletePolicy = "drop"
    goal: GoalName = "MRR"  # dev measure that selects the best weights

    def __post_init__(self) -> None:
        check_bounds(self, "[cross_encoder]", {"batch_size": 1, "negatives": 1, "ranked": 1})


@dataclass(frozen=True, slots=True)
class CrossEncoderTraining:
    """Settings of a cross-encoder's training."""

    loop: LoopSettings = LOOP  # github.com/luyug/Reranker: examples/msmarco-doc
    cross_encoder: CrossEncoderRecipe = field(default_factory=CrossEncoderRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class CrossEncoderTask(ListTask[TrainableCrossEncoder, CrossEncoderRecipe]):
    """Train a `TrainableCrossEncoder` on examples with positives and negatives."""

    kind = "cross-encoder"

    def loss(self, batch: ListBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return `listwise_loss` over the lists of the batch, and its `accuracy`."""
        loss, accuracy = listwise_loss(pad_lists(self.module(*batch.list_pairs()), batch.lengths))
        return loss, {"accuracy": accuracy}

    def evaluate(self) -> Measures:
        """Return `loss`, `MRR` and `Success@1` on the dev set.

        The positive of a question is ranked among its negatives. If it ties with a negative, it
        ranks below.
        """
        batch = build_list_batch(self.keep_complete(self._dev), self._recipe.ranked, None)
        # (n,) -> (b, l)
        scores = pad_lists(torch.from_numpy(self.module.scores(*batch.list_pairs())), batch.lengths)
        loss, accuracy = listwise_loss(scores)
        # (b,) ranks begin at 1, because >= also counts the positive itself.
        ranks = (scores >= scores[:, :1]).sum(1).numpy()
        return {"loss": loss.item(), "MRR": float(np.mean(1 / ranks)), "Success@1": accuracy.item()}

    def save(self, folder: Path) -> None:
        """Write the folder `cross-encoder/`, which `CrossEncoder.load` opens."""
        self.module.save(folder / PART)


class CrossEncoderObjective(MiningObjective[CrossEncoderTraining]):
    """The objective `cross-encoder`: a reranker that reads question and passage together."""

    name = "cross-encoder"
    summary = "a reranker that reads question and passage together"
    options = frozenset({"encoder"})
    settings = CrossEncoderTraining
    result = ModelDescription(
        summary="A cross-encoder, which reads a question and a passage together, trained to rank each question's "
        "passage above those that a retriever confuses with it (Gao et al. 2021).",
        usage="bookwheel search 'QUESTION' --store STORE --retriever 'rerank(hnsw, model:NAME, 50)'",
        parts=frozenset({PART}),
    )

    def task(self, job: Job[CrossEncoderTraining]) -> CrossEncoderTask:
        """Load the model; a model without a classification head gets a new one."""
        encoder = TrainableCrossEncoder.load(job.origins.names[PART])
        examples = job.examples["train"], job.examples["dev"]
        return CrossEncoderTask(encoder, *examples, job.settings.cross_encoder, digests=job.digests)

    def costs(self, job: Job[CrossEncoderTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to score the pairs of a batch, and to mine passages."""
        recipe, model = job.settings.cross_encoder, models[PART]
        n_pairs, n_tokens = recipe.batch_size * (1 + recipe.negatives), QUESTION_TOKENS + PASSAGE_TOKENS
        stage_bytes = {
            "train": TRAINED_COPIES * estimate_weight_bytes(model) + model.estimate_activation_bytes(n_pairs, n_tokens),
            "mine": estimate_mining_bytes(job.snapshot, job.settings.negatives),
        }
        n_batches = max(1, len(job.examples["train"]) // recipe.batch_size)
        n_evaluated_pairs = len(job.examples["dev"]) * (1 + recipe.ranked)
        pair_operations = n_tokens * model.operations_per_token
        step_operations = TRAINING_PASSES * n_pairs * pair_operations
        return TrainingCosts(stage_bytes, n_batches, step_operations, n_evaluated_pairs * pair_operations)


CROSS_ENCODER = CrossEncoderObjective()
