"""Decoding beside `generate` of transformers' RAG classes, on the same random weights, where those are right.

Where they are not (5.23), which is why brute force judges the rest (test_decoding_exact.py):

* `RagTokenForGeneration.generate` does not read `max_new_tokens`; `max_length`, with the start token, is read.
* `RagSequenceForGeneration` puts p(z|x) at the second token: it is lost where an answer has one, and passages then
  weigh the same (`test_an_answer_of_one_token_is_weighed_by_the_passages`).
* It draws candidates without the contexts' mask, so that they read what fills up; their lengths are equal here
  (`test_what_fills_up_a_context_is_not_read`).
* It leaves the first token out of p(y|x) where every candidate begins with `<s>`, though passages differ in it too.
* It does not pass `n_docs` on when it rescores, so that `config.n_docs` must be equal.
* Over T5 it asks a config for `bos_token_id` that has none, and ends.
* Both may say the pad token within an answer; it is suppressed here.
* With a length penalty a beam stops early by a guess, unless `early_stopping="never"`.
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
SAVE = {"bart": (save_bart, 4.0), "t5": (save_t5, 0.0)}  # of T5's, most would be one token, or none end
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


def end_more_often(generator: Generator, more: float) -> None:
    """Raise the end token's logit: of random weights hardly any answer would end."""
    bias = torch.zeros(generator.vocabulary_size)
    bias[generator.end_token] = more
    generator.module.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: logits + bias)


def asked(seed: int, shortest: int = 7) -> tuple[Contexts, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, 200, (B * K, 7), generator=stream)
    mask = torch.arange(7) < torch.randint(shortest, 8, (B * K, 1), generator=stream)
    return Contexts(tokens, mask, K), torch.randn(B, K, generator=stream) * 2


def theirs(
    kind: str, generator: Generator, contexts: Contexts, scores: torch.Tensor, **options: Any
) -> list[list[int]]:
    """Return the tokens that transformers' class says, without the start token and what fills up."""
    start = generator.module.config.decoder_start_token_id
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    encoder = DPRQuestionEncoder(DPRConfig(vocab_size=8, **shape))
    model = CLASSES[kind](question_encoder=encoder, generator=generator.module, n_docs=contexts.k)
    model.config.bos_token_id = -1  # of a T5's config they ask for one, which it does not have; none says this
    found = model.eval().generate(
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
    return [cut(row[1:], generator.end_token) for row in found.tolist()]


def cut(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(("beams", "penalty"), [(1, 0.0), (2, 0.0), (4, 0.0), (4, 1.0), (3, -0.5)])
def test_answers_are_those_of_transformers(generator: Generator, kind: str, beams: int, penalty: float) -> None:
    ended = 0
    for seed in range(3):
        contexts, scores = asked(seed, shortest=4 if kind == "token" else 7)
        how = DecodingSettings(beams=beams, max_new_tokens=LENGTH, length_penalty=penalty)
        options = {"length_penalty": penalty, "early_stopping": "never"} if beams > 1 else {}
        actual = DECODE[kind](generator, contexts, scores.log_softmax(-1), how, range(B))
        expected = theirs(kind, generator, contexts, scores, num_beams=beams, max_length=LENGTH + 1, **options)
        assert [list(one.tokens) for one in actual] == expected
        ended += sum(len(one.tokens) < LENGTH for one in actual)
    assert ended or generator.first_token is None  # BART's


def test_an_answer_of_one_token_is_weighed_by_the_passages(bart: Generator) -> None:
    contexts, _ = asked(0)
    scores = torch.tensor([[0.0, 0.0, 12.0]] * B)  # all but the last passage's say counts for nothing
    how = DecodingSettings(beams=2, max_new_tokens=1)
    actual = decode_sequence(bart, contexts, scores.log_softmax(-1), how, range(B))
    last = Contexts(contexts.tokens[K - 1 :: K], contexts.mask[K - 1 :: K], 1)
    alone = decode_sequence(bart, last, torch.zeros(B, 1), how, range(B))
    assert [one.tokens for one in actual] == [one.tokens for one in alone]


def test_what_fills_up_a_context_is_not_read(bart: Generator) -> None:
    contexts, scores = asked(0, shortest=4)
    wider = Contexts(
        torch.nn.functional.pad(contexts.tokens, (0, 5), value=bart.pad_token),
        torch.nn.functional.pad(contexts.mask, (0, 5)),
        K,
    )
    how = DecodingSettings(beams=2, max_new_tokens=LENGTH)
    narrow, padded = (
        [one.tokens for one in decode_sequence(bart, one, scores.log_softmax(-1), how, range(B))]
        for one in (contexts, wider)
    )
    assert padded == narrow


@pytest.mark.parametrize("setting", [Sampling(0.7), Sampling(top_k=5), Sampling(top_p=0.6), Sampling(1.3, 20, 0.8)])
def test_tokens_are_drawn_from_what_transformers_leaves(setting: Sampling) -> None:
    log_p = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting.temperature), TopPLogitsWarper(setting.top_p)])
    if setting.top_k:
        warpers.insert(1, TopKLogitsWarper(setting.top_k))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), log_p).softmax(-1)[0]
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    found = sample_tokens(log_p.expand(len(numbers), -1), setting, numbers)
    torch.testing.assert_close(found.bincount(minlength=50) / len(numbers), expected, atol=1e-4, rtol=0)
