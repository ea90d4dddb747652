"""Loss and gradients, compared with transformers' RAG classes on equal random weights and inputs."""

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

Batch = tuple[list[str], Tensor, Contexts, Targets]  # questions and the vectors of their passages first
K = 3
EVEN = ["abc xy", "zyx ab"]  # equal numbers of tokens, so nothing is padded
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


def load(folders: Folders, family: str, settings: RagSettings) -> Rag:
    question = TrainableEncoder.load(folders.question, "question", device="cpu")
    return Rag(question, load_generator(folders.generators[family], device="cpu"), settings).eval()


def load_reference(folders: Folders, family: str, settings: RagSettings) -> Any:
    question = DPRQuestionEncoder.from_pretrained(folders.question)
    generator = AutoModelForSeq2SeqLM.from_pretrained(folders.generators[family])
    if family == "t5":
        generator.config.bos_token_id = None  # RagSequenceForGeneration reads it, and T5 has none
    config = RagConfig.from_question_encoder_generator_configs(
        question.config,
        generator.config,
        n_docs=K,
        label_smoothing=settings.label_smoothing,
        exclude_bos_score=settings.exclude_bos,
    )
    return ORACLES[settings.kind](config, question, generator).eval()


def build_batch(rag: Rag, answers: list[str]) -> Batch:
    texts = ["the capital of x", "", "in"] if answers is UNEVEN else ["abc", "def", "ghi"]
    passages = [Passage("1", "1", 1, "", "", text, 0, 1, "") for text in texts]
    questions = ["who was it", "the war in the city"]
    prompted = ["rst", "uvw"] if answers is EVEN else ["who", "the war in the city"]
    vectors = torch.randn(2, K, 32, generator=torch.Generator().manual_seed(3))
    contexts, targets = rag.generator.encode_contexts(prompted, [passages] * 2), rag.generator.encode_targets(answers)
    return questions, vectors, contexts, targets


def compute_loss(rag: Rag, batch: Batch) -> Tensor:
    questions, vectors, contexts, targets = batch
    query_vectors = rag.embed_questions(questions).to(vectors.dtype)
    return rag.loss(torch.einsum("bd,bkd->bk", query_vectors, vectors), contexts, targets)


def compute_reference_loss(rag: Any, tokenizer_source: Rag, batch: Batch) -> Tensor:
    """Return the loss of each question; labels begin with the start token of the decoder."""
    questions, vectors, contexts, targets = batch
    tokens = tokenizer_source.question.tokenizer.encode_batch(questions)  # type: ignore[union-attr,operator]
    pooled = [rag.question_encoder(torch.tensor([token.ids])).pooler_output for token in tokens]
    query_vectors = torch.cat(pooled).float().to(vectors.dtype)  # as an encoder returns them
    scores = torch.einsum("bd,bkd->bk", query_vectors, vectors)
    start = torch.full((2, 1), rag.generator.config.decoder_start_token_id)
    return rag(
        context_input_ids=contexts.tokens,
        context_attention_mask=contexts.mask.long(),
        doc_scores=scores,
        labels=torch.cat([start, targets.tokens], 1),
    ).loss


def iter_gradients(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


@pytest.mark.parametrize(
    ("family", "kind", "smoothing", "exclude_bos", "answers"),
    [
        (family, kind, smoothing, bos, answers)
        for family, kind, smoothing, bos, answers in product(SAVE, ORACLES, (0.0, 0.1), (False, True), (EVEN, UNEVEN))
        if not bos or kind == "sequence"  # transformers' RAG-Token does not have this option
    ],
)
def test_loss_and_gradients_equal_transformers(
    folders: Folders, family: str, kind: Variant, smoothing: float, exclude_bos: bool, answers: list[str]
) -> None:
    """In float32, the kernels of some processors give T5 gradients that agree to fewer than four digits."""
    settings = RagSettings(kind, K, label_smoothing=smoothing, exclude_bos=exclude_bos)
    actual, reference = load(folders, family, settings).double(), load_reference(folders, family, settings).double()
    questions, vectors, contexts, targets = build_batch(actual, answers)
    batch = (questions, vectors.double(), contexts, targets)
    assert batch[3].mask.all() == (answers is EVEN)
    assert batch[2].mask.all() == (answers is EVEN)
    loss, expected = compute_loss(actual, batch), compute_reference_loss(reference, actual, batch)
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    loss.mean().backward()
    expected.mean().backward()
    references = reference.generator, reference.question_encoder
    for module, reference_module in zip((actual.body, actual.question.whole), references, strict=True):
        gradients, expected_gradients = dict(iter_gradients(module)), dict(iter_gradients(reference_module))
        assert gradients
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-9, rtol=1e-7)


@pytest.fixture(scope="module")
def rag(folders: Folders) -> Rag:
    return load(folders, "bart", RagSettings())


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_gradient_raises_the_score_of_helpful_passages(folders: Folders, kind: Variant) -> None:
    """∂ -log p(y|x) / ∂ score(z) = p(z|x) - p(z|x,y), which is negative if the answer is likelier with the passage."""
    actual = load(folders, "bart", RagSettings(kind))
    _, _, contexts, targets = build_batch(actual, UNEVEN)
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.5, 0.0]], requires_grad=True)
    result = actual.log_likelihood(scores, contexts, targets)
    (-result.log_p).sum().backward()
    tokens = targets.mask.sum(1)[:, None] if kind == "token" else 1  # every token has its own gradient
    expected = tokens * (actual.prior(scores).exp() - result.posterior.exp())
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, expected.detach(), atol=1e-5, rtol=1e-4)
    assert not result.posterior.requires_grad


def test_loss_is_the_negative_log_likelihood(rag: Rag) -> None:
    _, _, contexts, targets = build_batch(rag, UNEVEN)
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.5, 0.0]])
    loss = rag.loss(scores, contexts, targets)
    assert loss.shape == (2,)
    torch.testing.assert_close(loss, -rag.log_likelihood(scores, contexts, targets).log_p)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_loss_without_gradient_is_equal(folders: Folders, kind: Variant) -> None:
    actual = load(folders, "t5", RagSettings(kind, label_smoothing=0.1))
    batch = build_batch(actual, UNEVEN)
    with torch.no_grad():
        loss = compute_loss(actual, batch)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, compute_loss(actual, batch))


def test_parameters_are_those_of_encoder_and_generator(rag: Rag) -> None:
    actual = {id(parameter) for parameter in rag.parameters()}
    assert actual == {id(parameter) for part in (rag.question, rag.generator.module) for parameter in part.parameters()}


def test_likelihood_with_one_passage_is_the_generators(rag: Rag) -> None:
    passages = [[Passage("1", "1", 1, "T", "", "the capital", 0, 1, "")]]
    contexts, targets = rag.generator.encode_contexts(["who"], passages), rag.generator.encode_targets(["the answer"])
    result = rag.log_likelihood(torch.tensor([[7.0]]), contexts, targets)
    logits = rag.generator.logits(contexts, targets)[0, 0].log_softmax(-1)
    expected = logits.gather(1, targets.tokens.T).sum()
    torch.testing.assert_close(result.log_p[0], expected)
    assert result.posterior.tolist() == [[0.0]]


def test_long_questions_and_empty_passages_have_a_likelihood(rag: Rag) -> None:
    empty = [[Passage("", "", 0, "", "", "", 0, 0, "")] * 2] * 2
    questions = ["who was the king of the city " * 20, ""]
    contexts, targets = rag.generator.encode_contexts(questions, empty), rag.generator.encode_targets(["", "é" * 50])
    loss = compute_loss(rag, (questions, torch.randn(2, 2, 32), contexts, targets))
    assert torch.isfinite(loss).all()


def test_scores_that_do_not_match_the_contexts_are_refused(rag: Rag) -> None:
    _, _, contexts, targets = build_batch(rag, EVEN)
    with pytest.raises(UsageError, match="2 questions with 2 scores do not match 6 contexts, 3 per question"):
        rag.loss(torch.zeros(2, 2), contexts, targets)
    with pytest.raises(UsageError, match="3 questions"):
        rag.loss(torch.zeros(3, 3), contexts, targets)


@pytest.mark.parametrize(
    "changes",
    [{"kind": "both"}, {"k": 0}, {"temperature": 0.0}, {"label_smoothing": 1.0}, {"temperature": float("nan")}],
)
def test_invalid_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is unknown|of a RAG model are invalid"):
        RagSettings(**changes)
