"""Decoding, compared with brute force: every answer over a vocabulary of six tokens, with plain floats.

Examples are the same in every run, because random ones would sometimes have two answers of equal probability.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.generate.decoding import DecodedAnswer, DecodingSettings, Sampling
from rag_model.generate.rag_decoding import decode_sequence, decode_token
from tests.fixtures.table_generator import END, PAD, TableGenerator, Tokens

MAX_TOKENS = 3
ANSWER_COUNT = sum(4**length for length in range(MAX_TOKENS + 1))  # as many beams as there are answers
SEEDS = st.integers(0, 10_000)
Contexts = Sequence[int]  # their numbers in a TabledGenerator


def draw_priors(questions: int, k: int, seed: int) -> torch.Tensor:
    scores = torch.randn(questions, k, generator=torch.Generator().manual_seed(seed))
    return scores.mul(2).log_softmax(-1)


def sum_token_log_p(generator: TableGenerator, contexts: Contexts, prior: Sequence[float], answer: Tokens) -> float:
    """Σ_i log Σ_z p(z|x) p(y_i | x, z, y_<i)."""
    token_log_p = [generator.log_p(context, answer) for context in contexts]
    return sum(
        math.log(sum(math.exp(log_p + step) for log_p, step in zip(prior, steps, strict=True)))
        for steps in zip(*token_log_p, strict=True)
    )


def sum_sequence_log_p(generator: TableGenerator, contexts: Contexts, prior: Sequence[float], answer: Tokens) -> float:
    """log Σ_z p(z|x) Π_i p(y_i | x, z, y_<i)."""
    joint = [log_p + sum(generator.log_p(z, answer)) for z, log_p in zip(contexts, prior, strict=True)]
    return math.log(sum(map(math.exp, joint)))


LIKELIHOOD = {"token": sum_token_log_p, "sequence": sum_sequence_log_p}
DECODE = {"token": decode_token, "sequence": decode_sequence}


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
@given(seed=SEEDS, k=st.integers(1, 3))
@settings(max_examples=12, derandomize=True)
def test_search_with_a_beam_for_every_answer_finds_the_best(kind: str, penalty: float, seed: int, k: int) -> None:
    generator = TableGenerator(seed)
    log_prior = draw_priors(2, k, seed)
    decoding = DecodingSettings(beams=ANSWER_COUNT, max_new_tokens=MAX_TOKENS, length_penalty=penalty)
    answers = DECODE[kind](generator, generator.make_contexts(2, k), log_prior, decoding, [0, 0])
    for question, answer in enumerate(answers):
        contexts, prior = range(question * k, question * k + k), log_prior[question].tolist()
        marginal = {y: LIKELIHOOD[kind](generator, contexts, prior, y) for y in generator.iter_answers(MAX_TOKENS)}
        weight = penalty if kind == "token" else 0  # RAG-Sequence ranks candidates by their marginal alone
        best = max(marginal, key=lambda y: marginal[y] / len(y) ** weight)
        assert answer.tokens == best
        assert answer.log_likelihood == pytest.approx(marginal[best], abs=1e-5)


def test_table_contains_probabilities() -> None:
    generator = TableGenerator(3, vocabulary=5)
    complete = {
        context: sum(math.exp(sum(generator.log_p(context, y))) for y in generator.iter_answers(3))
        for context in (0, 1)
    }
    padded = sum(math.exp(sum(generator.log_p(0, (*prefix, PAD)))) for prefix in [(), *((a,) for a in (2, 3, 4))])
    padded_later = sum(math.exp(sum(generator.log_p(0, (a, b, PAD)))) for a in (2, 3, 4) for b in (2, 3, 4))
    assert complete[0] + padded + padded_later == pytest.approx(1)


@given(seed=SEEDS, beams=st.integers(1, 4), penalty=st.sampled_from([0.0, 1.0]), k=st.integers(1, 3))
@settings(max_examples=16, derandomize=True)
def test_beam_search_equals_a_plain_one(seed: int, beams: int, penalty: float, k: int) -> None:
    """The search drops finished rows and hopeless answers early; the plain one keeps all to the end."""
    generator = TableGenerator(seed, end_bias=1.0)
    log_prior = draw_priors(1, k, seed)
    decoding = DecodingSettings(beams=beams, max_new_tokens=5, length_penalty=penalty)
    (answer,) = decode_token(generator, generator.make_contexts(1, k), log_prior, decoding, [0])
    answers = search_plainly(generator, range(k), log_prior[0].tolist(), beams, 5)
    best = max(answers, key=lambda y: answers[y] / len(y) ** penalty)
    assert (answer.tokens, answer.log_likelihood) == (best, pytest.approx(answers[best], abs=1e-5))


def search_plainly(
    generator: TableGenerator, contexts: Contexts, prior: Sequence[float], beams: int, max_tokens: int
) -> dict[Tokens, float]:
    """Return every answer that a beam search reaches, with its log p."""
    unfinished: dict[Tokens, float] = {(): 0.0}
    finished: dict[Tokens, float] = {}
    for length in range(1, max_tokens + 1):
        words = range(1, generator.vocabulary_size)
        answers = [(*prefix, word) for prefix in unfinished for word in words]
        extended = {y: sum_token_log_p(generator, contexts, prior, y) for y in answers}
        ranked = sorted(extended, key=lambda y: extended[y], reverse=True)
        ended_answers = [y for y in ranked[:beams] if y[-1] == END or length == max_tokens]
        finished |= {y: extended[y] for y in ended_answers}
        if beams == 1 and ended_answers:
            return finished
        unfinished = {y: extended[y] for y in [y for y in ranked[: 2 * beams] if y[-1] != END][:beams]}
    return finished


@given(seed=SEEDS, beams=st.integers(1, 3), k=st.integers(1, 4))
@settings(max_examples=12, derandomize=True)
def test_thorough_and_fast_modes_follow_the_paper(seed: int, beams: int, k: int) -> None:
    generator = TableGenerator(seed, end_bias=1.0)
    log_prior = draw_priors(1, k, seed)
    prior = log_prior[0].tolist()
    # One beam is a greedy search; wider searches keep the best `beams` of the answers that they reach.
    answer_lists = [search_plainly(generator, [z], [0.0], beams, 4) for z in range(k)]
    best = [dict(sorted(answers.items(), key=lambda item: -item[1])[:beams]) for answers in answer_lists]
    union = {y for answers in best for y in answers}
    thorough = {y: sum_sequence_log_p(generator, range(k), prior, y) for y in union}
    fast = {y: math.log(sum(math.exp(prior[z] + best[z][y]) for z in range(k) if y in best[z])) for y in union}
    for mode, marginal in (("thorough", thorough), ("fast", fast)):
        decoding = DecodingSettings(beams=beams, max_new_tokens=4, mode=mode)
        (answer,) = decode_sequence(generator, generator.make_contexts(1, k), log_prior, decoding, [0])
        winner = max(union, key=lambda y: marginal[y])
        assert (answer.tokens, answer.log_likelihood) == (winner, pytest.approx(marginal[winner], abs=1e-5))
    assert all(fast[y] <= thorough[y] + 1e-9 for y in union)


@given(seed=SEEDS)
@settings(max_examples=10, derandomize=True)
def test_posterior_of_a_sequence_follows_bayes_rule(seed: int) -> None:
    generator, k = TableGenerator(seed), 3
    log_prior = draw_priors(1, k, seed)
    decoding = DecodingSettings(beams=2, max_new_tokens=3)
    (answer,) = decode_sequence(generator, generator.make_contexts(1, k), log_prior, decoding, [0])
    joint = [math.exp(prior + sum(generator.log_p(z, answer.tokens))) for z, prior in enumerate(log_prior[0].tolist())]
    assert answer.posterior == pytest.approx([p / sum(joint) for p in joint], abs=1e-5)
    assert answer.shares == ()


@given(seed=SEEDS)
@settings(max_examples=10, derandomize=True)
def test_posterior_of_every_token_follows_bayes_rule(seed: int) -> None:
    generator, k = TableGenerator(seed), 3
    log_prior = draw_priors(1, k, seed)
    decoding = DecodingSettings(beams=2, max_new_tokens=3)
    (answer,) = decode_token(generator, generator.make_contexts(1, k), log_prior, decoding, [0])
    steps = zip(*(generator.log_p(z, answer.tokens) for z in range(k)), strict=True)
    for share, step in zip(answer.shares, steps, strict=True):
        joint = [math.exp(prior + log_p) for prior, log_p in zip(log_prior[0].tolist(), step, strict=True)]
        assert share == pytest.approx([p / sum(joint) for p in joint], abs=1e-5)
    mean = [sum(column) / len(answer.tokens) for column in zip(*answer.shares, strict=True)]
    assert answer.posterior == pytest.approx(mean)
    assert sum(answer.posterior) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(
    "decoding", [DecodingSettings(beams=3, max_new_tokens=6), DecodingSettings(max_new_tokens=6, sampling=Sampling())]
)
def test_answer_does_not_depend_on_other_questions(kind: str, decoding: DecodingSettings) -> None:
    generator, k, questions = TableGenerator(5, end_bias=1.0), 3, 7
    log_prior, seeds = draw_priors(questions, k, 5), range(questions)
    answers = DECODE[kind](generator, generator.make_contexts(questions, k), log_prior, decoding, seeds)
    for question, answer in enumerate(answers):
        contexts = generator.make_contexts(1, k, first=question * k)
        (single,) = DECODE[kind](generator, contexts, log_prior[[question]], decoding, [question])
        assert single.tokens == answer.tokens
        assert single.posterior == pytest.approx(answer.posterior, abs=1e-5)
    assert len({len(answer.tokens) for answer in answers}) > 1  # some end before others


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["thorough", "fast"])
def test_answers_are_sampled_from_the_distribution_of_the_model(kind: str, mode: str) -> None:
    generator, k, draws, max_tokens = TableGenerator(8, vocabulary=4, end_bias=1.0), 2, 3000, 2
    log_prior = draw_priors(1, k, 1)
    decoding = DecodingSettings(max_new_tokens=max_tokens, sampling=Sampling(), mode=mode)  # type: ignore[arg-type]
    contexts = generator.make_contexts(1, k)
    repeated = type(contexts)(contexts.tokens.repeat(draws, 1), contexts.mask.repeat(draws, 1), k)
    answers = DECODE[kind](generator, repeated, log_prior.expand(draws, k), decoding, range(draws))
    counts = Counter(answer.tokens for answer in answers)
    expected = compute_answer_probabilities(generator, kind, log_prior[0].tolist(), max_tokens)
    assert set(counts) <= set(expected)
    for answer, p in expected.items():
        assert counts[answer] / draws == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / draws) + 1e-9), answer
    if kind == "token" or mode == "thorough":
        likelihood = LIKELIHOOD[kind](generator, range(k), log_prior[0].tolist(), answers[0].tokens)
        assert answers[0].log_likelihood == pytest.approx(likelihood, abs=1e-5)


def compute_answer_probabilities(
    generator: TableGenerator, kind: str, prior: Sequence[float], max_tokens: int
) -> dict[Tokens, float]:
    """Return the probability of each answer if the pad token is left out at every step."""
    contexts = range(len(prior))

    def compute_probability(group: Sequence[int], weights: Sequence[float], answer: Tokens) -> float:
        p = 1.0
        for index in range(len(answer)):
            prefix = answer[:index]
            step = dict.fromkeys(range(1, generator.vocabulary_size), 0.0)
            for (z, weight), token in product(zip(group, weights, strict=True), step):
                step[token] += math.exp(weight + generator.log_p(z, (*prefix, token))[-1])
            p *= step[answer[index]] / sum(step.values())
        return p

    answers = generator.iter_answers(max_tokens)
    if kind == "token":
        return {y: compute_probability(contexts, prior, y) for y in answers}
    return {y: sum(math.exp(prior[z]) * compute_probability([z], [0.0], y) for z in contexts) for y in answers}


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)])
def test_sampling_from_one_token_is_greedy(sampling: Sampling) -> None:
    generator, log_prior = TableGenerator(2), draw_priors(4, 3, 2)
    contexts = generator.make_contexts(4, 3)
    sampled, greedy = (
        decode_token(generator, contexts, log_prior, DecodingSettings(max_new_tokens=5, sampling=each), range(4))
        for each in (sampling, None)
    )
    assert sampled == greedy


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("beams", [1, 3])
def test_answer_without_an_end_is_truncated(kind: str, beams: int) -> None:
    generator = TableGenerator(1, end_bias=-1e4)
    decoding = DecodingSettings(beams=beams, max_new_tokens=7)
    (answer,) = DECODE[kind](generator, generator.make_contexts(1, 2), draw_priors(1, 2, 1), decoding, [0])
    assert len(answer.tokens) == 7
    assert END not in answer.tokens


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("beams", [1, 3])
def test_answer_can_be_empty(kind: str, beams: int) -> None:
    generator = TableGenerator(1, end_bias=1e3)
    decoding = DecodingSettings(beams=beams, max_new_tokens=7)
    (answer,) = DECODE[kind](generator, generator.make_contexts(1, 2), draw_priors(1, 2, 1), decoding, [0])
    assert answer.tokens == (END,)
    assert generator.decode(answer.tokens) == ""
    assert sum(answer.posterior) == pytest.approx(1, abs=1e-5)


def test_pad_token_is_never_generated() -> None:
    class PaddingGenerator(TableGenerator):
        def next_logits(self, context: int, said: Tokens) -> list[float]:
            return [50.0, *super().next_logits(context, said)[1:]]

    decoding = DecodingSettings(beams=2, max_new_tokens=4)
    generator = PaddingGenerator(1)
    answer: DecodedAnswer
    for decode in (decode_token, decode_sequence):
        (answer,) = decode(generator, generator.make_contexts(1, 2), draw_priors(1, 2, 1), decoding, [0])
        assert PAD not in answer.tokens


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(
    "decoding",
    [DecodingSettings(), DecodingSettings(beams=3), DecodingSettings(sampling=Sampling())],
    ids=["1", "3", "s"],
)
def test_generator_with_nan_logits_is_refused(kind: str, decoding: DecodingSettings) -> None:
    class NanGenerator(TableGenerator):
        def next_logits(self, context: int, said: Tokens) -> list[float]:
            return [math.nan] * self.vocabulary_size if context == 2 and said else super().next_logits(context, said)

    generator = NanGenerator(1, end_bias=-20.0)
    with pytest.raises(InputError, match="its weights are damaged"):
        DECODE[kind](generator, generator.make_contexts(3, 1), draw_priors(3, 1, 1), decoding, range(3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beams": 0}, "beams is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens .--max-tokens. is 0"),
        ({"mode": "slow"}, "thorough or fast"),
        ({"beams": 2, "sampling": Sampling()}, "set beams to 1"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DecodingSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_invalid_sampling_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values)).split("_", maxsplit=1)[0]):
        Sampling(**values)  # type: ignore[arg-type]
