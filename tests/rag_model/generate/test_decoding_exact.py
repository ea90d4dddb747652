"""Decoding beside brute force: a vocabulary of six tokens, every answer enumerated, probabilities in plain floats.

Examples are the same in every run: two answers equally likely to the seventh digit would otherwise turn up some day.
"""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.generate.decoding import DecodedAnswer, DecodingSettings, Sampling
from rag_model.generate.rag_decoding import decode_sequence, decode_token
from tests.fixtures.table_generator import END, PAD, Said, TabledGenerator

LONGEST = 3
WIDE = sum(4**length for length in range(LONGEST + 1))  # as many beams as there are answers
SEEDS = st.integers(0, 10_000)


def priors(questions: int, k: int, seed: int) -> torch.Tensor:
    scores = torch.randn(questions, k, generator=torch.Generator().manual_seed(seed))
    return scores.mul(2).log_softmax(-1)


def by_token(generator: TabledGenerator, contexts: Sequence[int], prior: Sequence[float], answer: Said) -> float:
    """Σ_i log Σ_z p(z|x) p(y_i | x, z, y_<i)."""
    each = [generator.log_p(context, answer) for context in contexts]
    return sum(
        math.log(sum(math.exp(log_p + step) for log_p, step in zip(prior, steps, strict=True)))
        for steps in zip(*each, strict=True)
    )


def by_sequence(generator: TabledGenerator, contexts: Sequence[int], prior: Sequence[float], answer: Said) -> float:
    """log Σ_z p(z|x) Π_i p(y_i | x, z, y_<i)."""
    joint = [log_p + sum(generator.log_p(z, answer)) for z, log_p in zip(contexts, prior, strict=True)]
    return math.log(sum(map(math.exp, joint)))


LIKELIHOOD = {"token": by_token, "sequence": by_sequence}
DECODE = {"token": decode_token, "sequence": decode_sequence}


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
@given(seed=SEEDS, k=st.integers(1, 3))
@settings(max_examples=30, derandomize=True)
def test_with_beams_for_every_answer_the_best_is_found(kind: str, penalty: float, seed: int, k: int) -> None:
    generator = TabledGenerator(seed)
    log_prior = priors(2, k, seed)
    wide = DecodingSettings(beams=WIDE, max_new_tokens=LONGEST, length_penalty=penalty)
    found = DECODE[kind](generator, generator.numbered(2, k), log_prior, wide, [0, 0])
    for question, one in enumerate(found):
        contexts, prior = range(question * k, question * k + k), log_prior[question].tolist()
        marginal = {y: LIKELIHOOD[kind](generator, contexts, prior, y) for y in generator.answers(LONGEST)}
        weight = penalty if kind == "token" else 0  # RAG-Sequence weighs candidates by their marginal alone
        best = max(marginal, key=lambda y: marginal[y] / len(y) ** weight)
        assert one.tokens == best
        assert one.log_likelihood == pytest.approx(marginal[best], abs=1e-5)


def test_the_table_holds_probabilities() -> None:
    generator = TabledGenerator(3, vocabulary=5)
    no_pad = {
        context: sum(math.exp(sum(generator.log_p(context, y))) for y in generator.answers(3)) for context in (0, 1)
    }
    cut = sum(math.exp(sum(generator.log_p(0, (*said, PAD)))) for said in [(), *((a,) for a in (2, 3, 4))])
    deeper = sum(math.exp(sum(generator.log_p(0, (a, b, PAD)))) for a in (2, 3, 4) for b in (2, 3, 4))
    assert no_pad[0] + cut + deeper == pytest.approx(1)


@given(seed=SEEDS, beams=st.integers(1, 4), penalty=st.sampled_from([0.0, 1.0]), k=st.integers(1, 3))
@settings(max_examples=40, derandomize=True)
def test_a_narrow_beam_finds_what_a_plain_one_does(seed: int, beams: int, penalty: float, k: int) -> None:
    """The search drops what can not win any more, and rows that are done; a plain search keeps all to the end."""
    generator = TabledGenerator(seed, end_bias=1.0)
    log_prior = priors(1, k, seed)
    narrow = DecodingSettings(beams=beams, max_new_tokens=5, length_penalty=penalty)
    (found,) = decode_token(generator, generator.numbered(1, k), log_prior, narrow, [0])
    answers = plain_beam(generator, range(k), log_prior[0].tolist(), beams, 5)
    best = max(answers, key=lambda y: answers[y] / len(y) ** penalty)
    assert (found.tokens, found.log_likelihood) == (best, pytest.approx(answers[best], abs=1e-5))


def plain_beam(
    generator: TabledGenerator, contexts: Sequence[int], prior: Sequence[float], beams: int, longest: int
) -> dict[Said, float]:
    """Return every answer that a beam search comes to, with its log p."""
    live: dict[Said, float] = {(): 0.0}
    done: dict[Said, float] = {}
    for length in range(1, longest + 1):
        words = range(1, generator.vocabulary_size)
        grown = {(*said, word): by_token(generator, contexts, prior, (*said, word)) for said in live for word in words}
        ranked = sorted(grown, key=lambda y: grown[y], reverse=True)
        ended = [y for y in ranked[:beams] if y[-1] == END or length == longest]
        done |= {y: grown[y] for y in ended}
        if beams == 1 and ended:
            return done
        live = {y: grown[y] for y in [y for y in ranked[: 2 * beams] if y[-1] != END][:beams]}
    return done


@given(seed=SEEDS, beams=st.integers(1, 3), k=st.integers(1, 4))
@settings(max_examples=30, derandomize=True)
def test_thorough_and_fast_are_what_the_paper_says(seed: int, beams: int, k: int) -> None:
    generator = TabledGenerator(seed, end_bias=1.0)
    log_prior = priors(1, k, seed)
    prior = log_prior[0].tolist()
    # with one beam the search is greedy; wider ones keep the best `beams` of the answers that they came to
    own = [plain_beam(generator, [z], [0.0], beams, 4) for z in range(k)]
    kept = [dict(sorted(answers.items(), key=lambda item: -item[1])[:beams]) for answers in own]
    union = {y for answers in kept for y in answers}
    thorough = {y: by_sequence(generator, range(k), prior, y) for y in union}
    fast = {y: math.log(sum(math.exp(prior[z] + kept[z][y]) for z in range(k) if y in kept[z])) for y in union}
    for mode, marginal in (("thorough", thorough), ("fast", fast)):
        narrow = DecodingSettings(beams=beams, max_new_tokens=4, mode=mode)
        (found,) = decode_sequence(generator, generator.numbered(1, k), log_prior, narrow, [0])
        best = max(union, key=lambda y: marginal[y])
        assert (found.tokens, found.log_likelihood) == (best, pytest.approx(marginal[best], abs=1e-5))
    assert all(fast[y] <= thorough[y] + 1e-9 for y in union)


@given(seed=SEEDS)
@settings(max_examples=10, derandomize=True)
def test_the_posterior_of_a_sequence_is_bayes_rule(seed: int) -> None:
    generator, k = TabledGenerator(seed), 3
    log_prior = priors(1, k, seed)
    (found,) = decode_sequence(
        generator, generator.numbered(1, k), log_prior, DecodingSettings(beams=2, max_new_tokens=3), [0]
    )
    joint = [math.exp(prior + sum(generator.log_p(z, found.tokens))) for z, prior in enumerate(log_prior[0].tolist())]
    assert found.posterior == pytest.approx([one / sum(joint) for one in joint], abs=1e-5)
    assert found.shares == ()


@given(seed=SEEDS)
@settings(max_examples=10, derandomize=True)
def test_the_posterior_of_every_token_is_bayes_rule(seed: int) -> None:
    generator, k = TabledGenerator(seed), 3
    log_prior = priors(1, k, seed)
    (found,) = decode_token(
        generator, generator.numbered(1, k), log_prior, DecodingSettings(beams=2, max_new_tokens=3), [0]
    )
    steps = zip(*(generator.log_p(z, found.tokens) for z in range(k)), strict=True)
    for share, step in zip(found.shares, steps, strict=True):
        joint = [math.exp(prior + log_p) for prior, log_p in zip(log_prior[0].tolist(), step, strict=True)]
        assert share == pytest.approx([one / sum(joint) for one in joint], abs=1e-5)
    mean = [sum(column) / len(found.tokens) for column in zip(*found.shares, strict=True)]
    assert found.posterior == pytest.approx(mean)
    assert sum(found.posterior) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(
    "how", [DecodingSettings(beams=3, max_new_tokens=6), DecodingSettings(max_new_tokens=6, sampling=Sampling())]
)
def test_an_answer_does_not_depend_on_what_is_asked_beside_it(kind: str, how: DecodingSettings) -> None:
    generator, k, questions = TabledGenerator(5, end_bias=1.0), 3, 7
    log_prior, seeds = priors(questions, k, 5), range(questions)
    together = DECODE[kind](generator, generator.numbered(questions, k), log_prior, how, seeds)
    for question, one in enumerate(together):
        contexts = generator.numbered(1, k, first=question * k)
        (alone,) = DECODE[kind](generator, contexts, log_prior[[question]], how, [question])
        assert alone.tokens == one.tokens
        assert alone.posterior == pytest.approx(one.posterior, abs=1e-5)
    assert len({len(one.tokens) for one in together}) > 1  # some were done before others


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["thorough", "fast"])
def test_a_draw_is_from_the_model_s_own_distribution(kind: str, mode: str) -> None:
    generator, k, draws, longest = TabledGenerator(8, vocabulary=4, end_bias=1.0), 2, 3000, 2
    log_prior = priors(1, k, 1)
    how = DecodingSettings(max_new_tokens=longest, sampling=Sampling(), mode=mode)  # type: ignore[arg-type]
    contexts = generator.numbered(1, k)
    many = type(contexts)(contexts.tokens.repeat(draws, 1), contexts.mask.repeat(draws, 1), k)
    found = DECODE[kind](generator, many, log_prior.expand(draws, k), how, range(draws))
    counts = Counter(one.tokens for one in found)
    expected = sayable(generator, kind, log_prior[0].tolist(), longest)
    assert set(counts) <= set(expected)
    for answer, p in expected.items():
        assert counts[answer] / draws == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / draws) + 1e-9), answer
    if kind == "token" or mode == "thorough":
        likelihood = LIKELIHOOD[kind](generator, range(k), log_prior[0].tolist(), found[0].tokens)
        assert found[0].log_likelihood == pytest.approx(likelihood, abs=1e-5)


def sayable(generator: TabledGenerator, kind: str, prior: Sequence[float], longest: int) -> dict[Said, float]:
    """Return what each answer is drawn with when the pad token, which no answer has, is left out at every step."""
    contexts = range(len(prior))

    def allowed(group: Sequence[int], weights: Sequence[float], answer: Said) -> float:
        p = 1.0
        for place in range(len(answer)):
            said = answer[:place]
            step = {
                token: sum(
                    math.exp(weight + generator.log_p(z, (*said, token))[-1])
                    for z, weight in zip(group, weights, strict=True)
                )
                for token in range(1, generator.vocabulary_size)
            }
            p *= step[answer[place]] / sum(step.values())
        return p

    if kind == "token":
        return {y: allowed(contexts, prior, y) for y in generator.answers(longest)}
    return {y: sum(math.exp(prior[z]) * allowed([z], [0.0], y) for z in contexts) for y in generator.answers(longest)}


@pytest.mark.parametrize("narrow", [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)])
def test_a_draw_from_one_token_is_greedy(narrow: Sampling) -> None:
    generator, log_prior = TabledGenerator(2), priors(4, 3, 2)
    contexts = generator.numbered(4, 3)
    drawn = decode_token(generator, contexts, log_prior, DecodingSettings(max_new_tokens=5, sampling=narrow), range(4))
    greedy = decode_token(generator, contexts, log_prior, DecodingSettings(max_new_tokens=5), range(4))
    assert drawn == greedy


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_that_never_ends_is_cut(kind: str, beams: int) -> None:
    generator = TabledGenerator(1, end_bias=-1e4)
    how = DecodingSettings(beams=beams, max_new_tokens=7)
    (found,) = DECODE[kind](generator, generator.numbered(1, 2), priors(1, 2, 1), how, [0])
    assert len(found.tokens) == 7
    assert END not in found.tokens


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_may_be_empty(kind: str, beams: int) -> None:
    generator = TabledGenerator(1, end_bias=1e3)
    how = DecodingSettings(beams=beams, max_new_tokens=7)
    (found,) = DECODE[kind](generator, generator.numbered(1, 2), priors(1, 2, 1), how, [0])
    assert found.tokens == (END,)
    assert generator.decode(found.tokens) == ""
    assert sum(found.posterior) == pytest.approx(1, abs=1e-5)


def test_what_fills_up_is_never_said() -> None:
    class Padding(TabledGenerator):
        def next_logits(self, context: int, said: Said) -> list[float]:
            return [50.0, *super().next_logits(context, said)[1:]]

    how = DecodingSettings(beams=2, max_new_tokens=4)
    generator = Padding(1)
    found: DecodedAnswer
    for decode in (decode_token, decode_sequence):
        (found,) = decode(generator, generator.numbered(1, 2), priors(1, 2, 1), how, [0])
        assert PAD not in found.tokens


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(
    "how", [DecodingSettings(), DecodingSettings(beams=3), DecodingSettings(sampling=Sampling())], ids=["1", "3", "s"]
)
def test_a_broken_generator_is_named(kind: str, how: DecodingSettings) -> None:
    class Broken(TabledGenerator):
        def next_logits(self, context: int, said: Said) -> list[float]:
            return [math.nan] * self.vocabulary_size if context == 2 and said else super().next_logits(context, said)

    generator = Broken(1, end_bias=-20.0)
    with pytest.raises(InputError, match="its weights are damaged"):
        DECODE[kind](generator, generator.numbered(3, 1), priors(3, 1, 1), how, range(3))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"beams": 0}, "beams is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens .--max-tokens. is 0"),
        ({"mode": "slow"}, "thorough or fast"),
        ({"beams": 2, "sampling": Sampling()}, "set beams to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        DecodingSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_sampling_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).split("_", maxsplit=1)[0]):
        Sampling(**wrong)  # type: ignore[arg-type]
