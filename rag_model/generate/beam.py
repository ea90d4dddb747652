"""Beam search with marginal scores: the score of a hypothesis is a sum over several passages.

A *group* is one search for an answer. In RAG-Token a group is a question; its d = k passages are
marginalized at every step. In RAG-Sequence a group is a question with one passage, d = 1. A
hypothesis has d rows of the generator's state, which are selected together. The rows of hypotheses
that can no longer be among the best answers are dropped, so a finished group takes no more time.

Shapes: g groups, h unfinished hypotheses of all groups, c candidates for the next token of a
hypothesis, v words in the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_model.errors import InputError
from rag_model.generate.decoding import DecodingSettings, ProposeTokens, send_to
from rag_model.generate.generator import Generator, State

# number of steps of a greedy search on a GPU after which the host reads the tokens
GPU_STEPS_PER_READ = 8
_NO_TOKEN = "the generator gives no token a probability: its weights are damaged, so download or train it again"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete or partial answer of a beam search."""

    tokens: tuple[int, ...]  # token ids of the answer
    log_p: float  # Σ_i log p(y_i | x, y_<i) in nats
    # p(z_i | x, y_≤i) of the d passages for every token; empty if d = 1
    shares: tuple[tuple[float, ...], ...]

    def score(self, length_penalty: float) -> float:
        """Return the score that ranks hypotheses: log p / tokens^penalty."""
        return self.log_p / float(len(self.tokens) ** length_penalty)


@dataclass(frozen=True, slots=True)
class _Extension:
    """An unfinished hypothesis, extended by one token."""

    hypothesis: Hypothesis
    parent: int  # position of the extended hypothesis among those of all groups


def propose_most_likely(beams: int, n_end_tokens: int) -> ProposeTokens:
    """Return a function that proposes the (1 + `n_end_tokens`) x `beams` most likely tokens, or 1
    token if `beams` is 1.

    At most `n_end_tokens` x `beams` of these candidates can end an answer, so that `beams`
    hypotheses remain.
    """
    n_proposed = 1 if beams == 1 else (1 + n_end_tokens) * beams

    def propose_tokens(log_p: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        top_tokens = log_p.topk(min(n_proposed, log_p.shape[-1]), dim=-1)  # (h, v) -> (h, c)
        return top_tokens.values, top_tokens.indices

    return propose_tokens


def beam_search(
    generator: Generator,
    prefill_result: tuple[Tensor, State],
    log_prior: Tensor,
    settings: DecodingSettings,
    propose_tokens: ProposeTokens,
    n_answers: int,
) -> list[list[Hypothesis]]:
    """Return the best `n_answers` answers of each group, best first; fewer if the search found
    fewer.

    A candidate becomes an answer if it has an end token or `token_limit` tokens, and is among the
    `beams` most likely candidates of its group. The search of a group ends when no unfinished
    hypothesis can still become one of the best `n_answers` answers.

    Args:
        generator: computes the next logits from a state.
        prefill_result: the result of `generator.prefill`: (g d, v) logits and the state, which is
            not changed.
        log_prior: (g, d) log p(z|x); zeros if d = 1.
        settings: decoding settings; `beams`, `token_limit` and `length_penalty` are used.
        propose_tokens: function that selects the candidates for the next token.
        n_answers: number of answers per group, at most `beams`.

    Raises:
        InputError: the logits of a group are NaN or -infinity.
    """
    steps_per_read = GPU_STEPS_PER_READ if log_prior.is_cuda else 1
    if settings.beams == 1 and steps_per_read > 1 and not getattr(generator, "reads_tokens", False):
        return search_greedily(generator, prefill_result, log_prior, settings, propose_tokens, steps_per_read)
    logits, state = prefill_result
    del prefill_result
    live_hypotheses = [[Hypothesis((), 0.0, ())] for _ in log_prior]
    answers: list[list[Hypothesis]] = [[] for _ in log_prior]
    while any(live_hypotheses):
        groups = [group for group, hypotheses in enumerate(live_hypotheses) for _ in hypotheses]
        extensions = _extend_hypotheses(
            logits, log_prior, groups, live_hypotheses, propose_tokens, _get_forbidden_token(generator)
        )
        parent_rows: list[int] = []
        for group, candidates in enumerate(extensions):
            live_candidates = _separate_finished(candidates, answers[group], generator.end_tokens, settings, n_answers)
            live_hypotheses[group] = [extension.hypothesis for extension in live_candidates]
            parent_rows += [extension.parent for extension in live_candidates]
        if parent_rows:
            tokens = [hypothesis.tokens[-1] for hypotheses in live_hypotheses for hypothesis in hypotheses]
            logits, state = _append_tokens(generator, state, parent_rows, tokens, log_prior)
    if not all(answers):
        raise InputError(_NO_TOKEN)
    return answers


def log_marginal(logits: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """Marginalize the next token over the passages: log Σ_z p(z|x) p(y_i | x, z, y_<i).

    Args:
        logits: (h d, v); the d rows of a hypothesis are adjacent.
        log_prior: (h, d) log p(z|x).

    Returns:
        (h, d, v) log p(z|x) p(y_i|x,z,y_<i), and (h, v) their sum over z.
    """
    h, d = log_prior.shape
    # (h d, v) -> (h, d, v), plus (h, d) -> (h, d, 1)
    log_joint = logits.log_softmax(-1).view(h, d, -1).add_(log_prior.unsqueeze(-1))
    return log_joint, log_joint.logsumexp(1) if d > 1 else log_joint[:, 0]  # (h, d, v) -> (h, v)


def _extend_hypotheses(
    logits: Tensor,
    log_prior: Tensor,
    groups: Sequence[int],
    live_hypotheses: Sequence[Sequence[Hypothesis]],
    propose_tokens: ProposeTokens,
    forbidden_token: int | None,
) -> list[list[_Extension]]:
    """Return all proposed extensions of all unfinished hypotheses, by group."""
    # (g, d) -> (h, d)
    hypothesis_prior = log_prior[send_to(torch.tensor(groups), log_prior.device)]
    proposals = _propose_candidates(logits, hypothesis_prior, groups, propose_tokens, forbidden_token)
    extensions: list[list[_Extension]] = [[] for _ in live_hypotheses]
    parents = [hypothesis for hypotheses in live_hypotheses for hypothesis in hypotheses]
    for row, (group, parent, candidates) in enumerate(zip(groups, parents, proposals.tolist(), strict=True)):
        for log_p_gain, token, *shares in candidates:
            if not log_p_gain > -float("inf"):  # NaN is excluded as well
                continue
            longer_hypothesis = _extend_hypothesis(parent, log_p_gain, token, shares)
            extensions[group].append(_Extension(longer_hypothesis, row))
    return extensions


def _extend_hypothesis(hypothesis: Hypothesis, gain: float, token: float, shares: Sequence[float]) -> Hypothesis:
    all_shares = (*hypothesis.shares, tuple(shares)) if shares else ()
    return Hypothesis((*hypothesis.tokens, int(token)), hypothesis.log_p + gain, all_shares)


def _propose_candidates(
    logits: Tensor, prior: Tensor, groups: Sequence[int], propose_tokens: ProposeTokens, forbidden_token: int | None
) -> Tensor:
    """Return (h, c, 2 + d) float64: log p, token id, and p(z_i | x, y_≤i) of each candidate.

    If d = 1, the shape is (h, c, 2). All values are in one tensor, so that they are copied to the
    host at once; float64 represents token ids and float32 values exactly.
    """
    log_joint, log_marginals = log_marginal(logits, prior)
    if forbidden_token is not None:
        log_marginals[:, forbidden_token] = -torch.inf
    log_probs, tokens = propose_tokens(log_marginals, groups)
    columns = [log_probs.double()[..., None], tokens.double()[..., None]]
    if log_joint.shape[1] > 1:
        # (h, c) -> (h, d, c)
        token_joints = log_joint.gather(2, tokens.unsqueeze(1).expand(-1, log_joint.shape[1], -1))
        # (h, d, c) -> (h, c, d)
        columns.append(token_joints.sub(log_probs.unsqueeze(1)).exp().transpose(1, 2).double())
    return torch.cat(columns, 2)


def search_greedily(
    generator: Generator,
    prefill_result: tuple[Tensor, State],
    log_prior: Tensor,
    settings: DecodingSettings,
    propose_tokens: ProposeTokens,
    steps_per_read: int,
) -> list[list[Hypothesis]]:
    """Return a list with one answer for each group, as `beam_search` does with one beam.

    The host (CPU) reads the tokens of `steps_per_read` steps at a time, so that a GPU does not wait
    for the host after each step. Tokens after the end of an answer are dropped.

    Raises:
        InputError: the logits of a group are NaN or -infinity.
    """
    logits, state = prefill_result
    d, device, forbidden_token = log_prior.shape[1], log_prior.device, _get_forbidden_token(generator)
    answers = [Hypothesis((), 0.0, ()) for _ in log_prior]
    live_groups, prior = list(range(len(answers))), log_prior
    # copy the state, because the steps change it
    state = generator.select_rows(state, torch.arange(len(answers) * d))
    n_steps = 0
    while live_groups:
        proposals = list[Tensor]()
        for _ in range(min(steps_per_read, settings.token_limit - n_steps)):
            if proposals:
                next_tokens = proposals[-1][:, 0, 1].long()  # (h, 1, 2 + d) -> (h,)
                logits, state = generator.step(state, next_tokens.repeat_interleave(d))
            proposals.append(_propose_candidates(logits, prior, live_groups, propose_tokens, forbidden_token))
            n_steps += 1
        live_rows = list[int]()
        # (h, steps, 2 + d)
        for row, (group, candidates) in enumerate(zip(live_groups, torch.cat(proposals, 1).tolist(), strict=True)):
            is_live = True
            for gain, token, *shares in candidates:
                if not gain > -float("inf"):  # NaN is excluded as well
                    raise InputError(_NO_TOKEN)
                answers[group] = _extend_hypothesis(answers[group], gain, token, shares)
                is_live = answers[group].tokens[-1] not in generator.end_tokens
                if not is_live:
                    break
            if is_live and n_steps < settings.token_limit:
                live_rows.append(row)
        live_groups = [live_groups[row] for row in live_rows]
        if live_groups:
            tokens = [answers[group].tokens[-1] for group in live_groups]
            logits, state = _append_tokens(generator, state, live_rows, tokens, log_prior)
            prior = log_prior[send_to(torch.tensor(live_groups), device)]  # (g, d) -> (h, d)
    return [[answer] for answer in answers]


def _separate_finished(
    candidates: list[_Extension],
    answers: list[Hypothesis],
    end_tokens: frozenset[int],
    settings: DecodingSettings,
    n_answers: int,
) -> list[_Extension]:
    """Move the finished candidates of a group to `answers`; return the candidates to extend."""
    candidates.sort(key=lambda extension: extension.hypothesis.log_p, reverse=True)
    live_extensions: list[_Extension] = []
    for candidate_rank, candidate in enumerate(candidates[: (1 + len(end_tokens)) * settings.beams]):
        tokens = candidate.hypothesis.tokens
        if tokens[-1] not in end_tokens and len(tokens) < settings.token_limit:
            live_extensions.append(candidate)
        elif candidate_rank < settings.beams:
            answers.append(candidate.hypothesis)
    answers.sort(key=lambda hypothesis: hypothesis.score(settings.length_penalty), reverse=True)
    del answers[n_answers:]
    score_to_beat = answers[-1].score(settings.length_penalty) if len(answers) == n_answers else -float("inf")
    return [
        extension
        for extension in live_extensions[: settings.beams]
        if _compute_score_bound(extension.hypothesis, settings) > score_to_beat
    ]


def _compute_score_bound(hypothesis: Hypothesis, settings: DecodingSettings) -> float:
    """Return an upper bound of the final score of an unfinished hypothesis.

    The bound assumes that further tokens do not lower log p, and that the answer gets the length
    with the best score.
    """
    best_length = settings.token_limit if settings.length_penalty > 0 else len(hypothesis.tokens) + 1
    return hypothesis.log_p / float(best_length**settings.length_penalty)


def _append_tokens(
    generator: Generator, state: State, parents: Sequence[int], tokens: Sequence[int], log_prior: Tensor
) -> tuple[Tensor, State]:
    """Append one token to each unfinished hypothesis, in all of its d rows."""
    d, device = log_prior.shape[1], log_prior.device
    # (h, 1) + (d,) -> (h, d), on the CPU: the generator copies it to its device without waiting
    beam_rows = torch.tensor(parents)[:, None] * d + torch.arange(d)
    state = generator.select_rows(state, beam_rows.flatten())
    # (h,) -> (h d,)
    return generator.step(state, send_to(torch.tensor(tokens), device).repeat_interleave(d))


def _get_forbidden_token(generator: Generator) -> int | None:
    """Return the padding token, which an answer must not contain; None if it is an end token."""
    return None if generator.pad_token in generator.end_tokens else generator.pad_token
