"""Answers with weights of their passages, over a few passages, with generators whose probabilities are known."""

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
from tests.fixtures.table_generator import TableGenerator
from tests.fixtures.tiny_generators import save_bart, save_llama

QUESTIONS = ["who wrote it", "Wer schrieb das Buch?", "誰が書いたか 🐋", "z" * 500]
SHORT = DecodingSettings(max_new_tokens=6)


def passage(title: str, text: str) -> Passage:
    return Passage(title, "1", 1, title, "", text, 0, len(text.split()), Passage.hash_of(title, text))


class LetterRetriever:
    """Ranks a few passages by the number of letters that they share with the question."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        if k > len(self.passages):
            raise UsageError(f"k is {k} but there are {len(self.passages)} passages")
        return [self._rank(question)[:k] for question in questions]

    def _rank(self, question: str) -> list[Hit]:
        def score(row: int) -> float:
            return len(set(question) & set(self.passages[row].text)) / 4

        order = sorted(range(len(self.passages)), key=score, reverse=True)
        return [  # The score is not the inner product, as in a fused list.
            Hit(rank, -rank, row, self.passages[row], "", "", inner_product=score(row))
            for rank, row in enumerate(order, start=1)
        ]


RETRIEVER = LetterRetriever(
    [passage("Whale", "a book of the sea"), passage("", ""), passage("東京", "首都 🗼 of Japan"), passage("City", "w")]
)


def build_reader(
    kind: str, decoding: DecodingSettings = SHORT, batch: int = 8, seed: int = 4, temperature: float = 1.0
) -> MarginalReader:
    settings = RagSettings(kind=kind, k=3, temperature=temperature)  # type: ignore[arg-type]
    return MarginalReader(RETRIEVER, Rag(nn.Identity(), TableGenerator(seed, end_bias=1.0), settings), decoding, batch)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_answer_has_the_weights_of_its_passages(kind: str) -> None:
    answers = build_reader(kind, temperature=0.5).answer(QUESTIONS)
    assert [answer.question for answer in answers] == QUESTIONS
    for answer, hits in zip(answers, RETRIEVER.search(QUESTIONS, 3), strict=True):
        assert [support.hit for support in answer.support] == hits
        weights = torch.tensor([(hit.inner_product or 0) / 0.5 for hit in hits]).softmax(0)
        assert [support.weight for support in answer.support] == pytest.approx(weights.tolist(), abs=1e-6)
        assert sum(support.posterior for support in answer.support) == pytest.approx(1, abs=1e-5)
        assert answer.log_likelihood < 0


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_likelihood_and_posterior_equal_teacher_forcing(kind: str) -> None:
    reader = build_reader(kind)
    hits = RETRIEVER.search(QUESTIONS, 3)
    for answer, hits_of_question in zip(reader.answer(QUESTIONS), hits, strict=True):
        assert answer.ended
        generator = reader.rag.generator
        contexts = generator.encode_contexts([answer.question], [[hit.passage for hit in hits_of_question]])
        scores = torch.tensor([[hit.inner_product for hit in hits_of_question]])
        likelihood = reader.rag.log_likelihood(scores, contexts, generator.encode_targets([answer.text]))
        assert answer.log_likelihood == pytest.approx(float(likelihood.log_p), abs=1e-5)
        expected = likelihood.posterior[0].exp().tolist()
        assert [support.posterior for support in answer.support] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_given_answers_have_the_likelihood_of_decoding(kind: str) -> None:
    reader = build_reader(kind, batch=2)
    hits = RETRIEVER.search(QUESTIONS, 3)
    hits[1] = hits[1][:1]  # fewer passages than k
    hits[2] = []  # closed book
    answers = reader.answer_from(QUESTIONS, hits)
    likelihoods = reader.log_likelihood(QUESTIONS, hits, [answer.text for answer in answers])
    assert likelihoods == pytest.approx([answer.log_likelihood for answer in answers], abs=1e-5)
    closed_book = reader.log_likelihood(QUESTIONS, [[]] * 4, [answer.text for answer in answers])
    assert [answer.closed_book for answer in add_closed_book(reader, answers)] == pytest.approx(closed_book, abs=1e-5)
    assert closed_book[2] == pytest.approx(answers[2].log_likelihood, abs=1e-5)
    with pytest.raises(UsageError, match="give one list per question"):
        reader.log_likelihood(QUESTIONS, hits[1:], QUESTIONS)


def test_mean_of_token_posteriors_is_the_posterior() -> None:
    for answer in build_reader("token").answer(QUESTIONS):
        assert "".join(token.text for token in answer.tokens) == answer.text
        posteriors = [token.posterior for token in answer.tokens]
        mean = [sum(column) / len(posteriors) for column in zip(*posteriors, strict=True)]
        assert [support.posterior for support in answer.support] == pytest.approx(mean)
    assert all(not answer.tokens for answer in build_reader("sequence").answer(QUESTIONS))


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("decoding", [SHORT, replace(SHORT, beams=3), replace(SHORT, sampling=Sampling(seed=7))])
def test_answers_do_not_depend_on_batch_and_order(kind: str, decoding: DecodingSettings) -> None:
    answers = build_reader(kind, decoding).answer(QUESTIONS)
    reversed_answers = build_reader(kind, decoding, batch=1).answer(QUESTIONS[::-1])[::-1]
    assert [summarize(answer) for answer in answers] == [summarize(backward) for backward in reversed_answers]


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_decoding_stops_before_the_next_token_on_request(kind: str) -> None:
    calls: list[int] = []

    def should_stop() -> bool:
        calls.append(len(calls))
        return len(calls) > 2

    with pytest.raises(StoppedError):
        build_reader(kind).answer(QUESTIONS, callbacks=AnswerCallbacks(should_stop=should_stop))
    assert len(calls) == 3
    answers = build_reader(kind).answer(QUESTIONS, callbacks=AnswerCallbacks(should_stop=lambda: False))
    assert [*map(summarize, answers)] == [*map(summarize, build_reader(kind).answer(QUESTIONS))]


def summarize(answer: Answer) -> tuple[object, ...]:
    return answer.question, answer.text, round(answer.log_likelihood, 4), [support.hit for support in answer.support]


def test_answers_depend_on_the_sampling_seed() -> None:
    def sample_answers(seed: int) -> list[str]:
        reader = build_reader("token", replace(SHORT, sampling=Sampling(seed=seed)))
        return [answer.text for answer in reader.answer(QUESTIONS)]

    assert sample_answers(1) == sample_answers(1)
    assert len({tuple(sample_answers(seed)) for seed in range(5)}) > 1


def test_questions_with_fewer_passages_share_a_batch() -> None:
    hit_lists = [hits[:size] for hits, size in zip(RETRIEVER.search(QUESTIONS, 3), (3, 1, 0, 3), strict=True)]
    answers = build_reader("sequence").answer_from(QUESTIONS, hit_lists)
    assert [len(answer.support) for answer in answers] == [3, 1, 1, 3]
    assert answers[2].support[0].hit == CLOSED_BOOK
    for question, hits, answer in zip(QUESTIONS, hit_lists, answers, strict=True):
        (single,) = build_reader("sequence").answer_from([question], [hits])
        assert summarize(single) == summarize(answer)


def test_closed_book_answer_has_one_empty_passage() -> None:
    reader = build_reader("token")
    closed_book = reader.answer_from(QUESTIONS, [[]] * len(QUESTIONS))
    assert [(len(answer.support), answer.support[0].weight) for answer in closed_book] == [(1, 1.0)] * len(QUESTIONS)
    assert [answer.support[0].hit.passage.text for answer in closed_book] == [""] * len(QUESTIONS)
    assert [answer.text for answer in closed_book] != [answer.text for answer in reader.answer(QUESTIONS)]
    without_retriever = MarginalReader(None, reader.rag, SHORT)
    assert without_retriever.answer_from(QUESTIONS, [[]] * len(QUESTIONS)) == closed_book


def test_k_defaults_to_the_model_and_is_limited_by_the_corpus() -> None:
    reader = build_reader("sequence")
    with pytest.raises(UsageError, match="k is 9 but"):
        reader.answer(QUESTIONS, k=9)
    assert {len(answer.support) for answer in reader.answer(QUESTIONS)} == {3}
    assert {len(answer.support) for answer in reader.answer(QUESTIONS, k=4)} == {4}
    assert reader.answer([]) == []
    two_passages = MarginalReader(reader.retriever, reader.rag, max_passages=2)
    assert {len(answer.support) for answer in two_passages.answer(QUESTIONS)} == {2}, "the corpus has two passages"


def test_missing_retriever_and_mismatched_lists_are_refused() -> None:
    with pytest.raises(UsageError, match="no retriever"):
        MarginalReader(None, build_reader("token").rag).answer(QUESTIONS)
    with pytest.raises(UsageError, match="4 questions have 1 lists"):
        build_reader("token").answer_from(QUESTIONS, [[CLOSED_BOOK]])
    with pytest.raises(UsageError, match="batch of 0"):
        build_reader("token", batch=0)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_tokens_are_split_at_characters(kind: str, tmp_path: Path) -> None:
    """The tokens of this tokenizer are bytes; the last byte of a character gets its text."""
    generator = load_generator(save_bart(tmp_path), device="cpu")
    answer_tokens = generator.encode_targets(["Zürich 🐋 東京"]).tokens[0].tolist()

    position = 0

    def recite(head: nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        """Give the next byte of the text a probability of almost 1."""
        nonlocal position
        logits[:, -1, answer_tokens[position % len(answer_tokens)]] += 1e4
        position += 1
        return logits

    generator.module.get_output_embeddings().register_forward_hook(recite)
    settings = RagSettings(kind=kind, k=2)  # type: ignore[arg-type]
    decoding = DecodingSettings(max_new_tokens=60, mode="fast")
    reader = MarginalReader(RETRIEVER, Rag(nn.Identity(), generator, settings), decoding)
    (answer,) = reader.answer(["誰が書いたか 🐋"])
    assert answer.text == "Zürich 🐋 東京"
    if kind == "token":
        texts = [token.text for token in answer.tokens]
        assert "".join(texts) == answer.text
        assert {"ü", " 🐋", " 東", "京"} <= set(texts)


def test_answer_without_an_end_is_cut_at_the_limit_of_the_generator(tmp_path: Path) -> None:
    generator = load_generator(save_llama(tmp_path), InstructionTemplate(max_answer=9), device="cpu")
    bias = torch.zeros(generator.vocabulary_size).index_fill(0, torch.tensor([generator.end_token]), -1e4)
    generator.module.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: logits + bias)
    rag = Rag(nn.Identity(), generator, RagSettings("token", k=2))
    (answer,) = MarginalReader(RETRIEVER, rag, DecodingSettings(beams=2)).answer(["why " * 400])
    assert (answer.ended, len(answer.tokens)) == (False, 9)


@pytest.mark.parametrize("save", [save_bart, save_llama])
@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("decoding", [SHORT, DecodingSettings(max_new_tokens=6, beams=3, mode="fast")])
def test_bfloat16_generator_has_nearly_the_likelihood_of_float32(
    save: Callable[..., Path], kind: Variant, decoding: DecodingSettings, tmp_path: Path
) -> None:
    save(tmp_path)
    settings = RagSettings(kind=kind, k=2)
    answers = {}
    for dtype in ("float32", "bfloat16"):
        generator = load_generator(tmp_path, device="cpu", dtype=dtype)
        rag = Rag(nn.Identity(), generator, settings)
        answers[dtype] = MarginalReader(RETRIEVER, rag, decoding).answer(QUESTIONS[:2])
    for float32, bfloat16 in zip(*answers.values(), strict=True):
        assert float32.log_likelihood is not None
        assert bfloat16.log_likelihood == pytest.approx(float32.log_likelihood, rel=0.1)


def test_dropout_is_off_while_answering_and_restored_after(tmp_path: Path) -> None:
    generator = load_generator(save_bart(tmp_path), device="cpu")
    for layer in generator.module.modules():
        if hasattr(layer, "dropout") and isinstance(layer.dropout, float):
            layer.dropout = 0.5
    reader = MarginalReader(RETRIEVER, Rag(nn.Identity(), generator, RagSettings(k=2)), SHORT)
    reader.rag.train()
    generator.module.get_encoder().eval()  # as for a frozen encoder
    modes = [module.training for module in reader.rag.modules()]
    first, second = (reader.answer(QUESTIONS) for _ in range(2))
    assert first == second
    assert [module.training for module in reader.rag.modules()] == modes
