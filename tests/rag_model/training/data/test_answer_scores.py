"""Scores that a generator gives to answers: equal to those of transformers, and computed once for all runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rag_model.errors import InputError
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate, PaperTemplate
from rag_model.store.objects.memo import ResultNotRecordedError
from rag_model.store.recorded_tasks import OnProgress, compute_once
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import (
    BLOCK_SIZE,
    PLAIN_TEXT_PROMPT,
    ScoringExample,
    put_generator,
    score_answers,
    score_example,
    with_plain_text_prompt,
)
from rag_model.training.data.blocks import ScoreBlock
from tests.fixtures.tiny_generators import save_bart, save_gguf, save_llama

PASSAGES = (("York", "the king was born in york."), ("", "who?"), ("Oslo", "the answer is in oslo, " * 9))
READING = ScoringExample("q1", "who was king?", "the king of oslo", PASSAGES)
PLAIN = replace(READING, id="text", text="the king of", answer=" the capital was", is_plain_text=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def sum_log_p_by_loss(folder: Path, prompt: str, answer: list[int]) -> float:
    """Return the log-probability of the answer's tokens after the prompt, from the loss that transformers computes."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt_tokens = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([[*prompt_tokens, *answer]])
    labels = torch.tensor([[*[-100] * len(prompt_tokens), *answer]])
    with torch.no_grad():
        return -float(model(input_ids=ids, labels=labels).loss) * len(answer)


def test_scores_equal_those_of_transformers(llama: Path) -> None:
    generator: Any = load_generator(llama, device="cpu")
    tokens = generator.tokenizer(" the king of oslo", add_special_tokens=False)["input_ids"]
    scores = score_example(generator, READING)
    assert scores.n_tokens == len(tokens) + 1, "the end token is scored too"
    for (title, text), log_p in zip(PASSAGES[:2], scores.log_p[:2], strict=True):
        prompt = InstructionTemplate().template.format(title=title, text=text, question=READING.text)
        assert log_p == pytest.approx(sum_log_p_by_loss(llama, prompt, [*tokens, generator.end_token]), abs=1e-3)


def test_plain_text_is_scored_without_an_end_token(llama: Path) -> None:
    generator: Any = load_generator(llama, device="cpu")
    tokens = generator.tokenizer(PLAIN.answer, add_special_tokens=False)["input_ids"]
    scores = score_example(generator, PLAIN)
    assert scores.n_tokens == len(tokens)
    title, text = PASSAGES[0]
    prompt = PLAIN_TEXT_PROMPT.format(title=title, text=text, question=PLAIN.text)
    assert scores.log_p[0] == pytest.approx(sum_log_p_by_loss(llama, prompt, tokens), abs=1e-3)
    bart = load_generator(llama.parent / save_bart(llama.parent / "bart"), PaperTemplate(), device="cpu")
    assert with_plain_text_prompt(bart) is bart
    assert score_example(bart, PLAIN).n_tokens == score_example(bart, replace(PLAIN, is_plain_text=False)).n_tokens - 1


def test_recorded_block_is_not_scored_again(store: Store, llama: Path) -> None:
    generator: Any = load_generator(llama, device="cpu")
    readings = [replace(READING, id=f"q{n}", text=f"who was king {n}?") for n in range(BLOCK_SIZE + 3)]
    messages = list[tuple[int, int]]()
    scores = score_answers(store, lambda: generator, "a", readings, on_progress=lambda *counts: messages.append(counts))
    assert messages == [(1, 2), (2, 2)]
    assert scores == [score_example(generator, reading) for reading in readings]

    def fail_to_load() -> Any:
        raise AssertionError("all blocks are recorded, so the generator is not needed")

    assert score_answers(store, fail_to_load, "a", readings) == scores
    store.memo = replace(store.memo, can_produce=False)
    for identity, other_readings in (
        ("a", [replace(READING, answer="x")]),
        ("a", [replace(READING, passages=PASSAGES[:2])]),
        ("a", [replace(READING, is_plain_text=True)]),
        ("b", readings),
    ):
        with pytest.raises(ResultNotRecordedError):
            score_answers(store, lambda: generator, identity, other_readings)


def test_given_scorer_computes_the_blocks(store: Store, llama: Path) -> None:
    generator: Any = load_generator(llama, device="cpu")
    calls = list[ScoreBlock]()

    def scorer(tasks: Sequence[ScoreBlock], on_progress: OnProgress) -> list[Mapping[str, Any]]:
        calls.extend(tasks)
        return [compute_once(task, store) for task in tasks]

    expected = [score_example(generator, READING), score_example(generator, PLAIN)]
    assert score_answers(store, lambda: generator, "a", [READING, PLAIN], scorer, cpu=True) == expected
    (task,) = calls
    assert task.contexts == 6
    assert not task.uses_gpu
    assert task.weight_bytes > 4 * sum(weights.numel() for weights in generator.module.parameters())
    assert set(task.inputs()) == {"content", "model", "code", "libraries"}
    assert len(json.dumps(task.inputs())) < 2_000, "the inputs name files and do not contain them"


def test_every_kind_of_generator_can_be_stored_for_workers(store: Store, tmp_path: Path) -> None:
    for name, save in (("bart", save_bart), ("gguf", save_gguf)):
        (tmp_path / name).mkdir()
        generator: Any = load_generator(save(tmp_path / name), device="cpu")
        (scores,) = score_answers(store, lambda loaded=generator: loaded, name, [READING])  # type: ignore[misc]
        assert scores.log_p == pytest.approx(score_example(generator, READING).log_p)
        assert put_generator(store, generator) == put_generator(store, generator)


def test_generator_with_scores_that_are_not_finite_is_refused(store: Store, llama: Path) -> None:
    generator: Any = load_generator(llama, device="cpu")
    with torch.no_grad():
        generator.module.lm_head.weight[3] = torch.nan
    with pytest.raises(InputError, match="the answer of example q1 is not finite"):
        score_answers(store, lambda: generator, "a", [READING])
    assert store.files.list_names("memo/score") == []
