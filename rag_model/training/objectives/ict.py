"""Inverse cloze task (ICT): learn to retrieve a sentence's passage (Lee et al. 2019, ORQA).

The task needs no examples. Its encoders can initialize REALM: without such a warm start, the
retriever of REALM first returns useless passages and learns nothing from them (Guu et al. 2020,
section 3.4).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.errors import UsageError
from rag_model.resources import PASSAGE_TOKENS, QUESTION_TOKENS, estimate_weight_bytes
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import hash_passages
from rag_model.training.data.examples import Example
from rag_model.training.data.negatives import sample_passages
from rag_model.training.data.texts import TextBatch, sample_inverse_cloze
from rag_model.training.loop.loop_settings import LoopSettings, check_bounds
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.losses import gather_all_processes, in_batch_loss, mean_over_processes
from rag_model.training.objectives.objective import (
    TRAINED_COPIES,
    TRAINING_PASSES,
    Job,
    ModelDescription,
    Objective,
    TrainingCosts,
)
from rag_model.training.objectives.task_bases import BiEncoder, GroupRecipe, RankingEvaluator, TextTask

GoalName = Literal["average_rank", "Success@20"]
LOOP = LoopSettings(epochs=1, learning_rate=1e-4, warmup_share=0.1, weight_decay=0.01, max_gradient_norm=1.0)
"""Lee et al. 2019, section 8: 1e-4 with BERT's optimizer; 100,000 steps of 4,096 sentences."""
_DEV_EPOCH = -1  # With a fixed epoch number, each evaluation draws the same sentences.


@dataclass(frozen=True, slots=True)
class IctRecipe(GroupRecipe):
    """Settings of the inverse cloze task. "Paper" is Lee et al. 2019."""

    # number of sentences per batch and process, each with its passage; 128 instead of 4,096,
    # because a batch must fit on one machine
    batch_size: int = 128
    # share of the passages from which the query sentence is removed; paper: 90 %
    removed: float = 0.9
    # divisor of the scores in the softmax; 0.05 for vectors of unit length instead of 1, because
    # a softmax over cosines, which lie in [-1, 1], is almost uniform
    temperature: float = 1.0
    dev_texts: int = 256  # number of passages that are held out for the evaluation
    # number of other passages with which the passage of a held-out sentence is ranked
    ranked: int = 1_000
    # measure on the held-out passages that selects the best weights
    goal: GoalName = "average_rank"

    def __post_init__(self) -> None:
        check_bounds(self, "[ict]", {"batch_size": 1, "dev_texts": 1, "ranked": 0}, ["temperature"])
        if not 0 <= self.removed <= 1:
            raise UsageError(f"removed of [ict] is {self.removed}: use a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class IctTraining:
    """Settings of a training on the inverse cloze task."""

    # epochs = 1 instead of 100,000 steps, because the number of steps should follow the size of the
    # corpus
    loop: LoopSettings = LOOP
    ict: IctRecipe = field(default_factory=IctRecipe)


class IctTask(TextTask):
    """Train a `BiEncoder` on the passages of a snapshot."""

    kind = "ict"
    _recipe: IctRecipe

    def __init__(
        self, encoders: BiEncoder, snapshot: Snapshot, recipe: IctRecipe, digests: Mapping[str, str] | None = None
    ) -> None:
        """Choose the texts; `digests` are the digests of the files of the initial encoders."""
        super().__init__(snapshot, np.arange(snapshot.n), recipe, digests)
        self.module = encoders
        self.goal = Goal.for_measure(recipe.goal)
        sentences, passages = self.draw_pairs(TextBatch(_DEV_EPOCH, tuple(self._split.dev.tolist())))
        dev_examples = [
            Example(passage.id, sentence, positives=(passage,))
            for sentence, passage in zip(sentences, passages, strict=True)
        ]
        dev_rows = {*self._split.dev.tolist()}
        sampled_passages = sample_passages(snapshot, recipe.ranked)
        dev_ids = {passage.id for passage in snapshot.passages(sorted(dev_rows))}
        self._ranking_evaluator = RankingEvaluator(
            dev_examples, [passage for passage in sampled_passages if passage.id not in dev_ids]
        )

    def draw_pairs(self, batch: TextBatch) -> tuple[list[str], list[Passage]]:
        """Draw a sentence from each passage of a batch; return the sentences and the passages.

        Equal batches give equal pairs. Passages with a single sentence are left out. If all of them
        have a single sentence, the result is the text of the first passage and this passage.
        """
        passages = self._snapshot.passages(batch.rows)
        cloze_pairs = [
            sample_inverse_cloze(
                passage, self._recipe.removed, random.Random(f"{self._recipe.seed} {batch.epoch} {row}")
            )
            for row, passage in zip(batch.rows, passages, strict=True)
        ]
        pairs = [pair for pair in cloze_pairs if pair is not None] or [(passages[0].text, passages[0])]
        return [sentence for sentence, _ in pairs], [passage for _, passage in pairs]

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the passages of all processes, and the in-batch `accuracy`."""
        sentences, sentence_passages = self.draw_pairs(batch)
        # (b, d) -> (rows of all processes, d)
        passage_vectors, first_row = gather_all_processes(self.module.embed_passages(sentence_passages))
        keys, _ = gather_all_processes(hash_passages(sentence_passages).to(passage_vectors.device))
        # (b,)
        gold = torch.arange(len(sentence_passages), device=passage_vectors.device) + first_row
        # (b, m): copies of the positive must not be negatives.
        ignored = (keys[None] == keys[gold][:, None]).scatter(1, gold[:, None], False)
        loss, accuracy = in_batch_loss(
            self.module.embed_questions(sentences), passage_vectors, gold, ignored, self._recipe.temperature
        )
        # The mean is weighted, because processes may have left out different numbers of passages.
        return mean_over_processes(loss * len(sentences), len(sentences)), {"accuracy": accuracy}

    def evaluate(self) -> Measures:
        """Rank passages for held-out sentences; return `average_rank` and `Success@k`."""
        sentence_vectors = self.module.encode_questions(self._ranking_evaluator.questions)  # (n, d)
        return self._ranking_evaluator.evaluate(
            sentence_vectors, self.module.encode_passages(self._ranking_evaluator.pool)
        )


class IctObjective(Objective[IctTraining]):
    """The objective `ict`: a bi-encoder trained on the snapshot's own sentences."""

    name = "ict"
    summary = "a question and a passage encoder, from the sentences of the snapshot"
    options = frozenset({"encoder"})
    settings = IctTraining
    tempered = "ict"
    takes_examples = False
    result = ModelDescription(
        summary="A pair of encoders, for questions and for passages, trained to find the passage that a sentence was "
        "taken from (inverse cloze, Lee et al. 2019).",
        usage="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        parts=frozenset({"question", "passage"}),
    )

    def task(self, job: Job[IctTraining]) -> IctTask:
        """Load the encoders."""
        model_names = job.origins.names
        encoders = BiEncoder.load(model_names["question"], model_names["passage"])
        return IctTask(encoders, job.snapshot, job.settings.ict, job.digests)

    def costs(self, job: Job[IctTraining], models: Mapping[str, Architecture]) -> TrainingCosts:
        """Return the costs to encode the sentences and passages of a batch."""
        recipe, question, passage = job.settings.ict, models["question"], models["passage"]
        b, n = recipe.batch_size, job.snapshot.n
        activation_bytes = question.estimate_activation_bytes(b, QUESTION_TOKENS) + passage.estimate_activation_bytes(
            b, PASSAGE_TOKENS
        )
        pair_operations = (
            QUESTION_TOKENS * question.operations_per_token + PASSAGE_TOKENS * passage.operations_per_token
        )
        n_dev = min(recipe.dev_texts, max(1, n // 2))
        evaluation = n_dev * pair_operations + min(recipe.ranked, n) * PASSAGE_TOKENS * passage.operations_per_token
        stage_bytes = {"train": TRAINED_COPIES * estimate_weight_bytes(question, passage) + activation_bytes}
        return TrainingCosts(stage_bytes, max(1, (n - n_dev) // b), TRAINING_PASSES * b * pair_operations, evaluation)


ICT = IctObjective()
