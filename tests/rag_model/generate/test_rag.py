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
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Kind, Rag, RagSettings
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
    return questions, vectors, rag.generator.contexts(asked, [beside] * 2), rag.generator.targets(answers)


def oracle_loss(rag: Any, ours: Rag, given: tuple[list[str], Tensor, Contexts, Targets]) -> Tensor:
    """Return the loss of each question; the decoder's input begins with what the generator starts from."""
    questions, vectors, contexts, targets = given
    tokens = ours.question.tokenizer.encode_batch(questions)  # type: ignore[union-attr,operator]
    pooled = [rag.question_encoder(torch.tensor([one.ids])).pooler_output for one in tokens]
    scores = torch.einsum("bd,bkd->bk", torch.cat(pooled), vectors)
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
    folders: Folders, family: str, kind: Kind, smoothing: float, exclude_bos: bool, answers: list[str]
) -> None:
    settings = RagSettings(kind, K, label_smoothing=smoothing, exclude_bos=exclude_bos)
    ours, theirs = rag_of(folders, family, settings), oracle_of(folders, family, settings)
    given = batch(ours, answers)
    assert given[3].mask.all() == (answers is EVEN)
    assert given[2].mask.all() == (answers is EVEN)
    loss, expected = ours(*given), oracle_loss(theirs, ours, given)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.mean().backward()
    expected.mean().backward()
    for mine, other in ((ours.body, theirs.generator), (ours.question.whole, theirs.question_encoder)):
        expected_gradients = dict(gradients(other))
        found = dict(gradients(mine))
        assert set(found) == set(expected_gradients)
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-4, msg=name)
