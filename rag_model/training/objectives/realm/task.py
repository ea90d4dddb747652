"""The task of REALM: hide wordpieces of the snapshot's own passages, retrieve others, and learn to fill them in.

The loss is -log p(y|x) with the passage marginalised. p(z|x) is computed with the encoders as they are now, with
gradient to both; the snapshot, whose vectors are older, only selects the candidates.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import measure
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.salient_spans import SalientSpans
from rag_model.training.data.texts import TextBatch
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.moving.moving_index import Learner, MovingIndex
from rag_model.training.moving.moving_settings import MovingSettings
from rag_model.training.objectives.realm.candidates import Asking, Candidates
from rag_model.training.objectives.realm.marginal import log_marginal, prior, utility
from rag_model.training.objectives.realm.masking import Limits, Masked, Span, mask
from rag_model.training.objectives.realm.model import Realm
from rag_model.training.objectives.realm.recipe import RealmRecipe
from rag_model.training.objectives.text_task import TextTask

_DEV = -1  # in place of an epoch: the masks of the texts held out are the same at each evaluation


class RealmTask(TextTask):
    """Train a `Realm` on the passages of a snapshot."""

    kind = "realm"
    _recipe: RealmRecipe

    def __init__(
        self,
        realm: Realm,
        snapshot: Snapshot,
        recipe: RealmRecipe,
        digests: Mapping[str, str] | None = None,
        moving: MovingSettings | None = None,
        index: Callable[[Learner], MovingIndex] | None = None,
    ) -> None:
        """Choose the texts, which are those of `snapshot` however the index moves.

        `digests` are those of the files that the models begin as. `index` makes the moving index by the settings
        `moving`, given what it needs of this task; without it `snapshot` is asked to the end.

        Raises:
            UsageError: the masks are salient and the snapshot keeps no spans, or the retriever is wrong.
        """
        self.module = realm
        self._salient = SalientSpans(snapshot) if recipe.masks == "salient" else None
        rows = np.arange(snapshot.n) if self._salient is None else self._salient.rows
        if not len(rows):
            raise UsageError(f'no passage of snapshot {snapshot.id[:12]} has a link or a date: set masks = "random"')
        super().__init__(snapshot, rows, recipe, digests)
        self._asking = Asking(snapshot, recipe.expression, recipe.candidates)
        self.goal = Goal(recipe.goal, larger=recipe.goal == "utility")
        self._settings = moving
        self._moving = index(Learner(realm.encoders.save, self.turn_to)) if index else None

    @property
    def asked(self) -> str:
        """Return the id of the snapshot that is searched."""
        return self._asking.snapshot.id

    def move(self, step: int) -> Measures:
        """Move to a rebuilt snapshot if there is one; see `MovingIndex`."""
        return {} if self._moving is None else self._moving.move(step)

    def ask(self, snapshot: str) -> None:
        """Search the snapshot of a checkpoint again.

        Raises:
            BookwheelError: it no longer exists.
            UsageError: the index does not move, and it is another one than the training began with.
        """
        if self._moving is not None:
            self._moving.ask(snapshot)
        elif snapshot != self.asked:
            raise UsageError(f"this training asks snapshot {self.asked[:12]}, and its checkpoint {snapshot[:12]}")

    def turn_to(self, snapshot: Snapshot) -> None:
        """Take candidates from this snapshot from now on; on an error keep the one before.

        Raises:
            UsageError: it has no such index.
        """
        self._asking = Asking(snapshot, self._recipe.expression, self._recipe.candidates)

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the snapshot of the texts, the digests of the models, and how the index moves."""
        return {**super().recipe(), **({"moving": asdict(self._settings)} if self._settings else {})}

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean -log p(y|x) of the texts, and measures: `utility` in nats a text (what the candidates add
        to the text alone), `null_prior` p(null|x), `prior_entropy` in nats, and `candidates`, those retrieved a text.
        """
        log_y, log_p, log_prior, candidates = self._likelihood(batch)
        kept = torch.from_numpy(candidates.kept).to(log_prior.device)
        told = log_prior.detach().masked_fill(~kept, 0)
        return (
            -log_y.mean(),
            {
                "utility": utility(log_y, log_p).mean().detach(),
                "null_prior": told[:, 0].exp().mean(),
                "prior_entropy": -(told.exp() * told).sum(1).mean(),  # where there is no candidate: 1 times 0
                "candidates": float(candidates.kept[:, 1:].sum(1).mean()),
            },
        )

    def evaluate(self) -> Measures:
        """Return `nll` (nats a text), `utility`, `null_prior`, and `distinct` and `spread` of the candidates: whether
        all texts get the same. The texts held out have the same masks each time.
        """
        size, rows = self._recipe.batch_size, self._split.dev.tolist()
        batches = [TextBatch(_DEV, tuple(rows[at : at + size])) for at in range(0, len(rows), size)]
        found = [self._likelihood(batch) for batch in batches]
        ids = [[one.id for one in some[1:]] for one in found for some in one[3].passages]
        collapse = measure(ids, self._snapshot.n)
        sums = {
            "nll": sum(-one[0].sum().item() for one in found),
            "utility": sum(utility(one[0], one[1]).sum().item() for one in found),
            "null_prior": sum(one[2][:, 0].exp().sum().item() for one in found),
        }
        means = {name: value / len(rows) for name, value in sums.items()}
        return {**means, "distinct": float(collapse.distinct), "spread": collapse.spread}

    def save(self, folder: Path) -> None:
        """Write `question/`, `passage/` and `masked-lm/`."""
        self.module.save(folder)

    def masked(self, batch: TextBatch) -> list[Masked]:
        """Return the texts of a batch with their masks: equal for an equal batch."""
        passages = self._snapshot.passages(batch.rows)
        pieces = self.module.reader.tokens.pieces([passage.text for passage in passages])
        each = zip(batch.rows, passages, pieces, self._spans(batch.rows), strict=True)
        seed, tokens = self._recipe.seed, self.module.reader.tokens
        return [
            mask(passage.text, own, spans, random.Random(f"{seed} {batch.epoch} {row}"), tokens, self._limits)
            for row, passage, own, spans in each
        ]

    @property
    def _limits(self) -> Limits:
        recipe, tokens = self._recipe, self.module.reader.tokens
        special = tokens.frame.size - len(tokens.frame.between)
        read = min(recipe.question_tokens, tokens.longest // 2)  # a model of few tokens reads passages too
        return Limits(read - special, recipe.most_masks, recipe.random_share)

    def _spans(self, rows: Sequence[int]) -> Sequence[Sequence[Span] | None]:
        if self._salient is None:
            return [None] * len(rows)
        return [[(one.start, one.end) for one in spans] for spans in self._salient.of(rows)]

    def _likelihood(self, batch: TextBatch) -> tuple[Tensor, Tensor, Tensor, Candidates]:
        """Return (b,) log p(y|x), (b, c, m) log p(y_j|z,x), (b, c) log p(z|x), and the candidates."""
        texts = self.masked(batch)
        asked = self.module.ask(texts)  # (b, d)
        vectors = asked.detach().float().cpu().numpy()
        candidates = self._asking.candidates(batch.rows, texts, vectors)
        kept = torch.from_numpy(candidates.kept).to(asked.device)
        log_prior = prior(self.module.scores(asked, candidates), kept, self._recipe.temperature)
        log_p = self.module.log_p(texts, candidates, self._recipe.passage_tokens)
        return log_marginal(log_prior, log_p, self._recipe.marginal), log_p, log_prior, candidates
