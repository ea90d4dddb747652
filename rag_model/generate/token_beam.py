"""Decode RAG-Token: one search over the marginal of all passages.

p'(y_i | x, y_<i) = Σ_z p(z|x) p(y_i | x, z, y_<i) (Lewis et al. 2020, section 2.5). Every token has its own
passage z_i; its posterior p(z_i | x, y) is the share of each passage in that sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_model.generate.beam import Hypothesis, best_first, search
from rag_model.generate.decoding import Decoded, Decoding
from rag_model.generate.generator import Contexts, Generator
from rag_model.generate.sampling import drawn, streams


@torch.inference_mode()
def decode_token(
    generator: Generator, contexts: Contexts, log_prior: Tensor, settings: Decoding, seeds: Sequence[int]
) -> list[Decoded]:
    """Return the best answer of each question, or a drawn one, in order.

    Args:
        generator: computes p(y_i | x, z, y_<i).
        contexts: b questions with k passages each.
        log_prior: (b, k) log p(z|x).
        settings: beams and lengths; `mode` is not used.
        seeds: one per question, for sampling.
    """
    sampling = settings.sampling
    propose = drawn(sampling, streams(seeds)) if sampling else best_first(settings.beams)
    found = search(generator, generator.begin(contexts), log_prior, settings, propose, wanted=1)
    return [_decoded(answer, contexts.k) for (answer,) in found]


def _decoded(answer: Hypothesis, k: int) -> Decoded:
    shares = answer.shares if k > 1 else ((1.0,),) * len(answer.tokens)
    posterior = tuple(sum(column) / len(shares) for column in zip(*shares, strict=True))  # (t, k) -> (k,)
    return Decoded(answer.tokens, answer.log_p, posterior, shares)
