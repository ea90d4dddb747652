"""Settings and results of decoding.

Lewis et al. 2020, section 2.5. RAG-Token is a language model, p'(y_i | x, y_<i) = Σ_z p(z|x) p(y_i | x, z, y_<i), and
one beam search decodes it. p(y|x) of RAG-Sequence does not factorise over tokens: one beam per passage proposes
candidates, which are ranked by their marginal.
"""

from dataclasses import dataclass
from typing import Literal

from rag_model.errors import UsageError

Mode = Literal["thorough", "fast"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw an answer instead of searching for the best one; the defaults draw from the model's own distribution."""

    temperature: float = 1.0  # above 0; below 1 it sharpens p(y_i)
    top_k: int = 0  # tokens to draw from; 0: all
    top_p: float = 1.0  # probability mass to draw from, in (0, 1] (nucleus sampling, Holtzman et al. 2020)
    seed: int = 0  # equal seeds draw equal answers

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"the temperature is {self.temperature}: give one above 0, or do not sample")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}: give the number of tokens to draw from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}: give a probability mass above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings of decoding; the defaults are those of Lewis et al. 2020 for open-domain questions."""

    beams: int = 1  # appendix A: greedy for questions, "we did not find beam search improved results"; 4 to write text
    max_new_tokens: int = 50  # as transformers' eval_rag.py; includes the end token; longer answers are cut
    length_penalty: float = 0.0  # section 2.5: argmax of p(y|x); a beam ranks by log p / tokens^penalty (fairseq: 1)
    mode: Mode = "thorough"  # RAG-Sequence, appendix A: thorough for questions, "answers are generally short"
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise UsageError(f"beams is {self.beams}: give at least 1")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if self.mode not in {"thorough", "fast"}:
            raise UsageError(f"there is no decoding mode {self.mode!r}: choose thorough or fast")
        if self.sampling is not None and self.beams > 1:
            raise UsageError(f"sampling does not use {self.beams} beams: set beams to 1, or do not sample")


@dataclass(frozen=True, slots=True)
class Decoded:
    """One question's answer, and how much each of its k passages contributed."""

    tokens: tuple[int, ...]  # at least one; the last is the end token, unless the answer was cut
    log_likelihood: float  # log p(y|x) in nats, without length penalty; a lower bound in fast mode
    posterior: tuple[float, ...]  # p(z|x,y), sums to 1; for RAG-Token the mean over the tokens
    shares: tuple[tuple[float, ...], ...] = ()  # RAG-Token: (t, k), p(z_i|x,y) of every token
