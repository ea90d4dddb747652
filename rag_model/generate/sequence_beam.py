"""Decode RAG-Sequence: one beam per passage, then candidates ranked by p(y|x) = Σ_z p(z|x) p(y|x,z).

*Thorough* scores every candidate under every passage: the exact marginal. *Fast* sets p(y|x,z) to zero where y was
not among the candidates of z's own beam (Lewis et al. 2020, section 2.5).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_model.generate.beam import best_first, search
from rag_model.generate.decoding import Decoded, Decoding, Sampling
from rag_model.generate.generator import Contexts, Generator, State
from rag_model.generate.sampling import drawn, streams, uniform

Candidates = dict[tuple[int, ...], list[float]]  # y -> log p(y|x,z) of the k passages; -inf: unknown
_UNKNOWN = -float("inf")
_LOGITS = 1 << 24  # scored at once: 64 MB


@torch.inference_mode()
def decode_sequence(
    generator: Generator, contexts: Contexts, log_prior: Tensor, settings: Decoding, seeds: Sequence[int]
) -> list[Decoded]:
    """Return the candidate with the highest p(y|x) for each question, or a drawn answer, in order.

    Args:
        generator: says p(y_i | x, z, y_<i).
        contexts: b questions with k passages each.
        log_prior: (b, k) log p(z|x).
        settings: beams, lengths and mode; the length penalty ranks within a beam, never the candidates.
        seeds: one per question, for sampling.
    """
    opening = generator.begin(contexts)
    if settings.sampling:
        found = _sample(generator, opening, log_prior, settings, settings.sampling, seeds)
    else:
        found = _propose(generator, opening, contexts.k, settings)
    if settings.mode == "thorough":
        _rescore(generator, opening, found, contexts.k)
    return [_best(candidates, prior) for candidates, prior in zip(found, log_prior.double().cpu(), strict=True)]


def _propose(generator: Generator, opening: tuple[Tensor, State], k: int, settings: Decoding) -> list[Candidates]:
    """Run one beam search per passage; return the union of the candidates of each question's beams."""
    logits = opening[0]
    prior = logits.new_zeros(len(logits), 1)  # (b k, 1)
    beams = search(generator, opening, prior, settings, best_first(settings.beams), wanted=settings.beams)
    found: list[Candidates] = [{} for _ in range(len(beams) // k)]
    for row, hypotheses in enumerate(beams):
        for one in hypotheses:
            found[row // k].setdefault(one.tokens, [_UNKNOWN] * k)[row % k] = one.log_p
    return found


def _sample(
    generator: Generator,
    opening: tuple[Tensor, State],
    log_prior: Tensor,
    settings: Decoding,
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[Candidates]:
    """Draw a passage from p(z|x), then an answer from p(y|x,z): together a draw from p(y|x)."""
    k, generators = log_prior.shape[1], streams(seeds)
    total = log_prior.double().softmax(-1).cumsum(-1).cpu()  # (b, k)
    drawn_passages = (total <= uniform(generators)[:, None]).sum(-1).clamp(max=k - 1)  # (b, k) -> (b,)
    rows = torch.arange(len(log_prior)) * k + drawn_passages  # (b,) rows of the b k contexts
    logits, state = opening
    rows = rows.to(logits.device)
    chosen = (logits[rows], generator.choose(state, rows))  # (b k, v) -> (b, v)
    propose = drawn(sampling, generators)
    answers = search(generator, chosen, torch.zeros_like(log_prior[:, :1]), settings, propose, wanted=1)
    found: list[Candidates] = []
    for (answer,), passage in zip(answers, drawn_passages.tolist(), strict=True):
        found.append({answer.tokens: [answer.log_p if z == passage else _UNKNOWN for z in range(k)]})
    return found


def _rescore(generator: Generator, opening: tuple[Tensor, State], found: Sequence[Candidates], k: int) -> None:
    """Fill in log p(y|x,z) where a passage's own beam did not find y; about 64 MB of logits at once."""
    missing = [
        (question * k + z, tokens, known, z)
        for question, candidates in enumerate(found)
        for tokens, known in candidates.items()
        for z in range(k)
        if known[z] == _UNKNOWN
    ]
    missing.sort(key=lambda one: len(one[1]))  # similar lengths together, to pad little
    while missing:
        count = max(1, _LOGITS // (len(missing[-1][1]) * generator.vocabulary))
        chunk = missing[-count:]
        del missing[-count:]
        scores = log_likelihoods(generator, opening, [one[0] for one in chunk], [one[1] for one in chunk])
        for (_, _, known, z), score in zip(chunk, scores.tolist(), strict=True):
            known[z] = score


def log_likelihoods(
    generator: Generator, opening: tuple[Tensor, State], rows: Sequence[int], answers: Sequence[Sequence[int]]
) -> Tensor:
    """Return log p(y|x,z) of one answer per row, (m,): one pass, with contexts that `begin` has read.

    Args:
        generator: says p(y_i | x, z, y_<i).
        opening: what `generator.begin` returned; unchanged.
        rows: the context of each answer.
        answers: their tokens, at least one each.
    """
    logits, state = opening
    where = torch.tensor(rows, device=logits.device)
    longest = max(map(len, answers))
    # (m, t)
    tokens = torch.tensor([[*one, *[generator.pad] * (longest - len(one))] for one in answers], device=logits.device)
    scores = _log_p(logits[where], tokens[:, 0])  # (n, v) -> (m, v) -> (m,)
    if longest > 1:
        lengths = torch.tensor([len(one) for one in answers], device=logits.device)
        # (m, t - 1, v) -> (m, t - 1)
        rest = _log_p(generator.follow(generator.choose(state, where), tokens[:, :-1]), tokens[:, 1:])
        said = torch.arange(1, longest, device=logits.device) < lengths[:, None]  # (t - 1,) and (m, 1) -> (m, t - 1)
        scores = scores + rest.where(said, 0).sum(-1)  # (m, t - 1) -> (m,)
    return scores


def _log_p(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log softmax of (…, v) logits at (…) tokens, without a second tensor of the logits' size."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)  # (…, v) -> (…, 1) -> (…)


def _best(candidates: Candidates, log_prior: Tensor) -> Decoded:
    """Return the candidate of the highest marginal, with the posterior of its passages."""
    joint = torch.tensor(list(candidates.values()), dtype=torch.float64) + log_prior  # (c, k) + (k,) -> (c, k)
    marginal = joint.logsumexp(-1)  # (c, k) -> (c,)
    place = int(marginal.argmax())
    posterior = (joint[place] - marginal[place]).exp()
    return Decoded(list(candidates)[place], float(marginal[place]), tuple(posterior.tolist()))
