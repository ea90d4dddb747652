"""Encoder-decoder generators: decoding token by token equals teacher forcing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rag_model.corpus.records import Passage
from rag_model.generate.generator import Contexts, Generator, Targets
from rag_model.generate.load import load_generator
from tests.fixtures.tiny_generators import save_bart, save_t5

TeacherForcing = tuple[Contexts, Targets, torch.Tensor]  # with the logits
QUESTIONS = ["who was it?", "wo"]
ANSWERS = ["the answer is 42", "né 日本"]
FAMILIES = [save_bart, save_t5]


def passage(title: str, text: str) -> Passage:
    return Passage("1-0", "1", 1, title, "", text, 0, len(text.split()), Passage.hash_of(title, text))


PASSAGES = [
    [passage("A", "the capital of x"), passage("", ""), passage("C", "of a")],
    [passage("Bé", "日本 the answer"), passage("D", "of"), passage("E", "in the and")],
]


@pytest.fixture(scope="module", params=FAMILIES, ids=["bart", "t5"])
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    save: Callable[[Path], Path] = request.param
    return load_generator(save(tmp_path_factory.mktemp("generator")), device="cpu")


@pytest.fixture
def teacher_forcing(generator: Generator) -> TeacherForcing:
    contexts, targets = generator.encode_contexts(QUESTIONS, PASSAGES), generator.encode_targets(ANSWERS)
    with torch.no_grad():
        return contexts, targets, generator.logits(contexts, targets)


def test_shapes_of_contexts_targets_and_logits(generator: Generator, teacher_forcing: TeacherForcing) -> None:
    contexts, targets, logits = teacher_forcing
    assert contexts.k == 3
    assert len(contexts.tokens) == 6
    assert logits.shape == (2, 3, targets.tokens.shape[1], generator.vocabulary_size)
    assert [row[mask][-1] for row, mask in zip(targets.tokens, targets.mask, strict=True)] == [generator.end_token] * 2
    assert {int(row[0]) for row in targets.tokens} == {generator.first_token} or generator.first_token is None


def test_encoded_answers_decode_to_their_text(generator: Generator) -> None:
    targets = generator.encode_targets(ANSWERS)
    for answer, tokens, mask in zip(ANSWERS, targets.tokens, targets.mask, strict=True):
        assert generator.decode(tokens[mask].tolist()) == answer


def test_padding_does_not_change_logits(generator: Generator, teacher_forcing: TeacherForcing) -> None:
    _, targets, logits = teacher_forcing
    for row in range(2):
        for k in range(3):
            contexts = generator.encode_contexts([QUESTIONS[row]], [[PASSAGES[row][k]]])
            answer = generator.encode_targets([ANSWERS[row]])
            with torch.no_grad():
                expected = generator.logits(contexts, answer)[0, 0]
            torch.testing.assert_close(logits[row, k, targets.mask[row]], expected, atol=1e-4, rtol=1e-4)


def test_steps_equal_teacher_forcing(generator: Generator, teacher_forcing: TeacherForcing) -> None:
    contexts, targets, logits = teacher_forcing
    answers = targets.tokens.repeat_interleave(3, 0)
    current, state = generator.prefill(contexts)
    for step in range(answers.shape[1]):
        torch.testing.assert_close(current, logits.flatten(0, 1)[:, step], atol=1e-4, rtol=1e-4)
        current, state = generator.step(state, answers[:, step])


@pytest.mark.parametrize("rows", [[5, 0, 0, 3], [2], [0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 5, 4]])
def test_selected_rows_continue_independently(
    generator: Generator, teacher_forcing: TeacherForcing, rows: list[int]
) -> None:
    contexts, targets, logits = teacher_forcing
    answers, expected = targets.tokens.repeat_interleave(3, 0), logits.flatten(0, 1)
    _, state = generator.prefill(contexts)
    _, state = generator.step(state, answers[:, 0])
    selected = generator.select_rows(state, torch.tensor(rows))
    for step in range(1, answers.shape[1] - 1):
        unselected, selected = generator.step(selected, answers[rows, step])
        torch.testing.assert_close(unselected, expected[rows, step + 1], atol=1e-4, rtol=1e-4)
    unselected, _ = generator.step(state, answers[:, 1])  # selecting rows does not change the state
    torch.testing.assert_close(unselected, expected[:, 2], atol=1e-4, rtol=1e-4)


def test_rows_of_one_context_can_be_swapped(generator: Generator, teacher_forcing: TeacherForcing) -> None:
    contexts, _, _ = teacher_forcing
    words = generator.encode_targets(["the answer", "who is it"]).tokens[:, :4]
    first = generator.encode_contexts(QUESTIONS[:1], [PASSAGES[0][:1]])
    _, state = generator.prefill(contexts)
    state = generator.select_rows(state, torch.tensor([0, 0]))
    for step in range(3):
        _, state = generator.step(state, words[:, step])
    swapped, _ = generator.step(generator.select_rows(state, torch.tensor([1, 0])), words[[1, 0], 3])
    targets = Targets(torch.cat([words, words[:, :1]], 1), torch.ones(2, 5, dtype=torch.bool))
    for row in range(2):
        target = Targets(targets.tokens[row : row + 1], targets.mask[row : row + 1])
        with torch.no_grad():
            expected = generator.logits(first, target)[0, 0, 4]
        torch.testing.assert_close(swapped[1 - row], expected, atol=1e-4, rtol=1e-4)


def test_extend_equals_teacher_forcing(generator: Generator, teacher_forcing: TeacherForcing) -> None:
    contexts, targets, logits = teacher_forcing
    answers, rows = targets.tokens.repeat_interleave(3, 0), [4, 4, 0]
    _, state = generator.prefill(contexts)
    extended = generator.extend(generator.select_rows(state, torch.tensor(rows)), answers[rows, :-1])
    torch.testing.assert_close(extended, logits.flatten(0, 1)[rows, 1:], atol=1e-4, rtol=1e-4)
