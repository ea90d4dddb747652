"""Cross-encoders: the scores that transformers gives, whatever is scored beside, and refusals of other models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rag_model.encoders.crossencoder import CrossEncoder
from rag_model.errors import InputError
from tests.fixtures.tiny import save_bert, save_cross_encoder

QUESTIONS = ["who wrote the river?", "a king", "who wrote the river?", "music of war"] * 3
TITLES = ["River", "", "King", "War and the music"] * 3
TEXTS = [f"the river was born in the city of king {'and ' * (7 * number)}" for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("cross"))


def test_scores_are_the_logits_of_transformers(folder: Path) -> None:
    found = CrossEncoder.load(folder, device="cpu").scores(QUESTIONS, TITLES, TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    for question, title, text, score in zip(QUESTIONS, TITLES, TEXTS, found, strict=True):
        passage = f"{title} {text}".strip()
        inputs = tokenizer(question, passage, truncation="only_second", max_length=64, return_tensors="pt")
        with torch.inference_mode():
            assert score == pytest.approx(model(**inputs).logits.item(), abs=1e-5)
    assert len(set(found.tolist())) > 8, "different pairs have different scores"


def test_what_is_scored_beside_changes_nothing(folder: Path) -> None:
    scorer = CrossEncoder.load(folder, device="cpu")
    together = scorer.scores(QUESTIONS, TITLES, TEXTS)
    alone = [scorer.scores([q], [t], [x])[0] for q, t, x in zip(QUESTIONS, TITLES, TEXTS, strict=True)]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert scorer.scores([], [], []).shape == (0,)


def test_a_long_question_leaves_room_for_the_passage(folder: Path) -> None:
    scorer = CrossEncoder.load(folder, device="cpu")
    long = "who wrote the king " * 2_000
    one, other = scorer.scores([long, long], ["", ""], ["the river", "music and war"])
    assert one != other


@pytest.mark.parametrize(
    ("save", "sentence"),
    [
        (save_bert, "is a BertModel, which scores no pairs: give a cross-encoder"),
        (lambda folder: save_cross_encoder(folder, labels=3), "gives 3 scores a pair"),
    ],
)
def test_another_model_is_refused(save: object, sentence: str, tmp_path: Path) -> None:
    assert callable(save)
    with pytest.raises(InputError, match=sentence):
        CrossEncoder.load(save(tmp_path / "other"))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = save_cross_encoder(tmp_path / "cross")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        CrossEncoder.load(folder)
