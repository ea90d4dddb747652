"""Train a cross-encoder to rank each question's passage above those that a retriever confuses with it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rag_model.encoders.architecture import Architecture
from rag_model.encoders.pairs.trainable import TrainableCrossEncoder
from rag_model.errors import UsageError
from rag_model.needs.reading import PASSAGE, QUESTION, weights
from rag_model.store.store import Store
from rag_model.store.versions.model_parts import CROSS_ENCODER as PART
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.lists import ListBatch, Missing, list_batch, with_lists
from rag_model.training.data.negatives import NegativesRecipe, mining_bytes, with_negatives
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Measures
from rag_model.training.objectives.group_task import GroupRecipe, GroupTask
from rag_model.training.objectives.listwise import as_lists, list_loss
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Examples, Job, Objective, Result
from rag_model.training.origins import Named, Origins, classifier_of

GoalName = Literal["MRR", "Success@1", "loss"]
LOOP = LoopSettings(epochs=2, learning_rate=1e-5, warmup_share=0.1, weight_decay=0.01, max_gradient_norm=1.0)
"""The settings of the authors' code, github.com/luyug/Reranker: examples/msmarco-doc, and its trainer's defaults."""


@dataclass(frozen=True, slots=True)
class CrossEncoderRecipe(GroupRecipe):
    """Settings of a cross-encoder. "Code" is github.com/luyug/Reranker, of Gao et al. 2021."""

    batch_size: int = 4  # questions per batch and process; code: 1 on each of 4 GPUs
    negatives: int = 7  # per question, drawn in each epoch; code: train_group_size 8, the positive included
    ranked: int = 30  # negatives of a dev question to rank, the hardest; all that mining keeps
    missing: Missing = "drop"  # an example without a positive or a negative passage
    goal: GoalName = "MRR"  # selects the best weights, on the dev set

    def __post_init__(self) -> None:
        for name in ("batch_size", "negatives", "ranked"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of a cross-encoder's recipe is {getattr(self, name)}: use 1 or more")
        GroupRecipe.__post_init__(self)


@dataclass(frozen=True, slots=True)
class CrossEncoderTraining:
    """Settings of a cross-encoder's training."""

    loop: LoopSettings = LOOP  # github.com/luyug/Reranker: examples/msmarco-doc
    cross_encoder: CrossEncoderRecipe = field(default_factory=CrossEncoderRecipe)
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


class CrossEncoderTask(GroupTask[ListBatch, TrainableCrossEncoder, CrossEncoderRecipe]):
    """Train a `TrainableCrossEncoder` on examples with positives and negatives."""

    kind = "cross-encoder"

    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples that have a positive and a negative."""
        return with_lists(examples, self._recipe.missing)

    def batch(self, examples: Sequence[Example], dice: random.Random) -> ListBatch:
        """Return the examples' lists, with as many negatives as the recipe says."""
        return list_batch(examples, self._recipe.negatives, dice)

    def loss(self, batch: ListBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the batch's lists, and the share of questions whose positive is best."""
        loss, accuracy = list_loss(as_lists(self.module(*batch.pairs()), batch.lengths))
        return loss, {"accuracy": accuracy}

    def evaluate(self) -> Measures:
        """Return the dev set's `loss`, `MRR` and `Success@1`: of the positive in its list, where a tie is lost."""
        batch = list_batch(self.complete(self._dev), self._recipe.ranked, None)
        scores = as_lists(torch.from_numpy(self.module.scores(*batch.pairs())), batch.lengths)  # (n,) -> (b, l)
        loss, first = list_loss(scores)
        ranks = (scores >= scores[:, :1]).sum(1).numpy()  # (b,), from 1: the positive counts itself
        return {"loss": loss.item(), "MRR": float(np.mean(1 / ranks)), "Success@1": first.item()}

    def save(self, folder: Path) -> None:
        """Write `cross-encoder/`, which `CrossEncoder.load` opens."""
        self.module.save(folder / PART)


class CrossEncoderObjective(Objective[CrossEncoderTraining]):
    """A model that reads question and passage together."""

    name = "cross-encoder"
    summary = "a model that reranks, which reads question and passage together"
    options = frozenset({"encoder"})
    settings = CrossEncoderTraining
    result = Result(
        says="A cross-encoder, which reads a question and a passage together, trained to rank each question's passage "
        "above those that a retriever confuses with it (Gao et al. 2021).",
        uses="bookwheel search 'QUESTION' --store STORE --retriever 'rerank(hnsw, model:NAME, 50)'",
        role="text-ranking",
        parts=frozenset({PART}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named model, else the encoder that the snapshot carries; see `classifier_of`."""
        return classifier_of(store, snapshot, named.encoder)

    def prepare(self, job: Job[CrossEncoderTraining]) -> Examples:
        """Return the examples with missing negatives and positives added; see `with_negatives`."""
        return with_negatives(job.examples, job.snapshot, job.settings.negatives, job.tell)

    def task(self, job: Job[CrossEncoderTraining]) -> CrossEncoderTask:
        """Load the model; one without a head for scores gets a new one."""
        encoder = TrainableCrossEncoder.load(job.origins.names[PART])
        examples = job.examples["train"], job.examples["dev"]
        return CrossEncoderTask(encoder, *examples, job.settings.cross_encoder, digests=job.digests)

    def costs(self, job: Job[CrossEncoderTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of reading the pairs of a batch, and of mining."""
        recipe, model = job.settings.cross_encoder, models[PART]
        pairs, tokens = recipe.batch_size * (1 + recipe.negatives), QUESTION + PASSAGE
        stages = {
            "train": LEARNED * weights(model) + model.activations(pairs, tokens),
            "mine": mining_bytes(job.snapshot, job.settings.negatives),
        }
        batches = max(1, len(job.examples["train"]) // recipe.batch_size)
        looked = len(job.examples["dev"]) * (1 + recipe.ranked)
        pair = tokens * model.operations
        return Costs(stages, batches, BACKWARD * pairs * pair, looked * pair)


CROSS_ENCODER = CrossEncoderObjective()
