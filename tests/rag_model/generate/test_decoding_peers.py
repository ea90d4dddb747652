"""Decoding, compared with `generate` of transformers' RAG classes on equal random weights.

These classes have errors in 5.23, which is why test_decoding_exact.py compares with brute force:

* `RagTokenForGeneration.generate` ignores `max_new_tokens`, but reads `max_length`, which includes the start token.
* `RagSequenceForGeneration` puts p(z|x) at the second token, so that an answer of one token loses it and passages
  have equal weights (`test_answer_of_one_token_is_weighed_by_the_passages`).
* It generates candidates without the contexts' mask, so that padding is read; contexts here have equal lengths
  (`test_padding_of_a_context_is_not_read`).
* It leaves the first token out of p(y|x) if every candidate begins with `<s>`, although passages differ in it.
* It rescores with `config.n_docs` instead of `n_docs`, so both must be equal.
* With T5 it fails, because it reads `bos_token_id` of a config without one.
* Both can generate the pad token within an answer, so it is suppressed here.
* With a length penalty, a beam stops early by an estimate, unless `early_stopping="never"`.
"""

from typing import Any

import pytest
import torch
from transformers import (
    DPRConfig,
    DPRQuestionEncoder,
    LogitsProcessorList,
    RagSequenceForGeneration,
    RagTokenForGeneration,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rag_model.generate.decoding import DecodingSettings, Sampling, sample_tokens
from rag_model.generate.generator import Contexts, Generator
from rag_model.generate.load import load_generator
from rag_model.generate.rag_decoding import decode_sequence, decode_token
from tests.fixtures.tiny_generators import save_bart, save_t5

B, K, LENGTH = 4, 3, 9
SAVE = {"bart": (save_bart, 4.0), "t5": (save_t5, 0.0)}  # with a bias, most answers of T5 would have one token
DECODE = {"token": decode_token, "sequence": decode_sequence}
CLASSES = {"token": RagTokenForGeneration, "sequence": RagSequenceForGeneration}


@pytest.fixture(scope="module", params=["bart", "t5"])
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    save, bias = SAVE[request.param]
    generator = load_generator(save(tmp_path_factory.mktemp(request.param)), device="cpu")
    end_more_often(generator, bias)
    return generator


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return load_generator(save_bart(tmp_path_factory.mktemp("bart")), device="cpu")


def end_more_often(generator: Generator, amount: float) -> None:
    """Raise the logit of the end token, because few answers of random weights end."""
    bias = torch.zeros(generator.vocabulary_size)
    bias[generator.end_token] = amount
    generator.module.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: logits + bias)


def draw_inputs(seed: int, shortest: int = 7) -> tuple[Contexts, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, 200, (B * K, 7), generator=stream)
    mask = torch.arange(7) < torch.randint(shortest, 8, (B * K, 1), generator=stream)
    return Contexts(tokens, mask, K), torch.randn(B, K, generator=stream) * 2


def generate_with_transformers(
    kind: str, generator: Generator, contexts: Contexts, scores: torch.Tensor, **options: Any
) -> list[list[int]]:
    """Return the tokens that transformers generates, without the start token and padding."""
    start = generator.module.config.decoder_start_token_id
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    encoder = DPRQuestionEncoder(DPRConfig(vocab_size=8, **shape))
    model = CLASSES[kind](question_encoder=encoder, generator=generator.module, n_docs=contexts.k)
    model.config.bos_token_id = -1  # T5's config has none, but both classes read it
    tokens = model.eval().generate(
        context_input_ids=contexts.tokens.where(contexts.mask, generator.pad_token),
        context_attention_mask=contexts.mask.long(),
        doc_scores=scores,
        suppress_tokens=[generator.pad_token],
        decoder_start_token_id=start,
        eos_token_id=generator.end_token,
        pad_token_id=generator.pad_token,
        bos_token_id=None,
        **options,
    )
    return [truncate(row[1:], generator.end_token) for row in tokens.tolist()]


def truncate(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(("beams", "penalty"), [(1, 0.0), (2, 0.0), (4, 0.0), (4, 1.0), (3, -0.5)])
def test_answers_equal_transformers(generator: Generator, kind: str, beams: int, penalty: float) -> None:
    ended_count = 0
    for seed in range(2):
        contexts, scores = draw_inputs(seed, shortest=4 if kind == "token" else 7)
        settings = DecodingSettings(beams=beams, max_new_tokens=LENGTH, length_penalty=penalty)
        options: dict[str, Any] = {"length_penalty": penalty, "early_stopping": "never"} if beams > 1 else {}
        actual = DECODE[kind](generator, contexts, scores.log_softmax(-1), settings, range(B))
        options |= {"num_beams": beams, "max_length": LENGTH + 1}
        expected = generate_with_transformers(kind, generator, contexts, scores, **options)
        assert [list(answer.tokens) for answer in actual] == expected
        ended_count += sum(len(answer.tokens) < LENGTH for answer in actual)
    assert ended_count or generator.first_token is None, "some answers of BART end"


def test_answer_of_one_token_is_weighed_by_the_passages(bart: Generator) -> None:
    contexts, _ = draw_inputs(0)
    scores = torch.tensor([[0.0, 0.0, 12.0]] * B)  # only the last passage has weight
    settings = DecodingSettings(beams=2, max_new_tokens=1)
    actual = decode_sequence(bart, contexts, scores.log_softmax(-1), settings, range(B))
    last_passages = Contexts(contexts.tokens[K - 1 :: K], contexts.mask[K - 1 :: K], 1)
    expected = decode_sequence(bart, last_passages, torch.zeros(B, 1), settings, range(B))
    assert [answer.tokens for answer in actual] == [answer.tokens for answer in expected]


def test_padding_of_a_context_is_not_read(bart: Generator) -> None:
    contexts, scores = draw_inputs(0, shortest=4)
    padded_contexts = Contexts(
        torch.nn.functional.pad(contexts.tokens, (0, 5), value=bart.pad_token),
        torch.nn.functional.pad(contexts.mask, (0, 5)),
        K,
    )
    settings = DecodingSettings(beams=2, max_new_tokens=LENGTH)
    unpadded, padded = (
        [answer.tokens for answer in decode_sequence(bart, each, scores.log_softmax(-1), settings, range(B))]
        for each in (contexts, padded_contexts)
    )
    assert padded == unpadded


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(top_k=5), Sampling(top_p=0.6), Sampling(1.3, 20, 0.8)])
def test_tokens_are_sampled_from_the_distribution_of_transformers(sampling: Sampling) -> None:
    log_p = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature), TopPLogitsWarper(sampling.top_p)])
    if sampling.top_k:
        warpers.insert(1, TopKLogitsWarper(sampling.top_k))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), log_p).softmax(-1)[0]
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    sampled = sample_tokens(log_p.expand(len(numbers), -1), sampling, numbers)
    torch.testing.assert_close(sampled.bincount(minlength=50) / len(numbers), expected, atol=1e-4, rtol=0)
