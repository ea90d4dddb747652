"""LM-ft, the first stage of RA-DIT: a generator learns to answer from passages as the retriever finds them.

    L = -Σ_i Σ_j log p_LM(y_i | c_ij ∘ x_i)        Lin et al. 2023, section 2.3, eq. 3; j = 1 … 3

Each of the best k passages stands before the question in an input of its own, so the generator also learns to answer
where a passage does not help. The loss counts the answer's tokens only. The retriever stays as it is, and so do the
lists.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError
from rag_model.generate.folder import save_rag
from rag_model.generate.generator import Generator
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.rag import Rag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.passage_lists import Listed
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.ra_dit.dev import DevSet
from rag_model.training.objectives.ra_dit.recipe import LmRecipe, RaDitRecipe

Batch = tuple[Listed, ...]


class LmTask:
    """Train a generator on questions with their passages."""

    def __init__(
        self,
        question: TrainableEncoder,
        generator: Generator,
        snapshot: Snapshot,
        train: Sequence[Listed],
        dev: DevSet,
        recipe: LmRecipe,
        shared: RaDitRecipe,
        began: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the data; of each list the first k passages are read. `began`: digests of data and models.

        Raises:
            InputError: there is no example.
        """
        if not train:
            raise InputError("no training example has an answer: give a file of questions with answers")
        self.module: nn.Module = generator.module
        self.goal = Goal("nll", larger=False)
        self._question, self._generator, self._snapshot = question, generator, snapshot
        self._train, self._dev, self._recipe, self._shared = tuple(train), dev, recipe, shared
        self._began = dict(began or {})

    @property
    def trained_on(self) -> str:
        """One sentence for the card."""
        some, snapshot = f"{len(self._train):,} questions", self._snapshot.id[:12]
        return f"Trained on {some}, each after {self._recipe.k} passages of snapshot {snapshot}."

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        return {"kind": "ra-dit lm", "settings": [asdict(self._shared), asdict(self._recipe)], **self._began}

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return an epoch's batches, shuffled by seed and epoch; the last one may be smaller."""
        order = random.Random(f"{self._shared.seed} {epoch}").sample(self._train, len(self._train))
        size = self._recipe.batch_size
        return [tuple(order[start : start + size]) for start in range(0, len(order), size)]

    def ids(self, batch: Batch) -> Sequence[str]:
        """Return the ids of the batch's examples."""
        return [one.asked.id for one in batch]

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean over the examples of eq. 3, and `token_nll`: nats per token of the answers."""
        k = min(self._recipe.k, max(len(one.rows) for one in batch))
        contexts = self._generator.contexts([one.asked.text for one in batch], self._passages(batch, k))
        targets = self._generator.targets([one.asked.answer for one in batch])
        log_p, _ = target_log_p(self._generator.logits(contexts, targets), targets.tokens)  # (b, k, t)
        found = torch.tensor([[place < len(one.rows) for place in range(k)] for one in batch], device=log_p.device)
        counted = found[:, :, None] & targets.mask[:, None]  # (b, k, 1) and (b, 1, t) -> (b, k, t)
        losses = -log_p.masked_fill(~counted, 0).sum((1, 2))  # (b, k, t) -> (b,)
        return losses.mean(), {"token_nll": losses.detach().sum() / counted.sum()}

    def evaluate(self) -> Measures:
        """Return the measures of `DevSet`."""
        return self._dev.measure(self._question, self._generator)

    def save(self, folder: Path) -> None:
        """Write the model as a folder that `load_rag` opens; the question encoder is as it was."""
        rag = Rag(self._question, self._generator, self._shared.settings())
        save_rag(rag, folder, Space.from_json(self._snapshot.space or {}))

    def _passages(self, batch: Batch, k: int) -> list[list[Passage]]:
        """Return k passages of each example; one that found fewer repeats its first, which is not counted."""
        filled = [(*one.rows[:k], *one.rows[:1] * (k - len(one.rows))) for one in batch]
        found = iter(self._snapshot.passages([row for rows in filled for row in rows]))
        return [[next(found) for _ in range(k)] for _ in batch]
