"""Encoder-decoder generators: what they are given, and that decoding token by token says what teacher forcing does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rag_model.corpus.records import Passage
from rag_model.generate.generator import Contexts, Generator, Targets
from rag_model.generate.load import load_generator
from tests.fixtures.tiny_generators import save_bart, save_t5

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
def asked(generator: Generator) -> tuple[Contexts, Targets, torch.Tensor]:
    contexts, targets = generator.encode_contexts(QUESTIONS, PASSAGES), generator.encode_targets(ANSWERS)
    with torch.no_grad():
        return contexts, targets, generator.logits(contexts, targets)


def test_shapes(generator: Generator, asked: tuple[Contexts, Targets, torch.Tensor]) -> None:
    contexts, targets, logits = asked
    assert contexts.k == 3
    assert len(contexts.tokens) == 6
    assert logits.shape == (2, 3, targets.tokens.shape[1], generator.vocabulary_size)
    assert [row[mask][-1] for row, mask in zip(targets.tokens, targets.mask, strict=True)] == [generator.end_token] * 2
    assert {int(row[0]) for row in targets.tokens} == {generator.first_token} or generator.first_token is None


def test_every_text_comes_back(generator: Generator) -> None:
    for answer, tokens, mask in zip(ANSWERS, *vars_of(generator.encode_targets(ANSWERS)), strict=True):
        assert generator.decode(tokens[mask].tolist()) == answer


def vars_of(targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    return targets.tokens, targets.mask


def test_padding_changes_nothing(generator: Generator, asked: tuple[Contexts, Targets, torch.Tensor]) -> None:
    _, targets, logits = asked
    for row in range(2):
        for place in range(3):
            alone = generator.encode_contexts([QUESTIONS[row]], [[PASSAGES[row][place]]])
            said = generator.encode_targets([ANSWERS[row]])
            with torch.no_grad():
                expected = generator.logits(alone, said)[0, 0]
            torch.testing.assert_close(logits[row, place, targets.mask[row]], expected, atol=1e-4, rtol=1e-4)


def test_token_by_token_as_by_teacher_forcing(
    generator: Generator, asked: tuple[Contexts, Targets, torch.Tensor]
) -> None:
    contexts, targets, logits = asked
    said = targets.tokens.repeat_interleave(3, 0)
    now, state = generator.prefill(contexts)
    for place in range(said.shape[1]):
        torch.testing.assert_close(now, logits.flatten(0, 1)[:, place], atol=1e-4, rtol=1e-4)
        now, state = generator.step(state, said[:, place])


@pytest.mark.parametrize("rows", [[5, 0, 0, 3], [2], [0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 5, 4]])
def test_a_choice_of_rows_goes_on_by_itself(
    generator: Generator, asked: tuple[Contexts, Targets, torch.Tensor], rows: list[int]
) -> None:
    contexts, targets, logits = asked
    said, expected = targets.tokens.repeat_interleave(3, 0), logits.flatten(0, 1)
    _, state = generator.prefill(contexts)
    _, state = generator.step(state, said[:, 0])
    some = generator.select_rows(state, torch.tensor(rows))
    for place in range(1, said.shape[1] - 1):
        now, some = generator.step(some, said[rows, place])
        torch.testing.assert_close(now, expected[rows, place + 1], atol=1e-4, rtol=1e-4)
    now, _ = generator.step(state, said[:, 1])  # as if nothing had been chosen
    torch.testing.assert_close(now, expected[:, 2], atol=1e-4, rtol=1e-4)


def test_rows_of_one_context_change_places(generator: Generator, asked: tuple[Contexts, Targets, torch.Tensor]) -> None:
    contexts, _, _ = asked
    words = generator.encode_targets(["the answer", "who is it"]).tokens[:, :4]
    first = generator.encode_contexts(QUESTIONS[:1], [PASSAGES[0][:1]])
    _, state = generator.prefill(contexts)
    state = generator.select_rows(state, torch.tensor([0, 0]))
    for place in range(3):
        _, state = generator.step(state, words[:, place])
    swapped, _ = generator.step(generator.select_rows(state, torch.tensor([1, 0])), words[[1, 0], 3])
    targets = Targets(torch.cat([words, words[:, :1]], 1), torch.ones(2, 5, dtype=torch.bool))
    for row in range(2):
        said = Targets(targets.tokens[row : row + 1], targets.mask[row : row + 1])
        with torch.no_grad():
            expected = generator.logits(first, said)[0, 0, 4]
        torch.testing.assert_close(swapped[1 - row], expected, atol=1e-4, rtol=1e-4)


def test_whole_continuations_are_followed_in_one_pass(
    generator: Generator, asked: tuple[Contexts, Targets, torch.Tensor]
) -> None:
    contexts, targets, logits = asked
    said, rows = targets.tokens.repeat_interleave(3, 0), [4, 4, 0]
    _, state = generator.prefill(contexts)
    found = generator.extend(generator.select_rows(state, torch.tensor(rows)), said[rows, :-1])
    torch.testing.assert_close(found, logits.flatten(0, 1)[rows, 1:], atol=1e-4, rtol=1e-4)
