"""An extractive reader: its answer is a span of a passage, as in DrQA, BERT and DPR.

It is a baseline for generators, and loads two kinds of Hugging Face models: a question-answering
head (`AutoModelForQuestionAnswering`, such as a BERT trained on SQuAD), and DPR's reader (Karpukhin
et al. 2020, section 6.1). Start and end scores are normalized over all tokens of all passages of a
question (shared normalization, Clark & Gardner 2018):

    log p(span) = log softmax(start)_i + log softmax(end)_j,   i <= j < i + 30 tokens

DPR's reader first chooses the passage by its relevance, and then the best span of at most 10 tokens
in it. An extractive reader is wrong if no passage contains the answer; without passages, its answer
is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rag_model.encoders.files import CONFIG, TOKENIZER, read_optional_json
from rag_model.encoders.pretrained import load_pretrained
from rag_model.encoders.weights import read_tensor_headers
from rag_model.errors import InputError, StoppedError
from rag_model.extras import require
from rag_model.reading.answer import Answer, SupportingPassage, TokenUsage
from rag_model.reading.reader import (
    EXTRACTION,
    NO_CALLBACKS,
    AnswerCallbacks,
    AnswerTimer,
    RetrievingReader,
    add_stage_seconds,
    check_hit_lists,
)
from rag_model.retrieve.hits import Hit, Retriever
from rag_model.tokenizer import load_with_guard

EXTRACTIVE_K = 5  # default passages per question, as for a RAG model
_DPR = "dpr"
_MAX_SPAN_BY_TYPE = {_DPR: 10}  # maximum tokens of a span, by model type
_MAX_SPAN = 30  # maximum tokens of a span, as in the scripts for SQuAD
_MAX_TOKENS = 512  # maximum tokens of a question with a passage
_MAX_QUESTION_TOKENS = 128  # maximum tokens of a question


@dataclass(frozen=True, slots=True)
class SpanModel:
    """A model that scores tokens as starts and ends of answers, with its tokenizer."""

    module: Any
    tokenizer: Any
    kind: str  # transformers' model type

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a model from a folder with safetensors.

        Raises:
            InputError: a file is missing or corrupt, or the model has no question-answering head.
        """
        model_type = str(read_optional_json(folder / CONFIG).get("model_type", ""))
        tensor_names = read_tensor_headers(folder) if model_type else ()
        head_name = "qa_classifier" if model_type == _DPR else "qa_outputs"
        if not any(head_name in name for name in tensor_names):
            raise InputError(f"model {folder} has no question-answering head ({head_name}): give a model with one")
        transformers = require("transformers", "model")
        loader: Any = transformers.DPRReader if model_type == _DPR else transformers.AutoModelForQuestionAnswering
        module = load_pretrained(loader, folder, "model", "fetch it again", use_safetensors=True)
        tokenizer_source = transformers.AutoTokenizer, folder, "the tokenizer of model", "fetch it again"
        tokenizer = load_with_guard(folder / TOKENIZER, partial(load_pretrained, *tokenizer_source))
        return cls(module.eval(), tokenizer, model_type)

    @property
    def max_span(self) -> int:
        """The maximum number of tokens of a span."""
        return _MAX_SPAN_BY_TYPE.get(self.kind, _MAX_SPAN)

    @torch.inference_mode()
    def score(self, question: str, texts: Sequence[str]) -> "SpanScores":
        """Score every token of the texts as the start and the end of the answer."""
        max_tokens = min(_MAX_TOKENS, getattr(self.module.config, "max_position_embeddings", _MAX_TOKENS))
        question_offsets = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        truncated_offsets = question_offsets[: min(_MAX_QUESTION_TOKENS, max_tokens // 2)]
        question = question[: truncated_offsets[-1][1]] if truncated_offsets else question
        model_inputs = self.tokenizer(
            [question] * len(texts),
            list(texts),
            truncation="only_second",
            max_length=max_tokens,
            padding=True,
            return_tensors="pt",
            return_offsets_mapping=True,
        )
        offsets = model_inputs.pop("offset_mapping")
        is_passage = torch.tensor(
            [[sequence_id == 1 for sequence_id in model_inputs.sequence_ids(row)] for row in range(len(texts))]
        )
        if self.kind == _DPR:
            model_inputs.pop("token_type_ids", None)
        model_outputs = self.module(**model_inputs)
        start_logits, end_logits = (
            logits.float().masked_fill(~is_passage, -torch.inf)
            for logits in (model_outputs.start_logits, model_outputs.end_logits)
        )
        relevance = model_outputs.relevance_logits.view(-1) if self.kind == _DPR else None
        return SpanScores(start_logits, end_logits, offsets, relevance, int(model_inputs["attention_mask"].sum()))


@dataclass(frozen=True, slots=True)
class SpanScores:
    """Scores of the tokens of k texts, padded to t tokens; tokens outside the passage have -inf."""

    starts: Tensor  # (k, t) scores as the start of the answer
    ends: Tensor  # (k, t) scores as the end of the answer
    offsets: Tensor  # (k, t, 2) character offsets (start, end) in the text
    relevance: Tensor | None  # (k,) relevance of each passage, for DPR's reader
    n_tokens: int  # number of input tokens of all texts

    def find_best_span(self, max_span: int) -> tuple[int, int, int, float]:
        """Return (position of the text, start offset, end offset, log p) of the best span.

        If no span is possible, the result is an empty span with log p = -inf.
        """
        start_log_probs, end_log_probs = (_normalize_log_probs(logits) for logits in (self.starts, self.ends))
        span_scores = start_log_probs[:, :, None] + end_log_probs[:, None]  # (k, t, t)
        is_allowed = torch.ones(span_scores.shape[1:], dtype=torch.bool).triu() & ~torch.ones(
            span_scores.shape[1:], dtype=torch.bool
        ).triu(max_span)
        span_scores = span_scores.masked_fill(~is_allowed, -torch.inf)
        if self.relevance is not None:
            is_best_passage = torch.arange(len(span_scores)) == self.relevance.argmax()
            span_scores = span_scores.masked_fill(~is_best_passage[:, None, None], -torch.inf)
        best_index = int(span_scores.argmax())
        text_position, first_token, last_token = (
            int(index) for index in torch.unravel_index(torch.tensor(best_index), span_scores.shape)
        )
        score = float(span_scores[text_position, first_token, last_token])
        if score == -torch.inf:
            return 0, 0, 0, score
        start, end = self.offsets[text_position, first_token, 0], self.offsets[text_position, last_token, 1]
        return text_position, int(start), int(end), score


def _normalize_log_probs(logits: Tensor) -> Tensor:
    """Return (k, t) log-probabilities, normalized over all tokens of all texts."""
    if bool((logits == -torch.inf).all()):
        return logits
    return logits.flatten().log_softmax(0).view_as(logits)


class ExtractiveReader(RetrievingReader):
    """A `Reader` whose answers are spans of passages."""

    def __init__(
        self, retriever: Retriever | None, model: SpanModel, k: int = EXTRACTIVE_K, max_passages: int | None = None
    ) -> None:
        """Create a reader; `k` is limited to `max_passages`, the retriever's maximum per question."""
        self.retriever, self._model = retriever, model
        self.k = min(k, max_passages or k)

    @property
    def decides(self) -> dict[str, Any]:
        """The maximum number of tokens of a span, for memo keys."""
        return {"longest": self._model.max_span}

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answers from the given hits; the answer to a question without hits is
        empty.
        """
        timer = AnswerTimer()
        check_hit_lists(questions, hits)
        answers: list[Answer] = []
        for position, (question, question_hits) in enumerate(zip(questions, hits, strict=True)):
            if callbacks.should_stop is not None and callbacks.should_stop():
                raise StoppedError("no caller waits for the answers")
            answers.append(self._answer_question(question, question_hits))
            callbacks.send_texts([(position, answers[-1])])
        timer.end_stage(EXTRACTION)
        return add_stage_seconds(answers, timer)

    def _answer_question(self, question: str, hits: Sequence[Hit]) -> Answer:
        support = tuple(SupportingPassage(hit) for hit in hits)
        texts = [hit.passage.text for hit in hits]
        if not any(text.strip() for text in texts):
            return Answer(question, "", None, support, usage=TokenUsage(0, 0))
        span_scores = self._model.score(question, texts)
        text_position, span_start, span_end, log_p = span_scores.find_best_span(self._model.max_span)
        answer_text = texts[text_position][span_start:span_end].strip()
        return Answer(question, answer_text, log_p, support, usage=TokenUsage(span_scores.n_tokens, 0))
