"""Settings of RA-DIT. "Paper" is Lin et al. 2023, arXiv 2310.01352; its settings are in appendix B."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import LIMITS, Limits
from rag_model.generate.rag import RagSettings
from rag_model.retrieve.expression import one_of
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.ra_dit.lsr import Preference

Stages = Literal["both", "lm", "retriever"]
Scoring = Literal["initial", "tuned"]
RetrieverGoal = Literal["nll", "kl"]

LM_LOOP = LoopSettings(
    learning_rate=1e-5, schedule="cosine", warmup_share=0.4, max_steps=500, max_gradient_norm=1.0, evaluate_every=100
)
"""LM-ft, table 8: 1e-5 falling to 1e-7 by a cosine, 200 of 500 steps to warm up. Clipping is not said."""
LOOP = LoopSettings(epochs=1, learning_rate=1e-5, warmup_share=0.067, dev_examples=500)
"""R-ft: 1e-5, one pass, DRAGON's 1,237 steps to warm up, of which this is DPR's share; validated every 500 steps. Both
stages are evaluated on the same dev examples: the paper's (appendix D) are at most 2,500 of a task."""


@dataclass(frozen=True, slots=True)
class LmRecipe:
    """Settings of LM-ft, the first stage."""

    k: int = 3  # passages per question, each an input of its own; paper: 3
    batch_size: int = 64  # questions per batch and process; paper, table 8: 64 for 7B, 128 for 65B


@dataclass(frozen=True, slots=True)
class RetrieverRecipe:
    """Settings of R-ft, the second stage."""

    batch_size: int = 32  # examples per batch and process; paper: 32 per GPU, on 16
    preference: Preference = "probability"  # of the generator; paper: probability. It underflows for long answers
    preference_temperature: float = 0.01  # τ of p_LSR; paper: .01
    scored_by: Scoring = "initial"  # whose scores; paper, section 5.2: the tuned generator's gave no further gain
    text_share: float = 0.95  # of the examples that are plain text of the snapshot; paper: .95
    text_tokens: int = 50  # of the beginning, and at most so many that follow; paper: 50
    goal: RetrieverGoal = "nll"  # selects the best weights, on the dev set; paper: the rank of gold passages


@dataclass(frozen=True, slots=True)
class RaDitRecipe:
    """Settings of both stages."""

    stages: Stages = "both"  # paper: both; its table 6 has either alone
    k: int = 10  # passages per example of R-ft, and to answer from; paper: 10
    temperature: float = 1.0  # of p_R; paper, eq. 2: 1. With vectors of unit length use 0.05
    retriever: str | None = None  # an expression; None: the snapshot's default
    index: str | None = None  # of the snapshot: the short form of `retriever`
    refuse_collapse: bool = True  # if all questions get the same passages
    limits: Limits = LIMITS  # the limits of that check
    seed: int = 12345  # of the order, and of the plain texts

    @property
    def expression(self) -> str | None:
        """The retriever that finds passages, in one spelling; None: the snapshot's default."""
        return one_of(self.index, self.retriever)

    def settings(self) -> RagSettings:
        """Return how the trained model answers: eq. 2, each passage on its own, weighted by p_R."""
        return RagSettings("sequence", self.k, self.temperature)


@dataclass(frozen=True, slots=True)
class RaDitTraining:
    """Settings of an RA-DIT training."""

    loop: LoopSettings = LOOP  # of R-ft; its `dev_examples` are those of both
    lm_loop: LoopSettings = LM_LOOP  # of LM-ft
    ra_dit: RaDitRecipe = field(default_factory=RaDitRecipe)
    lm: LmRecipe = field(default_factory=LmRecipe)
    retriever: RetrieverRecipe = field(default_factory=RetrieverRecipe)

    def __post_init__(self) -> None:
        """Refuse numbers out of bounds, and words that are not among those of their setting."""
        shared, lm, retriever = self.ra_dit, self.lm, self.retriever
        shared.settings()  # k and temperature
        _check(lm.k >= 1, "lm.k", lm.k, "1 or more")
        for name, size in (("lm.batch_size", lm.batch_size), ("retriever.batch_size", retriever.batch_size)):
            _check(size >= 1, name, size, "1 or more")
        _check(retriever.text_tokens >= 1, "retriever.text_tokens", retriever.text_tokens, "1 or more")
        _check(
            0 <= retriever.text_share < 1, "retriever.text_share", retriever.text_share, "0 or more, and less than 1"
        )
        cold = retriever.preference_temperature
        _check(cold > 0, "retriever.preference_temperature", cold, "more than 0")
        words = {
            "ra_dit.stages": (shared.stages, Stages),
            "retriever.goal": (retriever.goal, RetrieverGoal),
            "retriever.preference": (retriever.preference, Preference),
            "retriever.scored_by": (retriever.scored_by, Scoring),
        }
        for name, (word, known) in words.items():
            _check(word in get_args(known), name, word, f"one of {', '.join(get_args(known))}")

    def texts(self, labelled: int) -> int:
        """Return how many plain texts stand beside so many questions with answers."""
        share = self.retriever.text_share
        return round(labelled * share / (1 - share))


def _check(fits: bool, name: str, value: object, wanted: str) -> None:
    if not fits:
        raise UsageError(f"{name} of an RA-DIT recipe is {value!r}: use {wanted}")
