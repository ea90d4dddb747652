"""Spans of passages, compared with a search over every pair of tokens, with tiny random models."""

import math
from pathlib import Path

import pytest
import torch

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, StoppedError
from rag_model.reading.extractive import ExtractiveReader, SpanModel
from rag_model.reading.reader import AnswerCallbacks
from rag_model.retrieve.hits import Hit
from tests.fixtures.tiny import save_bert, write_json
from tests.fixtures.tiny_spans import save_span_model

QUESTION = "who was born in 1869?"
TEXTS = ["the river was born in the city", "Émile, of 1869, was in Paris", "", "it is a river"]


def build_hits(texts: list[str]) -> list[Hit]:
    return [
        Hit(rank, 1 / rank, rank - 1, Passage(f"{rank}", "1", 1, "", "", text, 0, 1, Passage.hash_of("", text)), "", "")
        for rank, text in enumerate(texts, start=1)
    ]


@pytest.mark.parametrize("kind", ["bert", "dpr"])
def test_answer_is_the_best_span(tmp_path: Path, kind: str) -> None:
    model = SpanModel.load(save_span_model(tmp_path, kind))
    (answer,) = ExtractiveReader(None, model).answer_from([QUESTION], [build_hits(TEXTS)])
    spans = model.score(QUESTION, TEXTS)
    starts, ends = spans.starts.flatten().exp().sum().log(), spans.ends.flatten().exp().sum().log()
    best_score, best_text = -math.inf, ""
    for row, text in enumerate(TEXTS):
        if spans.relevance is not None and row != int(spans.relevance.argmax()):
            continue
        for i in range(spans.starts.shape[1]):
            for j in range(i, min(i + model.max_span, spans.ends.shape[1])):
                score = float(spans.starts[row, i] - starts + spans.ends[row, j] - ends)
                if score > best_score:
                    best_score, best_text = score, text[int(spans.offsets[row, i, 0]) : int(spans.offsets[row, j, 1])]
    assert answer.text == best_text.strip()
    assert answer.log_likelihood == pytest.approx(best_score, abs=1e-5)
    assert any(answer.text and answer.text in text for text in TEXTS)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0


def test_padding_and_order_do_not_change_scores(tmp_path: Path) -> None:
    model = SpanModel.load(save_span_model(tmp_path, "bert"))
    both_texts, first_text = model.score(QUESTION, TEXTS[:2]), model.score(QUESTION, TEXTS[:1])
    width = first_text.starts.shape[1]
    assert torch.allclose(both_texts.starts[0, :width], first_text.starts[0], atol=1e-5)
    forward, backward = (
        ExtractiveReader(None, model).answer_from([QUESTION], [build_hits(texts)])[0] for texts in (TEXTS, TEXTS[::-1])
    )
    assert forward.text == backward.text


def test_empty_and_long_inputs_are_answered(tmp_path: Path) -> None:
    reader = ExtractiveReader(None, SpanModel.load(save_span_model(tmp_path, "bert")))
    answers = reader.answer_from([QUESTION] * 3, [[], build_hits([""]), build_hits(["x" * 3000])])
    assert [answer.text for answer in answers[:2]] == ["", ""]
    assert answers[0].log_likelihood is None
    long = reader.answer_from(["who " * 500], [build_hits(TEXTS)])
    assert long[0].text
    messages: list[str] = []
    callbacks = AnswerCallbacks(on_text=lambda row, text: messages.append(text))
    reader.answer_from([QUESTION], [build_hits(TEXTS)], callbacks)
    assert len(messages) == 1
    with pytest.raises(StoppedError):
        reader.answer_from([QUESTION], [build_hits(TEXTS)], AnswerCallbacks(should_stop=lambda: True))


def test_folder_without_a_question_answering_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no question-answering head"):
        SpanModel.load(save_bert(tmp_path / "bert"))
    folder = save_span_model(tmp_path / "qa", "bert")
    write_json(folder / "tokenizer.json", {})
    with pytest.raises(InputError, match="cannot be loaded"):
        SpanModel.load(folder)
