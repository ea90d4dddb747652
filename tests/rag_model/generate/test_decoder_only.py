"""Decoder-only generators: padding on either side, and decoding that equals teacher forcing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    set_seed,
)

from rag_model.corpus.records import Passage
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.generator import Contexts, Targets, decode_new_text
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate
from rag_model.generate.rag_decoding import decode_token
from rag_model.generate.transformer import CausalGenerator
from tests.fixtures.tiny import write_json
from tests.fixtures.tiny_generators import save_llama

TeacherForcing = tuple[Contexts, Targets, torch.Tensor]  # with the logits
QUESTIONS = ["who was it?", "wo"]
ANSWERS = ["the answer is 42", "né 日本"]
TEXTS = [["the capital of x", ""], ["日本 the answer", "of"]]
PASSAGES = [[Passage("1", "1", 1, "A", "", text, 0, 1, "") for text in texts] for texts in TEXTS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalGenerator:
    generator = load_generator(save_llama(tmp_path_factory.mktemp("llama"), pad=True), device="cpu")
    assert isinstance(generator, CausalGenerator)
    return generator


def build_gpt2(words: int) -> PreTrainedModel:
    """Return a model whose positions are learned vectors."""
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=words, **shape))


def build_bloom(words: int) -> PreTrainedModel:
    """Return a model with ALiBi, which counts positions by the mask and takes none."""
    return BloomForCausalLM(BloomConfig(vocab_size=words, hidden_size=32, n_layer=1, n_head=2, initializer_range=0.3))


@pytest.fixture(
    scope="module",
    params=["llama", "chat", "without pad", build_gpt2, build_bloom],
    ids=["llama", "chat", "without pad", "gpt2", "bloom"],
)
def generator(
    request: pytest.FixtureRequest, llama: CausalGenerator, tmp_path_factory: pytest.TempPathFactory
) -> CausalGenerator:
    if callable(request.param):
        set_seed(1)
        build: Callable[[int], PreTrainedModel] = request.param
        return replace(llama, module=build(llama.vocabulary_size).eval())
    if request.param == "llama":
        return llama
    folder = save_llama(tmp_path_factory.mktemp("llama"), chat=request.param == "chat")
    causal = load_generator(folder, device="cpu")
    assert isinstance(causal, CausalGenerator)
    return causal


@pytest.fixture
def teacher_forcing(generator: CausalGenerator) -> TeacherForcing:
    contexts, targets = generator.encode_contexts(QUESTIONS, PASSAGES), generator.encode_targets(ANSWERS)
    with torch.no_grad():
        return contexts, targets, generator.logits(contexts, targets)


def test_logits_equal_those_of_a_single_prompt_and_answer(
    generator: CausalGenerator, teacher_forcing: TeacherForcing
) -> None:
    contexts, targets, logits = teacher_forcing
    assert not contexts.mask.all()
    assert not targets.mask.all()
    for row in range(4):
        prompt = contexts.tokens[row][contexts.mask[row]]
        answer = targets.tokens[row // 2][targets.mask[row // 2]]
        with torch.no_grad():
            expected = generator.module(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        actual = logits.flatten(0, 1)[row, : len(answer)]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_padding_may_be_on_the_right(generator: CausalGenerator, teacher_forcing: TeacherForcing) -> None:
    contexts, targets, logits = teacher_forcing
    order = (~contexts.mask).long().argsort(dim=1, stable=True)
    right_padded = Contexts(contexts.tokens.gather(1, order), contexts.mask.gather(1, order), 2)
    assert right_padded.mask[:, 0].all()
    with torch.no_grad():
        actual = generator.logits(right_padded, targets)
    torch.testing.assert_close(actual[expand_mask(targets)], logits[expand_mask(targets)], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(generator.prefill(right_padded)[0], logits.flatten(0, 1)[:, 0], atol=1e-4, rtol=1e-4)


def expand_mask(targets: Targets) -> torch.Tensor:
    return targets.mask[:, None].expand(-1, 2, -1)


def test_steps_equal_teacher_forcing(generator: CausalGenerator, teacher_forcing: TeacherForcing) -> None:
    contexts, targets, logits = teacher_forcing
    answers, mask = targets.tokens.repeat_interleave(2, 0), targets.mask.repeat_interleave(2, 0)
    current, state = generator.prefill(contexts)
    for step in range(answers.shape[1]):
        is_token = mask[:, step]
        torch.testing.assert_close(current[is_token], logits.flatten(0, 1)[is_token, step], atol=1e-4, rtol=1e-4)
        current, state = generator.step(state, answers[:, step])


@pytest.mark.parametrize("rows", [[3, 0, 0], [2], [1, 0, 3, 2]])
def test_selected_rows_continue_independently(
    generator: CausalGenerator, teacher_forcing: TeacherForcing, rows: list[int]
) -> None:
    contexts, targets, logits = teacher_forcing
    answers, expected = targets.tokens.repeat_interleave(2, 0)[:, :4], logits.flatten(0, 1)
    assert targets.mask[:, :4].all()
    _, state = generator.prefill(contexts)
    _, state = generator.step(state, answers[:, 0])
    selected = generator.select_rows(state, torch.tensor(rows))
    for step in range(1, 3):
        current, selected = generator.step(selected, answers[rows, step])
        torch.testing.assert_close(current, expected[rows, step + 1], atol=1e-4, rtol=1e-4)
    extended = generator.extend(state, answers[:, 1:3])  # selecting rows does not change the state
    torch.testing.assert_close(extended, expected[:, 2:4], atol=1e-4, rtol=1e-4)


def test_answer_continues_the_text_of_the_prompt(llama: CausalGenerator) -> None:
    """The space belongs to the answer: the tokens of `Answer:` and ` the` are those of `Answer: the`."""
    (row,) = llama.encode_contexts(["q"], [[PASSAGES[0][0]]]).tokens
    (answer,) = llama.encode_targets(["the"]).tokens
    text = llama.prompt_template.render("q", PASSAGES[0][0]).text + " the"
    assert [*row.tolist(), *answer.tolist()[:-1]] == llama.tokenizer(text)["input_ids"]


def test_chat_prompt_equals_the_chat_template(tmp_path: Path) -> None:
    generator = load_generator(save_llama(tmp_path, chat=True), device="cpu")
    assert isinstance(generator, CausalGenerator)
    prompt = generator.prompt_template.render("who?", PASSAGES[0][0]).text
    message = prompt.removeprefix(generator.prompt_template.before).removesuffix(generator.prompt_template.after)
    messages = [{"role": "user", "content": message}]
    expected = generator.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == f"{expected}Answer:", "the reply of the model begins with `Answer:`"
    assert message.endswith("Question: who?")
    (target,) = generator.encode_targets(["the"]).tokens
    assert generator.tokenizer.decode(target[:-1]) == " the"
    assert generator.decode(target.tolist()) == "the"


def test_empty_prompt_has_one_token(llama: CausalGenerator) -> None:
    question_only = replace(llama, prompt_template=InstructionTemplate("{question}"))
    contexts = question_only.encode_contexts(["", "the"], [[PASSAGES[0][0]]] * 2)
    assert contexts.mask.tolist() == [[True], [True]]
    assert torch.isfinite(question_only.prefill(contexts)[0]).all()


def test_prompt_and_answer_together_fit_the_model(llama: CausalGenerator) -> None:
    short = replace(llama, max_tokens=60, prompt_template=InstructionTemplate("{text}|{question}", max_answer=20))
    long = [[Passage("1", "1", 1, "", "", "x" * 500, 0, 1, "")]]
    contexts, targets = short.encode_contexts(["y" * 500], long), short.encode_targets(["z" * 500])
    assert contexts.tokens.shape == (1, 40)
    assert targets.tokens.shape == (1, 20)
    assert targets.tokens[0, -1] == short.end_token


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_end_at_every_end_token_of_the_generation_config(tmp_path: Path, beams: int) -> None:
    folder = save_llama(tmp_path, pad=True)
    end_tokens = [0, 3, *range(20, 60)]  # 3 is the pad token; the tokens from 20 are ordinary letters
    write_json(folder / "generation_config.json", {"eos_token_id": end_tokens, "pad_token_id": 3})
    generator: Any = load_generator(folder, device="cpu")
    assert generator.end_tokens == {*end_tokens}
    bias = torch.zeros(generator.vocabulary_size).index_fill(0, torch.tensor(end_tokens), 2.0)
    generator.module.lm_head.register_forward_hook(lambda head, inputs, logits: logits + bias)
    questions = ["who was it?", "the answer of", "was the capital in", "x", "of and"]
    contexts = generator.encode_contexts(questions, [[Passage("", "", 1, "T", "", "", 0, 1, "")]] * len(questions))
    settings = DecodingSettings(beams=beams, max_new_tokens=9, length_penalty=2.0)
    answers = decode_token(generator, contexts, torch.zeros(len(questions), 1), settings, range(len(questions)))
    options = {"length_penalty": 2.0, "early_stopping": "never"} if beams > 1 else {}
    rows = generator.module.generate(
        input_ids=contexts.tokens,
        attention_mask=contexts.mask.long(),
        do_sample=False,
        num_beams=beams,
        max_new_tokens=9,
        **options,
    )[:, contexts.tokens.shape[1] :]
    for answer, row in zip(answers, rows.tolist(), strict=True):
        assert [*answer.tokens, *[3] * (len(row) - len(answer.tokens))] == row
        text_tokens = [token for token in answer.tokens if token not in end_tokens]
        assert len(text_tokens) >= len(answer.tokens) - 1
        assert generator.decode(answer.tokens) == generator.tokenizer.decode(text_tokens).strip()
    assert any(answer.tokens[-1] in end_tokens for answer in answers)


def test_streamed_text_is_complete_if_tokenizer_cleans_up_spaces(tmp_path: Path) -> None:
    text = "He said 'some day' and 'read 2 . 5'"
    settings_file = save_llama(tmp_path) / "tokenizer_config.json"
    write_json(settings_file, {**json.loads(settings_file.read_text()), "clean_up_tokenization_spaces": True})
    assert stream_text(tmp_path, text) == (text, text)
    # This decoder changes the text of earlier tokens in every case.
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Replace(" 's", "'s")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert stream_text(tmp_path, text) == ("He said ''some day' and 'read 2 . 5'", "He said'some day' and 'read 2 . 5'")


def stream_text(folder: Path, text: str) -> tuple[str, str]:
    """Return the text that is streamed token by token, and that of the whole answer."""
    generator: Any = load_generator(folder, device="cpu")
    tokens, emitted = generator.tokenizer(text)["input_ids"], ""
    for n_tokens in range(1, len(tokens) + 1):
        emitted += decode_new_text(generator, tokens[:n_tokens], emitted, is_last=n_tokens == len(tokens))
    return emitted, generator.decode(tokens)
