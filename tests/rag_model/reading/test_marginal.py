"""Answers with their provenance: over a small shelf of passages, by generators small enough to check by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rag_model.corpus.records import Passage
from rag_model.errors import StoppedError, UsageError
from rag_model.generate.decoding import DecodingSettings, Sampling
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate
from rag_model.generate.rag import Rag, RagSettings, Variant
from rag_model.reading.answer import CLOSED_BOOK, Answer
from rag_model.reading.confidence import add_closed_book
from rag_model.reading.marginal import MarginalReader
from rag_model.reading.reader import AnswerCallbacks
from rag_model.retrieve.hits import Hit
from tests.fixtures.table_generator import TabledGenerator
from tests.fixtures.tiny_generators import save_bart, save_llama

QUESTIONS = ["who wrote it", "Wer schrieb das Buch?", "誰が書いたか 🐋", "z" * 500]
SHORT = DecodingSettings(max_new_tokens=6)


def passage(title: str, text: str) -> Passage:
    return Passage(title, "1", 1, title, "", text, 0, len(text.split()), Passage.hash_of(title, text))


class Shelf:
    """A retriever over a few passages: the more letters they share with the question, the better."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        if k > len(self.passages):
            raise UsageError(f"k is {k} but there are {len(self.passages)} passages")
        return [self._ranked(question)[:k] for question in questions]

    def _ranked(self, question: str) -> list[Hit]:
        def score(row: int) -> float:
            return len(set(question) & set(self.passages[row].text)) / 4

        order = sorted(range(len(self.passages)), key=score, reverse=True)
        return [
            Hit(rank, -rank, row, self.passages[row], "", "", inner_product=score(row))  # as a fused list's scores do
            for rank, row in enumerate(order, start=1)
        ]


SHELF = Shelf(
    [passage("Whale", "a book of the sea"), passage("", ""), passage("東京", "首都 🗼 of Japan"), passage("City", "w")]
)


def reader(
    kind: str, decoding: DecodingSettings = SHORT, batch: int = 8, seed: int = 4, temperature: float = 1.0
) -> MarginalReader:
    settings = RagSettings(kind=kind, k=3, temperature=temperature)  # type: ignore[arg-type]
    return MarginalReader(SHELF, Rag(nn.Identity(), TabledGenerator(seed, end_bias=1.0), settings), decoding, batch)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_an_answer_names_its_passages_and_how_they_weigh(kind: str) -> None:
    hits = SHELF.search(QUESTIONS, 3)
    for question, answer, found in zip(QUESTIONS, reader(kind, temperature=0.5).answer(QUESTIONS), hits, strict=True):
        assert answer.question == question
        assert [one.hit for one in answer.support] == found
        total = sum(math.exp((hit.inner_product or 0) / 0.5) for hit in found)
        assert [one.weight for one in answer.support] == pytest.approx(
            [math.exp((hit.inner_product or 0) / 0.5) / total for hit in found], abs=1e-6
        )
        assert sum(one.posterior for one in answer.support) == pytest.approx(1, abs=1e-5)
        assert answer.log_likelihood < 0


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_likelihood_and_posterior_are_those_that_the_model_gives_the_answer(kind: str) -> None:
    """Decoding and teacher forcing are two ways to the same numbers."""
    asked = reader(kind)
    hits = SHELF.search(QUESTIONS, 3)
    for answer, found in zip(asked.answer(QUESTIONS), hits, strict=True):
        assert answer.ended
        generator = asked.rag.generator
        contexts = generator.encode_contexts([answer.question], [[hit.passage for hit in found]])
        scores = torch.tensor([[hit.inner_product for hit in found]])
        likelihood = asked.rag.log_likelihood(scores, contexts, generator.encode_targets([answer.text]))
        assert answer.log_likelihood == pytest.approx(float(likelihood.log_p), abs=1e-5)
        expected = likelihood.posterior[0].exp().tolist()
        assert [one.posterior for one in answer.support] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_given_answers_are_as_likely_as_when_they_were_found(kind: str) -> None:
    asked = reader(kind, batch=2)
    hits = SHELF.search(QUESTIONS, 3)
    hits[1] = hits[1][:1]  # as many as were found
    hits[2] = []  # closed book
    answers = asked.answer_from(QUESTIONS, hits)
    found = asked.log_likelihood(QUESTIONS, hits, [answer.text for answer in answers])
    assert found == pytest.approx([answer.log_likelihood for answer in answers], abs=1e-5)
    closed = asked.log_likelihood(QUESTIONS, [[]] * 4, [answer.text for answer in answers])
    assert [one.closed_book for one in add_closed_book(asked, answers)] == pytest.approx(closed, abs=1e-5)
    assert closed[2] == pytest.approx(answers[2].log_likelihood, abs=1e-5)
    with pytest.raises(UsageError, match="give one list per question"):
        asked.log_likelihood(QUESTIONS, hits[1:], QUESTIONS)


def test_a_token_s_support_is_its_own() -> None:
    for answer in reader("token").answer(QUESTIONS):
        assert "".join(token.text for token in answer.tokens) == answer.text
        mean = [
            sum(column) / len(answer.tokens)
            for column in zip(*(token.posterior for token in answer.tokens), strict=True)
        ]
        assert [one.posterior for one in answer.support] == pytest.approx(mean)
    assert all(not answer.tokens for answer in reader("sequence").answer(QUESTIONS))


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("decoding", [SHORT, replace(SHORT, beams=3), replace(SHORT, sampling=Sampling(seed=7))])
def test_answers_are_the_same_in_any_batch_and_order(kind: str, decoding: DecodingSettings) -> None:
    together = reader(kind, decoding).answer(QUESTIONS)
    backwards = reader(kind, decoding, batch=1).answer(QUESTIONS[::-1])[::-1]
    assert [alike(one) for one in together] == [alike(backward) for backward in backwards]


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_decoding_stops_before_the_next_token_where_nobody_waits(kind: str) -> None:
    looks: list[int] = []

    def stop() -> bool:
        looks.append(len(looks))
        return len(looks) > 2

    with pytest.raises(StoppedError):
        reader(kind).answer(QUESTIONS, callbacks=AnswerCallbacks(should_stop=stop))
    assert len(looks) == 3
    waited = reader(kind).answer(QUESTIONS, callbacks=AnswerCallbacks(should_stop=lambda: False))
    assert [alike(one) for one in waited] == [alike(one) for one in reader(kind).answer(QUESTIONS)]


def alike(answer: Answer) -> tuple[object, ...]:
    return answer.question, answer.text, round(answer.log_likelihood, 4), [one.hit for one in answer.support]


def test_another_seed_draws_another_answer() -> None:
    def drawn(seed: int) -> list[str]:
        return [one.text for one in reader("token", replace(SHORT, sampling=Sampling(seed=seed))).answer(QUESTIONS)]

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1


def test_questions_with_fewer_passages_are_answered_beside_the_others() -> None:
    hits = [found[:size] for found, size in zip(SHELF.search(QUESTIONS, 3), (3, 1, 0, 3), strict=True)]
    together = reader("sequence").answer_from(QUESTIONS, hits)
    assert [len(one.support) for one in together] == [3, 1, 1, 3]
    assert together[2].support[0].hit == CLOSED_BOOK
    for question, some, answer in zip(QUESTIONS, hits, together, strict=True):
        assert [alike(one) for one in reader("sequence").answer_from([question], [some])] == [alike(answer)]


def test_closed_book_is_one_empty_passage() -> None:
    asked = reader("token")
    closed = asked.answer_from(QUESTIONS, [[]] * len(QUESTIONS))
    assert [(len(one.support), one.support[0].weight) for one in closed] == [(1, 1.0)] * len(QUESTIONS)
    assert [one.support[0].hit.passage.text for one in closed] == [""] * len(QUESTIONS)
    assert [one.text for one in closed] != [one.text for one in asked.answer(QUESTIONS)]
    without = MarginalReader(None, asked.rag, SHORT)
    assert without.answer_from(QUESTIONS, [[]] * len(QUESTIONS)) == closed


def test_more_passages_than_there_are_is_refused_and_the_default_is_the_model_s() -> None:
    asked = reader("sequence")
    with pytest.raises(UsageError, match="k is 9 but"):
        asked.answer(QUESTIONS, k=9)
    assert {len(one.support) for one in asked.answer(QUESTIONS)} == {3}
    assert {len(one.support) for one in asked.answer(QUESTIONS, k=4)} == {4}
    assert asked.answer([]) == []
    few = MarginalReader(asked.retriever, asked.rag, passages=2)
    assert {len(one.support) for one in few.answer(QUESTIONS)} == {2}, "all that there are"


def test_what_can_not_be_read_is_refused() -> None:
    with pytest.raises(UsageError, match="no retriever"):
        MarginalReader(None, reader("token").rag).answer(QUESTIONS)
    with pytest.raises(UsageError, match="4 questions have 1 lists"):
        reader("token").answer_from(QUESTIONS, [[CLOSED_BOOK]])
    with pytest.raises(UsageError, match="batch of 0"):
        reader("token", batch=0)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_every_character_comes_back_token_by_token(kind: str, tmp_path: Path) -> None:
    """A real tokenizer whose tokens are bytes: a character has up to four, of which the last is told all of it."""
    generator = load_generator(save_bart(tmp_path), device="cpu")
    said = generator.encode_targets(["Zürich 🐋 東京"]).tokens[0].tolist()

    place = 0

    def recite(head: nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        """Make the next byte of one text all but certain."""
        nonlocal place
        logits[:, -1, said[place % len(said)]] += 1e4
        place += 1
        return logits

    generator.module.get_output_embeddings().register_forward_hook(recite)
    settings = RagSettings(kind=kind, k=2)  # type: ignore[arg-type]
    asked = MarginalReader(
        SHELF, Rag(nn.Identity(), generator, settings), DecodingSettings(max_new_tokens=60, mode="fast")
    )
    (answer,) = asked.answer(["誰が書いたか 🐋"])
    assert answer.text == "Zürich 🐋 東京"
    if kind == "token":
        texts = [token.text for token in answer.tokens]
        assert "".join(texts) == answer.text
        assert {"ü", " 🐋", " 東", "京"} <= set(texts)


def test_an_answer_that_never_ends_is_cut_where_the_generator_has_no_room_for_more(tmp_path: Path) -> None:
    generator = load_generator(save_llama(tmp_path), InstructionTemplate(max_answer=9), device="cpu")
    never = torch.zeros(generator.vocabulary_size).index_fill(0, torch.tensor([generator.end_token]), -1e4)
    generator.module.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: logits + never)
    asked = MarginalReader(SHELF, Rag(nn.Identity(), generator, RagSettings("token", k=2)), DecodingSettings(beams=2))
    (answer,) = asked.answer(["why " * 400])
    assert (answer.ended, len(answer.tokens)) == (False, 9)


@pytest.mark.parametrize("save", [save_bart, save_llama])
@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("decoding", [SHORT, DecodingSettings(max_new_tokens=6, beams=3, mode="fast")])
def test_a_generator_in_bfloat16_answers_with_its_likelihood(
    save: Callable[..., Path], kind: Variant, decoding: DecodingSettings, tmp_path: Path
) -> None:
    save(tmp_path)
    settings = RagSettings(kind=kind, k=2)
    answers = {}
    for dtype in ("float32", "bfloat16"):
        generator = load_generator(tmp_path, device="cpu", dtype=dtype)
        answers[dtype] = MarginalReader(SHELF, Rag(nn.Identity(), generator, settings), decoding).answer(QUESTIONS[:2])
    for wide, narrow in zip(*answers.values(), strict=True):
        assert wide.log_likelihood is not None
        assert narrow.log_likelihood == pytest.approx(wide.log_likelihood, rel=0.1)


def test_dropout_is_off_while_answering_and_back_on_after(tmp_path: Path) -> None:
    generator = load_generator(save_bart(tmp_path), device="cpu")
    for layer in generator.module.modules():
        if hasattr(layer, "dropout") and isinstance(layer.dropout, float):
            layer.dropout = 0.5
    asked = MarginalReader(SHELF, Rag(nn.Identity(), generator, RagSettings(k=2)), SHORT)
    asked.rag.train()
    generator.module.get_encoder().eval()  # frozen, say
    before = [module.training for module in asked.rag.modules()]
    first, second = (asked.answer(QUESTIONS) for _ in range(2))
    assert first == second
    assert [module.training for module in asked.rag.modules()] == before
