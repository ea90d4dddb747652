"""Beam search over a marginal: hypotheses that several passages carry together.

A *group* is what one answer is sought for: RAG-Token's group is a question, whose d = k passages are summed at every
step; RAG-Sequence's is a question beside one passage, d = 1. A hypothesis owns d rows of the generator's state, which
are chosen together. Only hypotheses that can still win keep rows: a group that is done costs nothing more.
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
    """An answer, or its beginning."""

    tokens: tuple[int, ...]
    log_p: float  # Σ_i log p(y_i | x, y_<i), nats
    shares: tuple[tuple[float, ...], ...]  # p(z_i | x, y_≤i) of every token; empty where d = 1

    def score(self, penalty: float) -> float:
        """Return what hypotheses are ranked by: log p / tokens^penalty."""
        return self.log_p / float(len(self.tokens) ** penalty)


@dataclass(frozen=True, slots=True)
class _Grown:
    """A hypothesis one token longer, and the live one that it came from."""

    hypothesis: Hypothesis
    parent: int


def best_first(beams: int) -> Propose:
    """Propose the likeliest tokens: twice as many as beams, since as many as there are beams may end."""
    breadth = 1 if beams == 1 else 2 * beams

    def propose(log_p: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        found = log_p.topk(min(breadth, log_p.shape[-1]), dim=-1)
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
    `max_new_tokens`. The search of a group ends when no live hypothesis can come to rank among the best.

    Args:
        generator: what goes on from a state.
        opening: what `generator.begin` returned, (g d, v) logits and the state; `choose` leaves it as it is.
        log_prior: (g, d) log p(z|x); zeros where d = 1.
        settings: `beams`, `max_new_tokens`, `length_penalty`.
        propose: which tokens may come next.
        wanted: answers a group, at most `beams`.

    Raises:
        InputError: the logits of a group are not numbers.
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
        raise InputError("the generator gives no token a probability: its weights are broken, fetch or train it again")
    return done


def log_marginal(logits: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the passages out of the next token: log Σ_z p(z|x) p(y_i | x, z, y_<i).

    Args:
        logits: (h d, v), the d rows of a hypothesis side by side.
        log_prior: (h, d) log p(z|x).

    Returns:
        (h, d, v) log p(z|x) p(y_i|x,z,y_<i), and (h, v) their sum over z.
    """
    h, d = log_prior.shape
    joint = logits.log_softmax(-1).view(h, d, -1).add_(log_prior.unsqueeze(-1))
    return joint, joint.logsumexp(1) if d > 1 else joint[:, 0]


def _grow(
    logits: Tensor,
    log_prior: Tensor,
    groups: Sequence[int],
    live: Sequence[Sequence[Hypothesis]],
    propose: Propose,
    unsayable: int | None,
) -> list[list[_Grown]]:
    """Return every proposed continuation of every live hypothesis, by group."""
    joint, marginal = log_marginal(logits, log_prior[groups])
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
            if not gain > -float("inf"):  # not a number is no probability either
                continue
            share = (*parent.shares, tuple(shares[row][way])) if shares else ()
            grown[group].append(_Grown(Hypothesis((*parent.tokens, token), parent.log_p + gain, share), row))
    return grown


def _shares(joint: Tensor, gains: Tensor, tokens: Tensor) -> list[list[list[float]]]:
    """Return p(z_i | x, y_≤i) of the proposed tokens, (h, c, d)."""
    chosen = joint.gather(2, tokens.unsqueeze(1).expand(-1, joint.shape[1], -1))
    shares: list[list[list[float]]] = chosen.sub(gains.unsqueeze(1)).exp().transpose(1, 2).tolist()
    return shares


def _sort_out(
    candidates: list[_Grown], done: list[Hypothesis], end: int, settings: Decoding, wanted: int
) -> list[_Grown]:
    """Move the answers among a group's candidates to `done`, and return the hypotheses that go on."""
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
    """Return the best score that a live hypothesis can still come to: no more log p, at the kindest length."""
    longest = settings.max_new_tokens if settings.length_penalty > 0 else len(hypothesis.tokens) + 1
    return hypothesis.log_p / float(longest**settings.length_penalty)


def _step(
    generator: Generator, state: State, parents: Sequence[int], tokens: Sequence[int], log_prior: Tensor
) -> tuple[Tensor, State]:
    """Say one token in each live hypothesis, in all its d rows."""
    d, device = log_prior.shape[1], log_prior.device
    rows = torch.tensor(parents, device=device)[:, None] * d + torch.arange(d, device=device)
    state = generator.choose(state, rows.flatten())
    return generator.step(state, torch.tensor(tokens, device=device).repeat_interleave(d))


def _unsayable(generator: Generator) -> int | None:
    """Return the token that is no part of any answer: what fills up, unless it ends answers too."""
    return generator.pad if generator.pad != generator.end else None
