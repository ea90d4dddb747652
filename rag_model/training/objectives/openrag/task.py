"""OpenRAG's online half: the bags propose, today's encoder orders, and the generator says which passage helps.

Zhou and Chen 2025 (arXiv 2503.08398), section 3. Passages are judged in order until the first that does not help.
That one is the hard negative, and the first that helps the positive; where there is none, one is drawn from the
offline pool. A passage of a pool keeps its label. Another one helps a generator that writes freely if its score is
above those of all offline negatives, and does not help if it is below those of all offline positives; otherwise, and
where both hold, it is left out. Of a closed set it helps if the right choice wins.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.errors import UsageError
from rag_model.retrieve.expression import one_of
from rag_model.retrieve.rerank import PairScorer
from rag_model.training.data.bag_memory import BagMemory
from rag_model.training.data.batches import DprBatch, dpr_batch
from rag_model.training.data.examples import Example
from rag_model.training.data.judging import JudgeSettings, Verdict, verdicts
from rag_model.training.data.pools import Pooled, Pools
from rag_model.training.loop.task import Goal, Measures
from rag_model.training.objectives.group_task import GroupRecipe, GroupTask
from rag_model.training.objectives.ranking import CUTOFFS, first_answer
from rag_model.training.objectives.sidr.objective import sidr_loss
from rag_model.training.objectives.sidr.pair import SidrPair

GoalName = Literal["right", "nll"]


@dataclass(frozen=True, slots=True)
class OpenRagRecipe(GroupRecipe):
    """Settings of OpenRAG. "Paper" is arXiv 2503.08398; what it leaves open is SiDR's."""

    depth: int = 100  # passages a question that are judged before the training; paper: 100
    retriever: str | None = None  # that finds them, an expression; None: the bags, asked by the initial encoder
    pooled: int = 30  # passages of each pool that are kept, those with the likeliest answers
    online: bool = True  # judge what today's encoder finds; False: learn from the pools alone
    proposed: int = 20  # passages a question that the bags propose online; paper: 20
    asked_terms: int = 768  # heaviest terms of a question that the bags are asked by
    batch_size: int = 32  # questions per batch and process; SiDR's code: 32
    terms: int = 768  # heaviest terms of a text in the loss; SiDR's code: 768
    temperature: float = 1.0  # of the scores in the loss; SiDR's code: 1
    both_ways: bool = True  # questions are told apart for a passage too; SiDR's code: true
    answered: int = 100  # dev questions that are answered at each evaluation, from one passage; 0: all
    refuse_disagreement: bool = True  # of label and score, of a generator that writes freely
    goal: GoalName = "right"  # selects the best weights, on the dev set

    def __post_init__(self) -> None:
        least = {"depth": 2, "pooled": 1, "proposed": 1, "asked_terms": 1, "batch_size": 1, "terms": 1, "answered": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UsageError(f"{name} of an OpenRAG recipe is {getattr(self, name)}: use {bound} or more")
        if not self.temperature > 0:
            raise UsageError(f"temperature of an OpenRAG recipe is {self.temperature}: use more than 0")
        one_of(None, self.retriever)
        GroupRecipe.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Online:
    """What asks and judges passages during the training."""

    memory: BagMemory
    judge: PairScorer  # a `Judge`, or one whose verdicts are kept
    settings: JudgeSettings
    scorer: PairScorer | None = None  # the same without writing, where answers are free: log p decides; None: the judge


class OpenRagTask(GroupTask[DprBatch, SidrPair, OpenRagRecipe]):
    """Train a `SidrPair` on what helps a frozen generator."""

    kind = "openrag"

    def __init__(
        self,
        pair: SidrPair,
        pools: Pools,
        dev: Sequence[Example],
        recipe: OpenRagRecipe,
        online: Online,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Set the data; `digests` are those of the files of encoders and generator.

        Raises:
            UsageError: no dev example has an answer.
        """
        self._answered = [one for one in dev if one.answers][: recipe.answered or None]
        if not self._answered:
            raise UsageError("no dev example has an answer to select the best weights: give a dev file with answers")
        super().__init__(pair, pools, dev, recipe, (), digests)
        self.goal = Goal(recipe.goal, larger=recipe.goal == "right")
        self._pools, self._online = pools, online

    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe, the digests of data and models, and how the generator is asked."""
        pair = {"question": self.module.question, "passage": self.module.passage}
        bounds = [[one.surest_negative, one.least_positive] for one in self._pools.examples]
        return {
            **super().recipe(),
            "specs": {name: one.spec.to_json() for name, one in pair.items()},
            "snapshot": self._online.memory.snapshot.id,
            "choices": list(self._online.settings.choices),
            "max_new_tokens": self._online.settings.max_new_tokens,
            "bounds": digest_json(bounds),
        }

    def complete(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples: all have both pools."""
        return list(examples)

    def batch(self, examples: Sequence[Example], dice: random.Random) -> DprBatch:
        """Return the examples with a positive and a negative drawn from their pools, the drawn ones first."""
        return dpr_batch([_drawn(one, dice) for one in examples], 1, None)

    def loss(self, batch: DprBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return SiDR's loss with one positive and one hard negative a question, and how many were found online."""
        told: dict[str, float] = {}
        if self._recipe.online:
            found = self._found(batch.examples)
            told = {
                "judged": float(sum(one.judged for one in found)),
                "online_positives": float(sum(one.positive is not None for one in found)),
                "online_negatives": float(sum(one.negative is not None for one in found)),
            }
            batch = dpr_batch([_with(*both) for both in zip(batch.examples, found, strict=True)], 1, None)
        recipe = self._recipe
        loss, more = sidr_loss(self.module, batch, recipe.terms, recipe.temperature, both_ways=recipe.both_ways)
        return loss, {**more, **told}

    def evaluate(self) -> Measures:
        """Return how the generator answers dev questions from the first passage, and `Success@k` of the order.

        `right` is the share of right answers, `nll` the mean -log p of the gold one in nats. Beside them stand what the
        training learns from: `questions` with both pools, those that every passage or none answers, and `agreement` of
        label and score.
        """
        examples = self._answered
        ranked = self.ranked([one.question for one in examples])
        told = [self._verdict(one.question, own[0]) for one, own in zip(examples, ranked, strict=True) if own]
        firsts = [first_answer(*both) for both in zip(examples, ranked, strict=True)]
        depths = [k for k in CUTOFFS if k <= self._recipe.proposed]
        return {
            "right": sum(one.right for one in told) / len(examples),
            "nll": -float(np.mean([one.log_p for one in told])) if told else float("nan"),
            **{f"Success@{k}": sum(one is not None and one <= k for one in firsts) / len(firsts) for k in depths},
            "questions": float(len(self._pools)),
            "all_right": float(self._pools.all_right),
            "all_wrong": float(self._pools.all_wrong),
            "agreement": self._pools.agreement.value,
        }

    def ranked(self, questions: Sequence[str]) -> list[list[Passage]]:
        """Return what the bags propose for questions, each list in the order of today's encoder; without dropout."""
        learning = self.module.training
        try:
            self.module.eval()
            asked = self.module.asked(questions)
            proposed = self._online.memory.propose(asked, self._recipe.proposed)
            every = {passage.hash: passage for own in proposed for passage in own}
            if not every:
                return proposed
            places = {key: place for place, key in enumerate(every)}
            scores = self.module.scores(asked, list(every.values()))[0].cpu()  # (q, m)
        finally:
            self.module.train(learning)
        return [
            sorted(own, key=lambda passage, row=row: -float(row[places[passage.hash]]))  # type: ignore[misc]
            for own, row in zip(proposed, scores, strict=True)
        ]

    def save(self, folder: Path) -> None:
        """Write `question/` and `passage/`, folders of sparse encoders."""
        self.module.save(folder)

    @torch.no_grad()
    def _found(self, examples: Sequence[Example]) -> list["Found"]:
        ranked = self.ranked([one.question for one in examples])
        return [self._scan(one, own) for one, own in zip(examples, ranked, strict=True)]

    def _scan(self, example: Example, ranked: Sequence[Passage]) -> "Found":
        """Judge passages in order until the first that does not help."""
        positive, judged = None, 0
        for passage in ranked:
            helps = _label(example, passage)
            if helps is None:
                judged += 1
                helps = self._helps(example, self._verdict(example.question, passage, self._online.scorer))
            if helps is False:
                return Found(positive, passage, judged)
            if helps and positive is None:
                positive = passage
        return Found(positive, None, judged)

    def _verdict(self, question: str, passage: Passage, scorer: PairScorer | None = None) -> Verdict:
        judge = scorer or self._online.judge
        return verdicts(judge, question, [passage])[0]  # alone, so that no other passage changes its bits

    def _helps(self, example: Example, told: Verdict) -> bool | None:
        if self._online.settings.choices:
            return told.right
        if not isinstance(example, Pooled):
            return None
        above, below = told.log_p > example.surest_negative, told.log_p < example.least_positive
        return None if above == below else above


@dataclass(frozen=True, slots=True)
class Found:
    """What a question found online."""

    positive: Passage | None
    negative: Passage | None
    judged: int  # passages that the generator read


def _label(example: Example, passage: Passage) -> bool | None:
    """Return what the pools say of a passage; None: it is in neither."""
    if any(one.hash == passage.hash for one in example.positives):
        return True
    return False if any(one.hash == passage.hash for one in example.negatives) else None


def _drawn(example: Example, dice: random.Random) -> Example:
    """Return an example whose pools begin with a drawn passage."""
    positive, negative = dice.choice(example.positives), dice.choice(example.negatives)
    return replace(
        example, positives=_first(positive, example.positives), negatives=_first(negative, example.negatives)
    )


def _with(example: Example, found: Found) -> Example:
    """Return an example whose pools begin with what was found online."""
    positives = _first(found.positive or example.positives[0], example.positives)
    return replace(
        example, positives=positives, negatives=_first(found.negative or example.negatives[0], example.negatives)
    )


def _first(one: Passage, others: Sequence[Passage]) -> tuple[Passage, ...]:
    return (one, *(other for other in others if other.hash != one.hash))
