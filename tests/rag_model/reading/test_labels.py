"""Labels: each is scored as a target, and the most likely label is the answer."""

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


def build_hit(text: str, product: float) -> Hit:
    passage = Passage(text, "1", 1, text, "", text, 0, 1, Passage.hash_of(text, text))
    return Hit(1, 0.0, 0, passage, "", "", inner_product=product)


HITS = [[build_hit(text, product) for text, product in (("in the", 1.0), ("was who", 0.5), ("of", -1.0))]] * 3


def load_model(tmp_path: Path, family: str, kind: str, exclude_bos: bool = False) -> Rag:
    folder = save_bart(tmp_path) if family == "bart" else save_llama(tmp_path)
    template = PaperTemplate(max_answer=8) if family == "bart" else InstructionTemplate(max_answer=8, answer_prefix="")
    generator = load_generator(folder, template, device="cpu")
    return Rag(nn.Identity(), generator, RagSettings(kind=kind, k=3, exclude_bos=exclude_bos))  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("exclude_bos", [False, True])
def test_label_is_scored_like_a_training_target(tmp_path: Path, family: str, kind: str, exclude_bos: bool) -> None:
    rag = load_model(tmp_path, family, kind, exclude_bos)
    generator = rag.generator
    answers = LabelReader(None, rag, LABELS).answer_from(CLAIMS, HITS)
    for claim, hits, answer in zip(CLAIMS, HITS, answers, strict=True):
        contexts = generator.encode_contexts([claim], [[hit.passage for hit in hits]])
        scores = torch.tensor([[hit.inner_product for hit in hits]])
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
        assert [passage.posterior for passage in answer.support] == pytest.approx(posterior, abs=1e-5)


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("exclude_bos", [False, True])
def test_likelihood_of_a_label_is_that_of_its_word(tmp_path: Path, kind: str, exclude_bos: bool) -> None:
    reader = LabelReader(None, load_model(tmp_path, "bart", kind, exclude_bos), LABELS)
    for hits in (HITS, [[]] * 3):
        answers = reader.answer_from(CLAIMS, hits)
        likelihoods = reader.log_likelihood(CLAIMS, hits, [answer.text for answer in answers])
        assert likelihoods == pytest.approx([answer.log_likelihood for answer in answers], abs=1e-4)


def test_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    rag = load_model(tmp_path, "bart", "token")
    hits = [HITS[0], [], HITS[2][:1]]
    answers = LabelReader(None, rag, LABELS).answer_from(CLAIMS, hits)
    reader = LabelReader(None, rag, LABELS, batch_size=1)
    single_answers = [reader.answer_from([c], [h])[0] for c, h in zip(CLAIMS, hits, strict=True)]
    assert [each.text for each in answers] == [each.text for each in single_answers]
    assert {answer.text for answer in answers} <= set(LABELS)
    targets = {label: rag.generator.encode_targets([word]).mask.sum() for label, word in LABELS.items()}
    assert all(answer.usage and answer.usage.new_tokens == targets[answer.text] for answer in answers)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"SUPPORTS": "was"}, "at least two"),
        ({"SUPPORTS": "was", "REFUTES": "was"}, "have the same tokens"),
    ],
)
def test_single_and_equal_labels_are_refused(tmp_path: Path, labels: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LabelReader(None, load_model(tmp_path, "bart", "token"), labels)
