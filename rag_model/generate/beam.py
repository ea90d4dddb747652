"""Beam search over a marginal: one hypothesis is scored by the sum over several passages.

A *group* is one search for an answer. In RAG-Token a group is a question, whose d = k passages are summed at every
step. In RAG-Sequence a group is a question with one passage, d = 1. A hypothesis owns d rows of the generator's state,
which are selected together. Only hypotheses that can still win keep rows: a finished group costs nothing more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_model.errors import InputError
from rag_model.generate.decoding import Decoding
from rag_model.generate.generator import Generator, State

Propose = Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]
"""(h, v) log p of the next token and the group of each row -> (h, c) log p and tokens, best first."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete or partial answer."""

    tokens: tuple[int, ...]
    log_p: float  # Σ_i log p(y_i | x, y_<i), nats
    shares: tuple[tuple[float, ...], ...]  # p(z_i | x, y_≤i) of every token; empty where d = 1

    def score(self, penalty: float) -> float:
        """Return the score that ranks hypotheses: log p / tokens^penalty."""
        return self.log_p / float(len(self.tokens) ** penalty)


@dataclass(frozen=True, slots=True)
class _Grown:
    """A hypothesis one token longer, and the live one that it came from."""

    hypothesis: Hypothesis
    parent: int


def best_first(beams: int) -> Propose:
    """Propose the 2 x `beams` most likely tokens (1 if greedy), because up to half of them may end answers."""
    breadth = 1 if beams == 1 else 2 * beams

    def propose(log_p: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        found = log_p.topk(min(breadth, log_p.shape[-1]), dim=-1)  # (h, v) -> (h, c)
        return found.values, found.indices

    return propose


def search(
    generator: Generator,
    opening: tuple[Tensor, State],
    log_prior: Tensor,
    settings: Decoding,
    propose: Propose,
    wanted: int,
) -> list[list[Hypothesis]]:
    """Return the best `wanted` answers of each group, best first; fewer where the beams found fewer.

    A candidate counts as an answer when it ends and is among the first `beams` of its group, or when it has
    `max_new_tokens`. The search of a group ends when no live hypothesis can still reach the best `wanted` answers.

    Args:
        generator: computes the next logits from a state.
        opening: what `generator.begin` returned, (g d, v) logits and the state; `choose` does not change it.
        log_prior: (g, d) log p(z|x); zeros where d = 1.
        settings: `beams`, `max_new_tokens`, `length_penalty`.
        propose: selects the candidate next tokens.
        wanted: answers per group, at most `beams`.

    Raises:
        InputError: the logits of a group are NaN or -infinity.
    """
    logits, state = opening
    del opening
    live = [[Hypothesis((), 0.0, ())] for _ in log_prior]
    done: list[list[Hypothesis]] = [[] for _ in log_prior]
    while any(live):
        groups = [group for group, hypotheses in enumerate(live) for _ in hypotheses]
        grown = _grow(logits, log_prior, groups, live, propose, _unsayable(generator))
        parents: list[int] = []
        for group, candidates in enumerate(grown):
            kept = _sort_out(candidates, done[group], generator.end, settings, wanted)
            live[group] = [one.hypothesis for one in kept]
            parents += [one.parent for one in kept]
        if parents:
            tokens = [one.tokens[-1] for hypotheses in live for one in hypotheses]
            logits, state = _step(generator, state, parents, tokens, log_prior)
    if not all(done):
        raise InputError("the generator gives no token a probability: its weights are damaged, fetch or train it again")
    return done


def log_marginal(logits: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """Marginalise the next token over the passages: log Σ_z p(z|x) p(y_i | x, z, y_<i).

    Args:
        logits: (h d, v), the d rows of a hypothesis adjacent.
        log_prior: (h, d) log p(z|x).

    Returns:
        (h, d, v) log p(z|x) p(y_i|x,z,y_<i), and (h, v) their sum over z.
    """
    h, d = log_prior.shape
    # (h d, v) -> (h, d, v), plus (h, d) -> (h, d, 1)
    joint = logits.log_softmax(-1).view(h, d, -1).add_(log_prior.unsqueeze(-1))
    return joint, joint.logsumexp(1) if d > 1 else joint[:, 0]  # (h, d, v) -> (h, v)


def _grow(
    logits: Tensor,
    log_prior: Tensor,
    groups: Sequence[int],
    live: Sequence[Sequence[Hypothesis]],
    propose: Propose,
    unsayable: int | None,
) -> list[list[_Grown]]:
    """Return every proposed continuation of every live hypothesis, by group."""
    joint, marginal = log_marginal(logits, log_prior[groups])  # log_prior: (g, d) -> (h, d)
    if unsayable is not None:
        marginal[:, unsayable] = -torch.inf
    gains, tokens = propose(marginal, groups)
    shares = _shares(joint, gains, tokens) if joint.shape[1] > 1 else None
    grown: list[list[_Grown]] = [[] for _ in live]
    parents = [hypothesis for hypotheses in live for hypothesis in hypotheses]
    for row, (group, parent, ways, said) in enumerate(
        zip(groups, parents, gains.tolist(), tokens.tolist(), strict=True)
    ):
        for way, (gain, token) in enumerate(zip(ways, said, strict=True)):
            if not gain > -float("inf"):  # NaN is excluded as well
                continue
            share = (*parent.shares, tuple(shares[row][way])) if shares else ()
            grown[group].append(_Grown(Hypothesis((*parent.tokens, token), parent.log_p + gain, share), row))
    return grown


def _shares(joint: Tensor, gains: Tensor, tokens: Tensor) -> list[list[list[float]]]:
    """Return p(z_i | x, y_≤i) of the proposed tokens, (h, c, d)."""
    chosen = joint.gather(2, tokens.unsqueeze(1).expand(-1, joint.shape[1], -1))  # (h, c) -> (h, d, c)
    # (h, d, c) -> (h, c, d)
    shares: list[list[list[float]]] = chosen.sub(gains.unsqueeze(1)).exp().transpose(1, 2).tolist()
    return shares


def _sort_out(
    candidates: list[_Grown], done: list[Hypothesis], end: int, settings: Decoding, wanted: int
) -> list[_Grown]:
    """Move the answers among a group's candidates to `done`, and return the live hypotheses."""
    candidates.sort(key=lambda one: one.hypothesis.log_p, reverse=True)
    live: list[_Grown] = []
    for rank, one in enumerate(candidates[: 2 * settings.beams]):
        tokens = one.hypothesis.tokens
        if tokens[-1] != end and len(tokens) < settings.max_new_tokens:
            live.append(one)
        elif rank < settings.beams:
            done.append(one.hypothesis)
    done.sort(key=lambda one: one.score(settings.length_penalty), reverse=True)
    del done[wanted:]
    floor = done[-1].score(settings.length_penalty) if len(done) == wanted else -float("inf")
    return [one for one in live[: settings.beams] if _reach(one.hypothesis, settings) > floor]


def _reach(hypothesis: Hypothesis, settings: Decoding) -> float:
    """Return an upper bound of a live hypothesis's final score: log p unchanged, at the most favourable length."""
    longest = settings.max_new_tokens if settings.length_penalty > 0 else len(hypothesis.tokens) + 1
    return hypothesis.log_p / float(longest**settings.length_penalty)


def _step(
    generator: Generator, state: State, parents: Sequence[int], tokens: Sequence[int], log_prior: Tensor
) -> tuple[Tensor, State]:
    """Append one token to each live hypothesis, in all its d rows."""
    d, device = log_prior.shape[1], log_prior.device
    rows = torch.tensor(parents, device=device)[:, None] * d + torch.arange(d, device=device)  # (h, 1) + (d,) -> (h, d)
    state = generator.choose(state, rows.flatten())
    return generator.step(state, torch.tensor(tokens, device=device).repeat_interleave(d))  # (h,) -> (h d,)


def _unsayable(generator: Generator) -> int | None:
    """Return the padding token, which no answer may contain; None where it is also the end token."""
    return generator.pad if generator.pad != generator.end else None
