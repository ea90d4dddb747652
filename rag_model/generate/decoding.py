"""Settings and results of decoding, and functions for sampling (Lewis et al. 2020, section 2.5).

RAG-Token is a language model, p'(y_i | x, y_<i) = Σ_z p(z|x) p(y_i | x, z, y_<i), decoded by one
beam search. p(y|x) of RAG-Sequence does not factorize over tokens: one beam per passage proposes
candidates, which are ranked by their marginal.

Sampling applies temperature, top-k and top-p in this order, as transformers does. Every group has
its own random stream, so that an answer does not depend on the other questions of the batch.

Decoding continues from the key-value caches of transformers. Selecting rows of a cache gives a new
cache and leaves the old one unchanged. Since transformers 5.24 the arguments and results are named
`cache`, in earlier releases `past_key_values`; both names are supported.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache as cache_results
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from rag_model.digest import digest_json
from rag_model.errors import UsageError
from rag_model.extras import require

if TYPE_CHECKING:
    from transformers import Cache

_AnyCache = TypeVar("_AnyCache", bound="Cache")
# name of the cache in transformers 5.24 and later, and its name in earlier releases
_CACHE_NAMES = ("cache", "past_key_values")
DecodingMode = Literal["thorough", "fast"]
DEFAULT_NEW_TOKENS = 50  # maximum tokens of an answer, as in transformers' eval_rag.py
ProposeTokens = Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]
"""Function of (h, v) log p of the next token and the group of each row.

It returns (h, c) log p and (h, c) tokens of the candidates, best first.
"""


def build_continuation_arguments(module: Any, cache: "Cache") -> dict[str, Any]:
    """Return the keyword arguments with which a transformers model continues from `cache`."""
    return {_find_argument_name(type(module).forward): cache, "use_cache": True}


def send_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host does not wait until a GPU has finished earlier work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache_results
def _find_argument_name(forward: Callable[..., Any]) -> str:
    """Return the name of the cache argument in a method's signature; for a method that takes
    arbitrary keywords, return the name that the installed release uses.
    """
    output_type = require("transformers.modeling_outputs", "model").CausalLMOutputWithPast
    name_sets = signature(forward).parameters, {field.name for field in fields(output_type)}
    return next(name for names in name_sets for name in _CACHE_NAMES if name in names)


def get_cache(outputs: Mapping[str, Any]) -> Any:
    """Return the cache from the output of a transformers model."""
    return next(outputs[name] for name in _CACHE_NAMES if name in outputs)


def select_cache_rows(cache: _AnyCache, rows: Tensor, *, same_contexts: bool = False) -> _AnyCache:
    """Return a cache with these `rows`, (m,) int64; decoding with it does not change `cache`.

    `same_contexts` says that row i of the result has the same context as row i of `cache`, for
    example when the rows of a beam are reordered. Then the cross-attention keys and values, the
    largest part of a cache, are not copied.
    """
    selected_cache: Any = _copy_cache(cache)
    (selected_cache.self_attention_cache if same_contexts else selected_cache).reorder_cache(rows)
    return selected_cache  # type: ignore[no-any-return]


def _copy_cache(cache: Any) -> Any:
    """Return a copy that shares the tensors, which is safe, because appending tokens allocates new
    tensors.
    """
    cache_copy = copy(cache)
    if isinstance(cache, require("transformers", "model").EncoderDecoderCache):
        cache_copy.self_attention_cache = _copy_cache(cache.self_attention_cache)
        cache_copy.cross_attention_cache = _copy_cache(cache.cross_attention_cache)
        cache_copy.is_updated = dict(cache.is_updated)
    else:
        cache_copy.layers = [copy(layer) for layer in cache.layers]
    return cache_copy


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of random sampling; the defaults draw from the model's own distribution."""

    # divisor of log p(y_i), above 0; values below 1 sharpen the distribution
    temperature: float = 1.0
    top_k: int = 0  # number of most likely tokens to draw from; 0: all tokens
    # Probability mass of the most likely tokens to draw from, in (0, 1] (Holtzman et al. 2020).
    top_p: float = 1.0
    seed: int = 0  # with equal seeds, equal answers are drawn

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"the temperature is {self.temperature}: give a number above 0")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}: give a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}: give a share above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """Settings of decoding; the defaults are those of Lewis et al. 2020 for open-domain
    questions.
    """

    # Number of beams. Appendix A: 1 (greedy) for questions, "we did not find beam search improved
    # results"; 4 for longer texts.
    beams: int = 1
    # Maximum tokens of an answer, including the end token and any reasoning; None:
    # `DEFAULT_NEW_TOKENS`, or for an endpoint the default of `ChatSettings`.
    max_new_tokens: int | None = None
    # Hypotheses are ranked by log p / tokens^penalty. The penalty is 0 in section 2.5 of the paper
    # (argmax of p(y|x)) and 1 in fairseq.
    length_penalty: float = 0.0
    # Decoding of RAG-Sequence. Appendix A: thorough for questions, "answers are generally short".
    mode: DecodingMode = "thorough"
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise UsageError(f"beams is {self.beams}: give at least 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens (--max-tokens) is {self.max_new_tokens}: give at least 1")
        if self.mode not in {"thorough", "fast"}:
            raise UsageError(f"the decoding mode {self.mode!r} is unknown: choose thorough or fast")
        if self.sampling is not None and self.beams > 1:
            raise UsageError(f"sampling does not use {self.beams} beams: set beams to 1, or do not sample")

    @property
    def token_limit(self) -> int:
        """Maximum tokens of an answer, for a model that runs in this process."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True, slots=True)
class DecodedAnswer:
    """The answer of one question, and the contribution of each of its k passages."""

    # One or more token ids; the last is an end token, unless the answer was truncated.
    tokens: tuple[int, ...]
    log_likelihood: float  # log p(y|x) in nats, without length penalty; a lower bound in fast mode
    posterior: tuple[float, ...]  # p(z|x,y), sums to 1; for RAG-Token the mean over the tokens
    shares: tuple[tuple[float, ...], ...] = ()  # (t, k) p(z_i|x,y) of every token; RAG-Token only


def derive_seed(sampling: Sampling | None, text: str) -> int:
    """Return a random seed that depends only on the text to continue and on `sampling.seed`."""
    return int(digest_json([sampling.seed, text]).partition(":")[2][:15], 16) if sampling else 0


def create_random_streams(seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one random number generator per seed, on the CPU, so that its numbers are the same for
    all devices.
    """
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def draw_uniform(streams: Sequence[torch.Generator]) -> Tensor:
    """Draw one number in [0, 1) from each random stream; return (n,) float64."""
    return torch.stack([torch.rand((), generator=stream, dtype=torch.float64) for stream in streams])


def propose_sampled(sampling: Sampling, streams: Sequence[torch.Generator]) -> ProposeTokens:
    """Return a function that draws one token per row with the random stream of the row's group.

    The function also returns the token's log p in the unmodified model.
    """

    def propose(log_p: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        random_numbers = send_to(draw_uniform([streams[group] for group in groups]), log_p.device)
        tokens = sample_tokens(log_p, sampling, random_numbers)[:, None]
        return log_p.gather(-1, tokens), tokens  # (h, v) -> (h, 1)

    return propose


def sample_tokens(log_p: Tensor, sampling: Sampling, random_numbers: Tensor) -> Tensor:
    """Return (n,) int64 tokens: per row, the first token, in descending order of p, whose
    cumulative p exceeds the row's random number.

    Args:
        log_p: (n, v) log p of the tokens.
        sampling: temperature, top_k and top_p.
        numbers: (n,) float64 random numbers in [0, 1).
    """
    p, token_order = (log_p.double() / sampling.temperature).softmax(-1).sort(-1, descending=True)
    if sampling.top_k:
        p[:, sampling.top_k :] = 0
    preceding_p = p.cumsum(-1) - p
    p = p.where(preceding_p < sampling.top_p * p.sum(-1, keepdim=True), 0)
    cumulative_p = p.cumsum(-1)
    # (n, v) -> (n,)
    ranks = (cumulative_p <= random_numbers[:, None] * cumulative_p[:, -1:]).sum(-1)
    last_rank = (p > 0).sum(-1) - 1  # rounding may raise the product to the total
    return token_order.gather(-1, ranks.minimum(last_rank).clamp(min=0)[:, None])[:, 0]  # (n, 1) -> (n,)
