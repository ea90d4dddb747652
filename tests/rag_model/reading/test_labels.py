"""Labels of one token: RAG-Sequence and RAG-Token give the same, and the most likely one is the answer."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.generate.generator import Targets
from rag_model.generate.likelihood import label_tokens, sequence_likelihood, target_log_p, token_likelihood
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


def model(tmp_path: Path, family: str, kind: str) -> Rag:
    folder = save_bart(tmp_path) if family == "bart" else save_llama(tmp_path)
    form = PaperTemplate(max_answer=8) if family == "bart" else InstructionTemplate(max_answer=8, answer_prefix="")
    generator = load_generator(folder, form, device="cpu")
    return Rag(nn.Identity(), generator, RagSettings(kind=kind, k=3))  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_both_variants_are_the_sum_over_passages(tmp_path: Path, family: str) -> None:
    rags = {kind: model(tmp_path / kind, family, kind) for kind in ("sequence", "token")}
    answers = {kind: LabelReader(None, rag, LABELS).answer_from(CLAIMS, HITS) for kind, rag in rags.items()}
    rag = rags["token"]
    generator = rag.generator
    tokens = label_tokens(generator, list(LABELS.values()))
    for claim, hits, sequence, token in zip(CLAIMS, HITS, *answers.values(), strict=True):
        assert sequence.text == token.text
        assert sequence.log_likelihood == pytest.approx(token.log_likelihood, abs=1e-6)
        contexts = generator.encode_contexts([claim], [[one.passage for one in hits]])
        prior = rag.prior(torch.tensor([[one.inner_product for one in hits]]))
        likelihoods = {}
        for label, number in zip(LABELS, tokens, strict=True):
            row = torch.tensor([[*([] if generator.first_token is None else [generator.first_token]), number]])
            counted = torch.tensor([[False] * (row.shape[1] - 1) + [True]])
            log_p, _ = target_log_p(generator.logits(contexts, Targets(row, torch.ones_like(row).bool())), row)
            ways = [way(prior, log_p, counted) for way in (sequence_likelihood, token_likelihood)]
            assert float(ways[0].log_p) == pytest.approx(
                float(ways[1].log_p), abs=1e-6
            )  # one token: the variants agree
            likelihoods[label] = ways[0]
        best = max(likelihoods, key=lambda label: float(likelihoods[label].log_p))
        assert token.text == best
        assert token.log_likelihood == pytest.approx(float(likelihoods[best].log_p), abs=1e-5)
        posterior = likelihoods[best].posterior[0].exp().tolist()
        assert [one.posterior for one in token.support] == pytest.approx(posterior, abs=1e-5)


def test_closed_book_and_any_batch_give_the_same(tmp_path: Path) -> None:
    rag = model(tmp_path, "bart", "token")
    hits = [HITS[0], [], HITS[2][:1]]
    together = LabelReader(None, rag, LABELS).answer_from(CLAIMS, hits)
    alone = [
        LabelReader(None, rag, LABELS, batch=1).answer_from([c], [h])[0] for c, h in zip(CLAIMS, hits, strict=True)
    ]
    assert [one.text for one in together] == [one.text for one in alone]
    assert {one.text for one in together} <= set(LABELS)
    assert all(one.usage and one.usage.new_tokens == 1 for one in together)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"SUPPORTS": "was"}, "at least two"),
        ({"SUPPORTS": "was", "REFUTES": "refuted"}, "'refuted' is 6 tokens of this model"),
        ({"SUPPORTS": "was", "REFUTES": "was"}, "are one token"),
    ],
)
def test_words_that_are_no_token_are_refused(tmp_path: Path, labels: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LabelReader(None, model(tmp_path, "bart", "token"), labels)
