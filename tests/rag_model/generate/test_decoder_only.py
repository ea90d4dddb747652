"""Decoder-only generators: padding on either side, positions, and decoding beside teacher forcing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    set_seed,
)

from rag_model.corpus.records import Passage
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate
from rag_model.generate.transformer import CausalGenerator
from tests.fixtures.tiny_generators import save_llama

QUESTIONS = ["who was it?", "wo"]
ANSWERS = ["the answer is 42", "né 日本"]
TEXTS = [["the capital of x", ""], ["日本 the answer", "of"]]
PASSAGES = [[Passage("1", "1", 1, "A", "", text, 0, 1, "") for text in texts] for texts in TEXTS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalGenerator:
    found = load_generator(save_llama(tmp_path_factory.mktemp("llama"), pad=True), device="cpu")
    assert isinstance(found, CausalGenerator)
    return found


def gpt2(words: int) -> PreTrainedModel:
    """Positions are learnt vectors."""
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=words, **shape))


def bloom(words: int) -> PreTrainedModel:
    """ALiBi: the model counts positions by the mask and takes none."""
    return BloomForCausalLM(BloomConfig(vocab_size=words, hidden_size=32, n_layer=1, n_head=2, initializer_range=0.3))


@pytest.fixture(
    scope="module",
    params=["llama", "chat", "without pad", gpt2, bloom],
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
    found = load_generator(folder, device="cpu")
    assert isinstance(found, CausalGenerator)
    return found


@pytest.fixture
def asked(generator: CausalGenerator) -> tuple[Contexts, Targets, torch.Tensor]:
    contexts, targets = generator.encode_contexts(QUESTIONS, PASSAGES), generator.encode_targets(ANSWERS)
    with torch.no_grad():
        return contexts, targets, generator.logits(contexts, targets)


Asked = tuple[Contexts, Targets, torch.Tensor]


def test_logits_are_those_of_prompt_and_answer_alone(generator: CausalGenerator, asked: Asked) -> None:
    contexts, targets, logits = asked
    assert not contexts.mask.all()
    assert not targets.mask.all()
    for row in range(4):
        prompt = contexts.tokens[row][contexts.mask[row]]
        said = targets.tokens[row // 2][targets.mask[row // 2]]
        with torch.no_grad():
            whole = generator.module(input_ids=torch.cat([prompt, said])[None]).logits[0, len(prompt) - 1 : -1]
        found = logits.flatten(0, 1)[row, : len(said)]
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_padding_on_the_right_is_padding_too(generator: CausalGenerator, asked: Asked) -> None:
    contexts, targets, logits = asked
    order = (~contexts.mask).long().argsort(dim=1, stable=True)
    right = Contexts(contexts.tokens.gather(1, order), contexts.mask.gather(1, order), 2)
    assert right.mask[:, 0].all()
    with torch.no_grad():
        found = generator.logits(right, targets)
    torch.testing.assert_close(found[targets_mask(targets)], logits[targets_mask(targets)], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(generator.prefill(right)[0], logits.flatten(0, 1)[:, 0], atol=1e-4, rtol=1e-4)


def targets_mask(targets: Targets) -> torch.Tensor:
    return targets.mask[:, None].expand(-1, 2, -1)


def test_token_by_token_as_by_teacher_forcing(generator: CausalGenerator, asked: Asked) -> None:
    contexts, targets, logits = asked
    said, mask = targets.tokens.repeat_interleave(2, 0), targets.mask.repeat_interleave(2, 0)
    now, state = generator.prefill(contexts)
    for place in range(said.shape[1]):
        real = mask[:, place]
        torch.testing.assert_close(now[real], logits.flatten(0, 1)[real, place], atol=1e-4, rtol=1e-4)
        now, state = generator.step(state, said[:, place])


@pytest.mark.parametrize("rows", [[3, 0, 0], [2], [1, 0, 3, 2]])
def test_a_choice_of_rows_goes_on_by_itself(generator: CausalGenerator, asked: Asked, rows: list[int]) -> None:
    contexts, targets, logits = asked
    said, expected = targets.tokens.repeat_interleave(2, 0)[:, :4], logits.flatten(0, 1)
    assert targets.mask[:, :4].all()
    _, state = generator.prefill(contexts)
    _, state = generator.step(state, said[:, 0])
    some = generator.select_rows(state, torch.tensor(rows))
    for place in range(1, 3):
        now, some = generator.step(some, said[rows, place])
        torch.testing.assert_close(now, expected[rows, place + 1], atol=1e-4, rtol=1e-4)
    found = generator.extend(state, said[:, 1:3])  # as if nothing had been chosen
    torch.testing.assert_close(found, expected[:, 2:4], atol=1e-4, rtol=1e-4)


def test_an_answer_follows_the_prompt_as_one_text(llama: CausalGenerator) -> None:
    """The blank belongs to the answer: `Answer:` and ` the` are cut as `Answer: the` is."""
    (row,) = llama.encode_contexts(["q"], [[PASSAGES[0][0]]]).tokens
    (said,) = llama.encode_targets(["the"]).tokens
    whole = llama.prompt_template.render("q", PASSAGES[0][0]).text + " the"
    assert [*row.tolist(), *said.tolist()[:-1]] == llama.tokenizer(whole)["input_ids"]


def test_a_chat_is_written_as_its_template_does(tmp_path: Path) -> None:
    generator = load_generator(save_llama(tmp_path, chat=True), device="cpu")
    assert isinstance(generator, CausalGenerator)
    asked = generator.prompt_template.render("who?", PASSAGES[0][0]).text
    words = asked.removeprefix(generator.prompt_template.before).removesuffix(generator.prompt_template.after)
    said = [{"role": "user", "content": words}]
    opened = generator.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert asked == f"{opened}Answer:", "the answer's first word is in the model's mouth"
    assert words.endswith("Question: who?")
    (target,) = generator.encode_targets(["the"]).tokens
    assert generator.tokenizer.decode(target[:-1]) == " the"
    assert generator.decode(target.tolist()) == "the"


def test_an_empty_prompt_is_something_to_begin_with(llama: CausalGenerator) -> None:
    bare = replace(llama, prompt_template=InstructionTemplate("{question}"))
    contexts = bare.encode_contexts(["", "the"], [[PASSAGES[0][0]]] * 2)
    assert contexts.mask.tolist() == [[True], [True]]
    assert torch.isfinite(bare.prefill(contexts)[0]).all()


def test_prompt_and_answer_together_fit_the_model(llama: CausalGenerator) -> None:
    short = replace(llama, max_tokens=60, prompt_template=InstructionTemplate("{text}|{question}", max_answer=20))
    long = [[Passage("1", "1", 1, "", "", "x" * 500, 0, 1, "")]]
    contexts, targets = short.encode_contexts(["y" * 500], long), short.encode_targets(["z" * 500])
    assert contexts.tokens.shape == (1, 40)
    assert targets.tokens.shape == (1, 20)
    assert targets.tokens[0, -1] == short.end_token
