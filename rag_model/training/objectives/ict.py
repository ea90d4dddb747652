"""The inverse cloze task: encoders that find the passage that a sentence was taken from (Lee et al. 2019).

It needs no examples, and is what REALM begins with: without a start, what is retrieved at first is of no use, and the
retriever learns nothing from it (Guu et al. 2020, section 3.4).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import Architecture
from rag_model.errors import UsageError
from rag_model.needs.reading import PASSAGE, QUESTION, weights
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import passage_keys
from rag_model.training.data.cloze import inverse_cloze
from rag_model.training.data.examples import Example
from rag_model.training.data.negatives import ranked_passages
from rag_model.training.data.texts import TextBatch
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.biencoder import BiEncoder
from rag_model.training.objectives.contrastive import in_batch_loss, of_all_processes
from rag_model.training.objectives.group_task import GroupRecipe
from rag_model.training.objectives.objective import BACKWARD, LEARNED, Costs, Job, Objective, Result
from rag_model.training.objectives.ranking import Ranking
from rag_model.training.objectives.text_task import TextTask
from rag_model.training.origins import Named, Origins, pair_of

GoalName = Literal["average_rank", "Success@20"]
LOOP = LoopSettings(epochs=1, learning_rate=1e-4, warmup_share=0.1, weight_decay=0.01, max_gradient_norm=1.0)
"""Lee et al. 2019, section 8: a learning rate of 1e-4 with BERT's optimiser; there 100,000 steps of 4,096 sentences."""
_DEV = -1  # in place of an epoch: the sentences of the texts held out are the same at each evaluation


@dataclass(frozen=True, slots=True)
class IctRecipe(GroupRecipe):
    """Settings of the inverse cloze task. "Paper" is Lee et al. 2019."""

    batch_size: int = 128  # sentences per batch and process, each with its passage; paper: 4,096
    removed: float = 0.9  # share of the passages from which the sentence is taken out; paper: 90 %
    temperature: float = 1.0  # of the scores; paper: 1. With vectors of unit length use 0.05
    dev_texts: int = 256  # passages held out, to evaluate by
    ranked: int = 1_000  # other passages that their sentences rank
    goal: GoalName = "average_rank"  # selects the best weights, on the texts held out

    def __post_init__(self) -> None:
        if min(self.batch_size, self.dev_texts) < 1 or self.ranked < 0:
            raise UsageError(
                f"batch_size {self.batch_size}, dev_texts {self.dev_texts} and ranked {self.ranked} of an ICT recipe: "
                "need 1 or more of the first two, and ranked >= 0"
            )
        if not 0 <= self.removed <= 1 or not self.temperature > 0:
            raise UsageError(
                f"removed {self.removed} and temperature {self.temperature} of an ICT recipe: need a share from 0 to "
                "1, and a temperature above 0"
            )
        GroupRecipe.__post_init__(self)


@dataclass(frozen=True, slots=True)
class IctTraining:
    """Settings of a training on the inverse cloze task."""

    loop: LoopSettings = LOOP
    ict: IctRecipe = field(default_factory=IctRecipe)


class IctTask(TextTask):
    """Train a `BiEncoder` on the passages of a snapshot."""

    kind = "ict"
    _recipe: IctRecipe

    def __init__(
        self, encoders: BiEncoder, snapshot: Snapshot, recipe: IctRecipe, digests: Mapping[str, str] | None = None
    ) -> None:
        """Choose the texts; `digests` are those of the files that the encoders begin as."""
        super().__init__(snapshot, np.arange(snapshot.n), recipe, digests)
        self.module = encoders
        self.goal = Goal(recipe.goal, larger=recipe.goal == "Success@20")
        asked, passages = self.pairs(TextBatch(_DEV, tuple(self._split.dev.tolist())))
        examples = [Example(one.id, text, positives=(one,)) for text, one in zip(asked, passages, strict=True)]
        held = {*self._split.dev.tolist()}
        spaced = ranked_passages(snapshot, recipe.ranked)
        own = {one.id for one in snapshot.passages(sorted(held))}
        self._ranking = Ranking(examples, [one for one in spaced if one.id not in own])

    def pairs(self, batch: TextBatch) -> tuple[list[str], list[Passage]]:
        """Return the sentences of a batch and their passages: equal for an equal batch.

        Passages of one sentence are left out; if there are no others, the first stands for its sentence.
        """
        passages = self._snapshot.passages(batch.rows)
        found = [
            inverse_cloze(passage, self._recipe.removed, random.Random(f"{self._recipe.seed} {batch.epoch} {row}"))
            for row, passage in zip(batch.rows, passages, strict=True)
        ]
        there = [pair for pair in found if pair is not None] or [(passages[0].text, passages[0])]
        return [sentence for sentence, _ in there], [passage for _, passage in there]

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss over the passages of all processes, and the share of sentences whose passage is best."""
        sentences, own = self.pairs(batch)
        passages, start = of_all_processes(self.module.read(own))  # (b, d) -> (m of all, d)
        keys, _ = of_all_processes(passage_keys(own).to(passages.device))
        gold = torch.arange(len(own), device=passages.device) + start  # (b,)
        ignored = (keys[None] == keys[gold][:, None]).scatter(1, gold[:, None], False)  # equal passages, (b, m)
        loss, accuracy = in_batch_loss(self.module.ask(sentences), passages, gold, ignored, self._recipe.temperature)
        return loss, {"accuracy": accuracy}

    def evaluate(self) -> Measures:
        """Return `average_rank` and `Success@k` of the passages that sentences held out were taken from."""
        asked = self.module.encode_questions([example.question for example in self._ranking.examples])  # (n, d)
        return self._ranking.measure(asked, self.module.encode_passages(self._ranking.pool))

    def save(self, folder: Path) -> None:
        """Write `question/` and `passage/`."""
        self.module.save(folder)


class IctObjective(Objective[IctTraining]):
    """A question and a passage encoder, from the snapshot's own sentences."""

    name = "ict"
    summary = "a question and a passage encoder, from the snapshot's own sentences"
    options = frozenset({"encoder"})
    settings = IctTraining
    tempered = "ict"
    takes_examples = False
    result = Result(
        says="A pair of encoders, for questions and for passages, trained to find the passage that a sentence was "
        "taken from (inverse cloze, Lee et al. 2019).",
        uses="bookwheel reindex --encoder model:NAME --dump DUMP --store STORE",
        role="sentence-similarity",
        parts=frozenset({"question", "passage"}),
    )

    def origins(self, store: Store, snapshot: Snapshot, named: Named) -> Origins:
        """Return the named encoders, else the one that the snapshot carries; see `pair_of`."""
        return pair_of(store, snapshot, named.encoder)

    def task(self, job: Job[IctTraining]) -> IctTask:
        """Load the encoders."""
        names = job.origins.names
        encoders = BiEncoder.load(names["question"], names["passage"])
        return IctTask(encoders, job.snapshot, job.settings.ict, job.digests)

    def costs(self, job: Job[IctTraining], models: Mapping[str, Architecture]) -> Costs:
        """Return the costs of encoding the sentences and passages of a batch."""
        recipe, question, passage = job.settings.ict, models["question"], models["passage"]
        b, n = recipe.batch_size, job.snapshot.n
        kept = question.activations(b, QUESTION) + passage.activations(b, PASSAGE)
        pair = QUESTION * question.operations + PASSAGE * passage.operations
        dev = min(recipe.dev_texts, max(1, n // 2))
        look = dev * pair + min(recipe.ranked, n) * PASSAGE * passage.operations
        stages = {"train": LEARNED * weights(question, passage) + kept}
        return Costs(stages, max(1, (n - dev) // b), BACKWARD * b * pair, look)


ICT = IctObjective()
