"""R-ft, the second stage of RA-DIT: a question encoder learns which passages make a generator's answer likely.

The loss is KL(p_R ‖ p_LSR), Lin et al. 2023, section 2.4: see `lsr`. Lists and the generator's scores of them are those
of the start. Only the question encoder learns, because training both hurt (section 5.1): so vectors and index stay.
"""

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rag_model.encoders.space import Space
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError
from rag_model.generate.folder import save_rag
from rag_model.generate.generator import Generator
from rag_model.generate.rag import Rag
from rag_model.training.data.answer_scores import Scores
from rag_model.training.data.memory import Memory
from rag_model.training.data.passage_lists import Listed
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.ra_dit.dev import DevSet
from rag_model.training.objectives.ra_dit.lsr import entropy, log_target, preference, retriever_loss
from rag_model.training.objectives.ra_dit.recipe import RaDitRecipe, RetrieverRecipe

_UNIFORM = 0.99  # of log k: above it, a target says nothing
_AT_ONCE = 256  # lists evaluated together
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scored:
    """A list of passages, and what the generator says of them."""

    listed: Listed
    scores: Scores


Batch = tuple[Scored, ...]


class RetrieverTask:
    """Train a question encoder to order passages as a generator prefers them."""

    def __init__(
        self,
        question: TrainableEncoder,
        generator: Callable[[], Generator],
        memory: Memory,
        train: Sequence[Scored],
        dev: tuple[DevSet, Sequence[Scored]],
        recipe: RetrieverRecipe,
        shared: RaDitRecipe,
        began: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the data; `generator` loads the one that answers dev questions, and is called when one is evaluated.

        `began`: digests of data and models, for the record.

        Raises:
            InputError: there is no example.
        """
        if not train:
            raise InputError(
                "no training example has an answer and passages to choose from: give questions with answers, over a "
                "snapshot of two passages or more"
            )
        self.module: nn.Module = question
        self.goal = Goal(recipe.goal, larger=False)
        self._question, self._load, self._memory = question, generator, memory
        self._train, self._recipe, self._shared = tuple(train), recipe, shared
        self._dev, self._dev_lists = dev[0], tuple(dev[1])
        self._began = dict(began or {})
        self._warn()

    @cached_property
    def generator(self) -> Generator:
        """The generator that answers dev questions; it does not learn."""
        found = self._load()
        found.module.requires_grad_(False)
        return found

    @property
    def trained_on(self) -> str:
        """One sentence for the card."""
        texts = sum(one.listed.asked.source is not None for one in self._train)
        some, snapshot = f"{len(self._train) - texts:,} questions and {texts:,} plain texts", self._memory.snapshot.id
        scored = f"scored by the {self._recipe.scored_by} generator"
        return f"Trained on {some} of snapshot {snapshot[:12]}, each with {self._shared.k} passages, {scored}."

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, and the digests of data and models."""
        return {"kind": "ra-dit retriever", "settings": [asdict(self._shared), asdict(self._recipe)], **self._began}

    def batches(self, epoch: int) -> Sequence[Batch]:
        """Return an epoch's batches, shuffled by seed and epoch; the last one may be smaller."""
        order = random.Random(f"{self._shared.seed} {epoch}").sample(self._train, len(self._train))
        size = self._recipe.batch_size
        return [tuple(order[start : start + size]) for start in range(0, len(order), size)]

    def ids(self, batch: Batch) -> Sequence[str]:
        """Return the ids of the batch's examples."""
        return [one.listed.asked.id for one in batch]

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean of KL(p_R ‖ p_LSR), and the mean entropies of p_LSR and p_R in nats: log k if uniform."""
        asked = self._question([one.listed.asked.text for one in batch])  # (b, d)
        losses, target, own = self._losses(asked, batch)
        return losses.mean(), {"target_entropy": target.mean(), "prior_entropy": own.mean()}

    def evaluate(self) -> Measures:
        """Return the measures of `DevSet`, and `kl` and `target_entropy` of the dev questions' first lists."""
        kl, target = list[Tensor](), list[Tensor]()
        for start in range(0, len(self._dev_lists), _AT_ONCE):
            some = self._dev_lists[start : start + _AT_ONCE]
            asked = torch.from_numpy(self._question.encode_questions([one.listed.asked.text for one in some]))
            losses, entropies, _ = self._losses(asked, some)
            kl.append(losses)
            target.append(entropies)
        told = {"kl": float(torch.cat(kl).mean()), "target_entropy": float(torch.cat(target).mean())}
        return {**self._dev.measure(self._question, self.generator), **told}

    def save(self, folder: Path) -> None:
        """Write the model as a folder that `load_rag` opens; its questions belong to the snapshot's space."""
        rag = Rag(self._question, self.generator, self._shared.settings())
        save_rag(rag, folder, Space.from_json(self._memory.snapshot.space or {}))

    def target(self, batch: Sequence[Scored]) -> tuple[Tensor, Tensor]:
        """Return (b, k) float32 log p_LSR and the (b, k) mask of the passages of each list; computed in float64."""
        rows = [one.scores.log_p for one in batch]
        k = max(map(len, rows))
        kept = torch.tensor([[place < len(row) for place in range(k)] for row in rows])
        log_p = torch.tensor([[*row, *[-torch.inf] * (k - len(row))] for row in rows], dtype=torch.float64)
        tokens = torch.tensor([one.scores.tokens for one in batch])
        scores = preference(log_p, tokens, self._recipe.preference)
        return log_target(scores, kept, self._recipe.preference_temperature).float(), kept

    def _losses(self, asked: Tensor, batch: Sequence[Scored]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (b,) the losses, and the entropies of target and retriever."""
        target, kept = (part.to(asked.device) for part in self.target(batch))
        with torch.autocast(asked.device.type, enabled=False):
            vectors = torch.from_numpy(self._vectors(batch, kept.shape[1])).to(asked.device)
            scores = (vectors * asked.float()[:, None]).sum(-1)  # (b, k, d) * (b, 1, d) -> (b, k)
        losses = retriever_loss(scores, target, kept, self._shared.temperature)
        own = (scores.detach() / self._shared.temperature).masked_fill(~kept, -torch.inf).log_softmax(1)
        return losses, entropy(target, kept), entropy(own.masked_fill(~kept, 0), kept)

    def _vectors(self, batch: Sequence[Scored], k: int) -> Any:
        """Return (b, k, d) float32 vectors of the snapshot; a list that has ended repeats its first passage."""
        rows = [[*one.listed.rows, *[one.listed.rows[0]] * (k - len(one.listed.rows))] for one in batch]
        return self._memory.vectors(np.array(rows, np.int64))

    def _warn(self) -> None:
        """Log it if most targets are uniform: the encoder would unlearn to choose."""
        told = list[bool]()
        for start in range(0, len(self._train), _AT_ONCE):
            some = [one for one in self._train[start : start + _AT_ONCE] if len(one.scores.log_p) > 1]
            if some:
                target, kept = self.target(some)
                told += (entropy(target, kept) > _UNIFORM * kept.sum(1).log()).tolist()
        share = sum(told) / len(told) if told else math.nan
        if share > 1 / 2:
            _log.warning(
                "%.0f %% of the examples have a uniform target, which teaches the encoder not to choose: set "
                'preference = "mean_log_probability" below [retriever]%s',
                100 * share,
                ", or lower text_share" if self._recipe.text_share else "",
            )
