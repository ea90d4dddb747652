"""Loss and gradients beside transformers' RAG classes, on the same random weights and inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    DPRConfig,
    DPRQuestionEncoder,
    RagConfig,
    RagSequenceForGeneration,
    RagTokenForGeneration,
)

from rag_model.corpus.records import Passage
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import UsageError
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings, Variant
from tests.fixtures.tiny import SHAPE, add_tokenizer
from tests.fixtures.tiny_generators import save_bart, save_t5

K = 3
EVEN = ["abc xy", "zyx ab"]  # as many tokens each: nothing is padded
UNEVEN = ["the answer is 42, 日本", "no"]
ORACLES = {"sequence": RagSequenceForGeneration, "token": RagTokenForGeneration}
SAVE: dict[str, Callable[[Path], Path]] = {"bart": save_bart, "t5": save_t5}


@dataclass(frozen=True, slots=True)
class Folders:
    question: Path
    generators: dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    base = tmp_path_factory.mktemp("rag")
    torch.manual_seed(5)
    DPRQuestionEncoder(DPRConfig(**SHAPE)).save_pretrained(base / "question")
    add_tokenizer(base / "question")
    return Folders(base / "question", {name: save(base / name) for name, save in SAVE.items()})


def rag_of(folders: Folders, family: str, settings: RagSettings) -> Rag:
    question = TrainableEncoder.load(folders.question, "question", device="cpu")
    return Rag(question, load_generator(folders.generators[family], device="cpu"), settings).eval()


def oracle_of(folders: Folders, family: str, settings: RagSettings) -> Any:
    question = DPRQuestionEncoder.from_pretrained(folders.question)
    generator = AutoModelForSeq2SeqLM.from_pretrained(folders.generators[family])
    if family == "t5":
        generator.config.bos_token_id = None  # RagSequenceForGeneration asks for it, and transformers 5 has none
    config = RagConfig.from_question_encoder_generator_configs(
        question.config,
        generator.config,
        n_docs=K,
        label_smoothing=settings.label_smoothing,
        exclude_bos_score=settings.exclude_bos,
    )
    return ORACLES[settings.kind](config, question, generator).eval()


def batch(rag: Rag, answers: list[str]) -> tuple[list[str], Tensor, Contexts, Targets]:
    texts = ["the capital of x", "", "in"] if answers is UNEVEN else ["abc", "def", "ghi"]
    beside = [Passage("1", "1", 1, "", "", text, 0, 1, "") for text in texts]
    questions = ["who was it", "the war in the city"]
    asked = ["rst", "uvw"] if answers is EVEN else ["who", "the war in the city"]
    vectors = torch.randn(2, K, 32, generator=torch.Generator().manual_seed(3))
    return questions, vectors, rag.generator.encode_contexts(asked, [beside] * 2), rag.generator.encode_targets(answers)


def loss_of(rag: Rag, given: tuple[list[str], Tensor, Contexts, Targets]) -> Tensor:
    questions, vectors, contexts, targets = given
    asked = rag.embed_questions(questions).to(vectors.dtype)
    return rag.loss(torch.einsum("bd,bkd->bk", asked, vectors), contexts, targets)


def oracle_loss(rag: Any, ours: Rag, given: tuple[list[str], Tensor, Contexts, Targets]) -> Tensor:
    """Return the loss of each question; the decoder's input begins with what the generator starts from."""
    questions, vectors, contexts, targets = given
    tokens = ours.question.tokenizer.encode_batch(questions)  # type: ignore[union-attr,operator]
    pooled = [rag.question_encoder(torch.tensor([token.ids])).pooler_output for token in tokens]
    asked = torch.cat(pooled).float().to(vectors.dtype)  # an encoder's vectors are float32 in any dtype of its weights
    scores = torch.einsum("bd,bkd->bk", asked, vectors)
    start = torch.full((2, 1), rag.generator.config.decoder_start_token_id)
    return rag(
        context_input_ids=contexts.tokens,
        context_attention_mask=contexts.mask.long(),
        doc_scores=scores,
        labels=torch.cat([start, targets.tokens], 1),
    ).loss


def gradients(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


@pytest.mark.parametrize(
    ("family", "kind", "smoothing", "exclude_bos", "answers"),
    [
        (family, kind, smoothing, bos, answers)
        for family, kind, smoothing, bos, answers in product(SAVE, ORACLES, (0.0, 0.1), (False, True), (EVEN, UNEVEN))
        if not bos or kind == "sequence"  # transformers' RAG-Token has no such option
    ],
)
def test_loss_and_gradients_are_those_of_transformers(
    folders: Folders, family: str, kind: Variant, smoothing: float, exclude_bos: bool, answers: list[str]
) -> None:
    """In float64: in float32, which kernels a processor has decides whether gradients of T5 agree to four digits."""
    settings = RagSettings(kind, K, label_smoothing=smoothing, exclude_bos=exclude_bos)
    actual, reference = rag_of(folders, family, settings).double(), oracle_of(folders, family, settings).double()
    questions, vectors, contexts, targets = batch(actual, answers)
    given = (questions, vectors.double(), contexts, targets)
    assert given[3].mask.all() == (answers is EVEN)
    assert given[2].mask.all() == (answers is EVEN)
    loss, expected = loss_of(actual, given), oracle_loss(reference, actual, given)
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    loss.mean().backward()
    expected.mean().backward()
    for mine, other in ((actual.body, reference.generator), (actual.question.whole, reference.question_encoder)):
        expected_gradients = dict(gradients(other))
        found = dict(gradients(mine))
        assert set(found) == set(expected_gradients)
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-9, rtol=1e-7, msg=name)


@pytest.fixture(scope="module")
def rag(folders: Folders) -> Rag:
    return rag_of(folders, "bart", RagSettings())


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_a_passage_that_helped_is_drawn_nearer(folders: Folders, kind: Variant) -> None:
    """∂ -log p(y|x) / ∂ score(z) = p(z|x) - p(z|x,y): below zero where the answer speaks for the passage."""
    actual = rag_of(folders, "bart", RagSettings(kind))
    _, _, contexts, targets = batch(actual, UNEVEN)
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.5, 0.0]], requires_grad=True)
    found = actual.log_likelihood(scores, contexts, targets)
    (-found.log_p).sum().backward()
    tokens = targets.mask.sum(1)[:, None] if kind == "token" else 1  # each token draws on its own
    expected = tokens * (actual.prior(scores).exp() - found.posterior.exp())
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, expected.detach(), atol=1e-5, rtol=1e-4)
    assert not found.posterior.requires_grad


def test_the_loss_is_the_negative_likelihood(rag: Rag) -> None:
    _, _, contexts, targets = batch(rag, UNEVEN)
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.5, 0.0]])
    loss = rag.loss(scores, contexts, targets)
    assert loss.shape == (2,)
    torch.testing.assert_close(loss, -rag.log_likelihood(scores, contexts, targets).log_p)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_a_loss_without_gradient_is_the_same(folders: Folders, kind: Variant) -> None:
    actual = rag_of(folders, "t5", RagSettings(kind, label_smoothing=0.1))
    given = batch(actual, UNEVEN)
    with torch.no_grad():
        without = loss_of(actual, given)
    assert not without.requires_grad
    torch.testing.assert_close(without, loss_of(actual, given))


def test_every_weight_is_the_model_s(rag: Rag) -> None:
    actual = {id(parameter) for parameter in rag.parameters()}
    assert actual == {id(parameter) for part in (rag.question, rag.generator.module) for parameter in part.parameters()}


def test_fewer_passages_than_asked_for_are_marginalised_alike(rag: Rag) -> None:
    """A corpus of one passage: the answer's likelihood is the generator's own."""
    passages = [[Passage("1", "1", 1, "T", "", "the capital", 0, 1, "")]]
    contexts, targets = rag.generator.encode_contexts(["who"], passages), rag.generator.encode_targets(["the answer"])
    found = rag.log_likelihood(torch.tensor([[7.0]]), contexts, targets)
    logits = rag.generator.logits(contexts, targets)[0, 0].log_softmax(-1)
    expected = logits.gather(1, targets.tokens.T).sum()
    torch.testing.assert_close(found.log_p[0], expected)
    assert found.posterior.tolist() == [[0.0]]


def test_long_questions_and_empty_passages_have_a_likelihood(rag: Rag) -> None:
    empty = [[Passage("", "", 0, "", "", "", 0, 0, "")] * 2] * 2
    questions = ["who was the king of the city " * 20, ""]
    contexts, targets = rag.generator.encode_contexts(questions, empty), rag.generator.encode_targets(["", "é" * 50])
    loss = loss_of(rag, (questions, torch.randn(2, 2, 32), contexts, targets))
    assert torch.isfinite(loss).all()


def test_what_does_not_belong_together_is_refused(rag: Rag) -> None:
    _, _, contexts, targets = batch(rag, EVEN)
    with pytest.raises(UsageError, match="2 questions with 2 scores do not match 6 contexts, 3 per question"):
        rag.loss(torch.zeros(2, 2), contexts, targets)
    with pytest.raises(UsageError, match="3 questions"):
        rag.loss(torch.zeros(3, 3), contexts, targets)


@pytest.mark.parametrize(
    "changes",
    [{"kind": "both"}, {"k": 0}, {"temperature": 0.0}, {"label_smoothing": 1.0}, {"temperature": float("nan")}],
)
def test_settings_have_bounds(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is unknown|of a RAG model are invalid"):
        RagSettings(**changes)
