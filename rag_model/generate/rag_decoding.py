"""Decode RAG-Sequence and RAG-Token (Lewis et al. 2020, section 2.5).

RAG-Sequence: one beam search per passage proposes candidates, which are ranked by p(y|x) = Σ_z
p(z|x) p(y|x,z). *Thorough* decoding computes p(y|x,z) of every candidate for every passage, which
gives the exact marginal. *Fast* decoding sets p(y|x,z) to zero if y is not among the candidates
from passage z.

RAG-Token: one search over the marginal of all passages, p'(y_i | x, y_<i) = Σ_z p(z|x) p(y_i | x,
z, y_<i). Every token has its own passage z_i, whose posterior p(z_i | x, y) is the passage's share
of that sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_model.generate.beam import Hypothesis, beam_search, propose_most_likely
from rag_model.generate.decoding import (
    DecodedAnswer,
    DecodingSettings,
    Sampling,
    create_random_streams,
    draw_uniform,
    propose_sampled,
)
from rag_model.generate.generator import Contexts, Generator, State

# Maps the tokens of an answer y to log p(y|x,z) of the k passages; an unknown value is -inf.
CandidateScores = dict[tuple[int, ...], list[float]]
_UNKNOWN = -float("inf")
_MAX_LOGITS = 1 << 24  # number of logits per forward pass; in float32 they take 64 MB


@torch.inference_mode()
def decode_sequence(
    generator: Generator, contexts: Contexts, log_prior: Tensor, settings: DecodingSettings, seeds: Sequence[int]
) -> list[DecodedAnswer]:
    """Return the answer with the highest p(y|x), or a randomly drawn answer, for each question.

    Args:
        generator: the model of p(y_i | x, z, y_<i).
        contexts: the contexts of b questions with k passages each.
        log_prior: (b, k) log p(z|x).
        settings: beams, lengths and mode; the length penalty affects the beam searches, but not the
            ranking of the candidates.
        seeds: the random seed of each question, for sampling.
    """
    prefilled = generator.prefill(contexts)
    if settings.sampling:
        candidates_by_question = _sample_candidates(generator, prefilled, log_prior, settings, settings.sampling, seeds)
    else:
        candidates_by_question = _propose_candidates(generator, prefilled, contexts.k, settings)
    if settings.mode == "thorough":
        _fill_in_missing_scores(generator, prefilled, candidates_by_question, contexts.k)
    return [
        _choose_best_candidate(candidates, prior)
        for candidates, prior in zip(candidates_by_question, log_prior.double().cpu(), strict=True)
    ]


def _propose_candidates(
    generator: Generator, prefilled: tuple[Tensor, State], k: int, settings: DecodingSettings
) -> list[CandidateScores]:
    """Run one beam search per passage; return the union of the candidates for each question."""
    logits = prefilled[0]
    prior = logits.new_zeros(len(logits), 1)  # (b k, 1)
    propose = propose_most_likely(settings.beams, len(generator.end_tokens))
    hypotheses_by_context = beam_search(generator, prefilled, prior, settings, propose, n_answers=settings.beams)
    candidates_by_question: list[CandidateScores] = [{} for _ in range(len(hypotheses_by_context) // k)]
    for row, hypotheses in enumerate(hypotheses_by_context):
        for hypothesis in hypotheses:
            candidates_by_question[row // k].setdefault(hypothesis.tokens, [_UNKNOWN] * k)[row % k] = hypothesis.log_p
    return candidates_by_question


def _sample_candidates(
    generator: Generator,
    prefilled: tuple[Tensor, State],
    log_prior: Tensor,
    settings: DecodingSettings,
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[CandidateScores]:
    """Draw a passage from p(z|x), then an answer from p(y|x,z), which is a draw from p(y|x)."""
    k, streams = log_prior.shape[1], create_random_streams(seeds)
    cumulative_p = log_prior.double().softmax(-1).cumsum(-1).cpu()  # (b, k)
    # (b, k) -> (b,)
    drawn_columns = (cumulative_p <= draw_uniform(streams)[:, None]).sum(-1).clamp(max=k - 1)
    context_rows = torch.arange(len(log_prior)) * k + drawn_columns  # (b,) rows of the b k contexts
    logits, state = prefilled
    context_rows = context_rows.to(logits.device)
    # (b k, v) -> (b, v)
    drawn_state = (logits[context_rows], generator.select_rows(state, context_rows))
    propose = propose_sampled(sampling, streams)
    answers = beam_search(generator, drawn_state, torch.zeros_like(log_prior[:, :1]), settings, propose, n_answers=1)
    candidates_by_question: list[CandidateScores] = []
    for (answer,), passage in zip(answers, drawn_columns.tolist(), strict=True):
        candidates_by_question.append({answer.tokens: [answer.log_p if z == passage else _UNKNOWN for z in range(k)]})
    return candidates_by_question


def _fill_in_missing_scores(
    generator: Generator, prefilled: tuple[Tensor, State], candidates_by_question: Sequence[CandidateScores], k: int
) -> None:
    """Compute log p(y|x,z) of the candidates y that the beam search of z did not return.

    The logits take about 64 MB at a time.
    """
    missing_scores = [
        (question * k + z, tokens, log_p_by_passage, z)
        for question, candidates in enumerate(candidates_by_question)
        for tokens, log_p_by_passage in candidates.items()
        for z in range(k)
        if log_p_by_passage[z] == _UNKNOWN
    ]
    # Sort by length, because answers of similar length need little padding in a batch.
    missing_scores.sort(key=lambda missing_score: len(missing_score[1]))
    while missing_scores:
        chunk_size = max(1, _MAX_LOGITS // (len(missing_scores[-1][1]) * generator.vocabulary_size))
        chunk = missing_scores[-chunk_size:]
        del missing_scores[-chunk_size:]
        context_rows, answers, log_p_lists, passage_columns = zip(*chunk, strict=True)
        scores = log_likelihoods(generator, prefilled, context_rows, answers).tolist()
        for log_p_by_passage, z, log_p in zip(log_p_lists, passage_columns, scores, strict=True):
            log_p_by_passage[z] = log_p


def log_likelihoods(
    generator: Generator, prefilled: tuple[Tensor, State], rows: Sequence[int], answers: Sequence[Sequence[int]]
) -> Tensor:
    """Return (m,) log p(y|x,z) of one answer per row, in one forward pass over prefilled contexts.

    Args:
        generator: the model of p(y_i | x, z, y_<i).
        prefilled: the result of `generator.prefill`, which is not changed.
        rows: the row of each answer's context.
        answers: the tokens of each answer, at least one.
    """
    logits, state = prefilled
    row_ids = torch.tensor(rows, device=logits.device)
    max_tokens = max(map(len, answers))
    # (m, t)
    tokens = torch.tensor(
        [[*answer, *[generator.pad_token] * (max_tokens - len(answer))] for answer in answers], device=logits.device
    )
    scores = _gather_log_p(logits[row_ids], tokens[:, 0])  # (n, v) -> (m, v) -> (m,)
    if max_tokens > 1:
        n_tokens = torch.tensor([len(answer) for answer in answers], device=logits.device)
        # (m, t - 1, v) -> (m, t - 1)
        later_log_p = _gather_log_p(
            generator.extend(generator.select_rows(state, row_ids), tokens[:, :-1]), tokens[:, 1:]
        )
        # (t - 1,) and (m, 1) -> (m, t - 1)
        is_answer_token = torch.arange(1, max_tokens, device=logits.device) < n_tokens[:, None]
        scores = scores + later_log_p.where(is_answer_token, 0).sum(-1)  # (m, t - 1) -> (m,)
    return scores


def _gather_log_p(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log softmax of (…, v) logits at (…) tokens, without a second tensor of that
    size.
    """
    # (…, v) -> (…, 1) -> (…)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def _choose_best_candidate(candidates: CandidateScores, log_prior: Tensor) -> DecodedAnswer:
    """Return the candidate with the highest marginal, and the posterior of its passages."""
    # (c, k) + (k,) -> (c, k)
    log_joint = torch.tensor(list(candidates.values()), dtype=torch.float64) + log_prior
    log_marginal = log_joint.logsumexp(-1)  # (c, k) -> (c,)
    best_index = int(log_marginal.argmax())
    posterior = (log_joint[best_index] - log_marginal[best_index]).exp()
    return DecodedAnswer(list(candidates)[best_index], float(log_marginal[best_index]), tuple(posterior.tolist()))


@torch.inference_mode()
def decode_token(
    generator: Generator, contexts: Contexts, log_prior: Tensor, settings: DecodingSettings, seeds: Sequence[int]
) -> list[DecodedAnswer]:
    """Return the best answer, or a randomly drawn answer, for each question.

    Args:
        generator: the model of p(y_i | x, z, y_<i).
        contexts: the contexts of b questions with k passages each.
        log_prior: (b, k) log p(z|x).
        settings: beams and lengths; `mode` is not used.
        seeds: the random seed of each question, for sampling.
    """
    sampling = settings.sampling
    propose = (
        propose_sampled(sampling, create_random_streams(seeds))
        if sampling
        else propose_most_likely(settings.beams, len(generator.end_tokens))
    )
    answers = beam_search(generator, generator.prefill(contexts), log_prior, settings, propose, n_answers=1)
    return [_build_decoded_answer(answer, contexts.k) for (answer,) in answers]


def _build_decoded_answer(answer: Hypothesis, k: int) -> DecodedAnswer:
    token_shares = answer.shares if k > 1 else ((1.0,),) * len(answer.tokens)
    # (t, k) -> (k,)
    posterior = tuple(sum(column) / len(token_shares) for column in zip(*token_shares, strict=True))
    return DecodedAnswer(answer.tokens, answer.log_p, posterior, token_shares)
