"""Decoding in every family of generators: likelihoods equal teacher forcing, and both searches find equal answers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rag_model.corpus.records import Passage
from rag_model.generate.beam import beam_search, propose_most_likely, search_greedily
from rag_model.generate.decoding import (
    DecodingSettings,
    ProposeTokens,
    Sampling,
    create_random_streams,
    propose_sampled,
)
from rag_model.generate.generator import Generator, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings, Variant
from rag_model.generate.rag_decoding import decode_sequence, decode_token
from tests.fixtures.tiny_generators import save_bart, save_llama, save_t5

SAVE = {"bart": save_bart, "t5": save_t5, "llama": save_llama}
DECODE = {"token": decode_token, "sequence": decode_sequence}
QUESTIONS = ["who", "was it the capital of the answer?", "誰 🐋"]
TEXTS = ["the answer is in the capital", "", "of 東京 and"]
SCORES = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [-3.0, 4.0, 1.0]])


@pytest.fixture(scope="module", params=SAVE)
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder: Path = SAVE[request.param](tmp_path_factory.mktemp(request.param))
    return load_generator(folder, device="cpu")


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(
    "settings",
    [DecodingSettings(), DecodingSettings(beams=3), DecodingSettings(sampling=Sampling(seed=3))],
    ids=["1", "3", "s"],
)
def test_likelihood_and_posterior_equal_teacher_forcing(
    generator: Generator, kind: Variant, settings: DecodingSettings
) -> None:
    passages = [[Passage("", "", 1, "T", "", text, 0, 1, "") for text in TEXTS]] * len(QUESTIONS)
    contexts = generator.encode_contexts(QUESTIONS, passages)  # of different lengths, so padded
    short = DecodingSettings(settings.beams, 7, sampling=settings.sampling)
    with torch.no_grad():
        answers = DECODE[kind](generator, contexts, SCORES.log_softmax(-1), short, range(len(QUESTIONS)))
        rows = [[*answer.tokens, *[generator.pad_token] * (7 - len(answer.tokens))] for answer in answers]
        mask = torch.arange(7) < torch.tensor([[len(answer.tokens)] for answer in answers])
        rag = Rag(nn.Identity(), generator, RagSettings(kind=kind, k=3))
        expected = rag.log_likelihood(SCORES, contexts, Targets(torch.tensor(rows), mask))
    assert [answer.log_likelihood for answer in answers] == pytest.approx(expected.log_p.tolist(), abs=1e-3)
    for answer, posterior in zip(answers, expected.posterior.exp().tolist(), strict=True):
        assert answer.posterior == pytest.approx(posterior, abs=1e-3)


@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3])
def test_greedy_search_in_blocks_equals_beam_search(generator: Generator, sampling: Sampling | None, k: int) -> None:
    passages = [[Passage("", "", 1, "T", "", text, 0, 1, "") for text in TEXTS[:k]]] * len(QUESTIONS)
    contexts = generator.encode_contexts(QUESTIONS, passages)
    prior, settings = SCORES[:, :k].log_softmax(-1), DecodingSettings(max_new_tokens=7, sampling=sampling)

    def propose() -> ProposeTokens:
        streams = create_random_streams(range(len(QUESTIONS)))
        return propose_sampled(sampling, streams) if sampling else propose_most_likely(1, n_end_tokens=1)

    # Each token of the longest answer is the end token of one search, so that answers have many lengths.
    prefilled = generator.prefill(contexts)
    (longest, *_), *_ = beam_search(generator, prefilled, prior, settings, propose(), n_answers=1)
    for end in {generator.end_token, *longest.tokens}:
        ending_generator = replace(generator, end_tokens=frozenset({end}))  # type: ignore[type-var]
        expected = beam_search(ending_generator, prefilled, prior, settings, propose(), n_answers=1)
        for block in (1, 3, 8):
            actual = search_greedily(ending_generator, prefilled, prior, settings, propose(), block)
            for (answer,), (reference,) in zip(actual, expected, strict=True):
                assert answer.tokens == reference.tokens
                assert answer.log_p == pytest.approx(reference.log_p, abs=1e-4)
                for shares, other_shares in zip(answer.shares, reference.shares, strict=True):
                    assert shares == pytest.approx(other_shares, abs=1e-4)
