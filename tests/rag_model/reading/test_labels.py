"""Labels: each is scored as a whole target, and the most likely one is the answer."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate, PaperTemplate
from rag_model.generate.rag import Rag, RagSettings
from rag_model.reading.marginal import LabelReader
from rag_model.retrieve.hits import Hit
from tests.fixtures.tiny_generators import save_bart, save_llama

LABELS = {"SUPPORTS": "was", "REFUTES": "of", "NOT ENOUGH INFO": "who"}  # words of the tiny tokenizers
CLAIMS = ["the capital was in the", "of and", "who is who"]


def hit(text: str, product: float) -> Hit:
    passage = Passage(text, "1", 1, text, "", text, 0, 1, Passage.hash_of(text, text))
    return Hit(1, 0.0, 0, passage, "", "", inner_product=product)


HITS = [[hit(text, product) for text, product in (("in the", 1.0), ("was who", 0.5), ("of", -1.0))]] * 3


def model(tmp_path: Path, family: str, kind: str, exclude_bos: bool = False) -> Rag:
    folder = save_bart(tmp_path) if family == "bart" else save_llama(tmp_path)
    form = PaperTemplate(max_answer=8) if family == "bart" else InstructionTemplate(max_answer=8, answer_prefix="")
    generator = load_generator(folder, form, device="cpu")
    return Rag(nn.Identity(), generator, RagSettings(kind=kind, k=3, exclude_bos=exclude_bos))  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("exclude_bos", [False, True])
def test_a_label_is_scored_as_the_target_that_a_training_optimises(
    tmp_path: Path, family: str, kind: str, exclude_bos: bool
) -> None:
    rag = model(tmp_path, family, kind, exclude_bos)
    generator = rag.generator
    answers = LabelReader(None, rag, LABELS).answer_from(CLAIMS, HITS)
    for claim, hits, answer in zip(CLAIMS, HITS, answers, strict=True):
        contexts = generator.encode_contexts([claim], [[one.passage for one in hits]])
        scores = torch.tensor([[one.inner_product for one in hits]])
        likelihoods = {
            label: rag.log_likelihood(scores, contexts, generator.encode_targets([word]))
            for label, word in LABELS.items()
        }
        losses = {
            label: float(rag.loss(scores, contexts, generator.encode_targets([word]))) for label, word in LABELS.items()
        }
        assert answer.text == min(losses, key=lambda label: losses[label])
        assert answer.log_likelihood == pytest.approx(-losses[answer.text], abs=1e-4)
        posterior = likelihoods[answer.text].posterior[0].exp().tolist()
        assert [one.posterior for one in answer.support] == pytest.approx(posterior, abs=1e-5)


def test_closed_book_and_any_batch_give_the_same(tmp_path: Path) -> None:
    rag = model(tmp_path, "bart", "token")
    hits = [HITS[0], [], HITS[2][:1]]
    together = LabelReader(None, rag, LABELS).answer_from(CLAIMS, hits)
    alone = [
        LabelReader(None, rag, LABELS, batch=1).answer_from([c], [h])[0] for c, h in zip(CLAIMS, hits, strict=True)
    ]
    assert [one.text for one in together] == [one.text for one in alone]
    assert {one.text for one in together} <= set(LABELS)
    targets = {label: rag.generator.encode_targets([word]).mask.sum() for label, word in LABELS.items()}
    assert all(one.usage and one.usage.new_tokens == targets[one.text] for one in together)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"SUPPORTS": "was"}, "at least two"),
        ({"SUPPORTS": "was", "REFUTES": "was"}, "have the same tokens"),
    ],
)
def test_labels_that_cannot_be_told_apart_are_refused(tmp_path: Path, labels: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LabelReader(None, model(tmp_path, "bart", "token"), labels)
