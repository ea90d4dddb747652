"""Every setting of REALM, with the value of the paper or of its code."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from rag_model.errors import UsageError
from rag_model.retrieve.expression import one_of
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.moving.moving_settings import MovingSettings
from rag_model.training.objectives.realm.marginal import Marginal

Masks = Literal["salient", "random"]
GoalName = Literal["nll", "utility"]

LOOP = LoopSettings(
    epochs=1,
    learning_rate=3e-5,
    warmup_share=0.1,
    weight_decay=0.01,
    max_gradient_norm=1.0,
)
"""Guu et al. 2020, appendix: a learning rate of 3e-5 with BERT's optimiser (Devlin et al. 2019: decay .01, norm 1)."""


@dataclass(frozen=True, slots=True)
class RealmRecipe:
    """Settings of REALM. "Paper" is Guu et al. 2020, "code" github.com/google-research/language, language/realm."""

    masks: Masks = "salient"  # paper: salient spans, 38.2 against 32.3 of random masks (Natural Questions, dev)
    marginal: Marginal = "sequence"  # paper: one sum over passages a text; token, code: one a masked wordpiece
    candidates: int = 8  # passages of a text, the null passage included; paper: 8
    temperature: float = 1.0  # of p(z|x); paper: 1. With vectors of unit length use 0.05: cosines differ little
    batch_size: int = 8  # texts per batch and process; paper: 512 over 64 TPUs
    question_tokens: int = 96  # wordpieces of a text with its masks, special ones included
    passage_tokens: int = 288  # wordpieces of a candidate that the masked language model reads; code: 288
    most_masks: int = 10  # wordpieces hidden in a text; code: 10
    random_share: float = 0.15  # of the wordpieces, of random masks; BERT: 15 %
    dev_texts: int = 256  # passages held out, to evaluate by
    retriever: str | None = None  # an expression; None: the snapshot's default
    index: str | None = None  # of the snapshot: the short form of `retriever`
    freeze_encoders: bool = False  # only the masked language model learns; paper: all three
    goal: GoalName = "nll"  # selects the best weights, on the texts held out
    seed: int = 12345  # of the order and of the masks

    def __post_init__(self) -> None:
        least = {"candidates": 2, "batch_size": 1, "question_tokens": 8, "passage_tokens": 8, "most_masks": 1}
        for name, limit in {**least, "dev_texts": 1}.items():
            if getattr(self, name) < limit:
                raise UsageError(f"{name} of a REALM recipe is {getattr(self, name)}: use {limit} or more")
        if not self.temperature > 0 or not 0 < self.random_share <= 1:
            raise UsageError(
                f"temperature {self.temperature} and random_share {self.random_share} of a REALM recipe: need a "
                "temperature above 0, and a share above 0 and at most 1"
            )
        one_of(self.index, self.retriever)
        for name, known in {"masks": Masks, "marginal": Marginal, "goal": GoalName}.items():
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(get_args(known))}")

    @property
    def expression(self) -> str | None:
        """The retriever that finds candidates, in one spelling; None: the snapshot's default."""
        return one_of(self.index, self.retriever)


@dataclass(frozen=True, slots=True)
class RealmTraining:
    """Settings of a REALM training."""

    loop: LoopSettings = LOOP
    realm: RealmRecipe = field(default_factory=RealmRecipe)
    moving: MovingSettings = field(default_factory=MovingSettings)  # paper: a new index about every 500 steps
