"""An extractive reader: the answer is a span of a passage, as DrQA, BERT and DPR find it. The baseline of generators.

Two kinds of Hugging Face folders are read: a question-answering head (`AutoModelForQuestionAnswering`, such as a BERT
trained on SQuAD), and DPR's reader (Karpukhin et al. 2020, section 6.1). Starts and ends are normalised over all tokens
of all passages of a question (shared normalisation, Clark & Gardner 2018):

    log p(span) = log softmax(start)_i + log softmax(end)_j,   i <= j < i + 30 tokens

DPR's reader chooses the passage first, by its relevance, and then the best span of at most 10 tokens in it. Such a
reader writes nothing: where no passage holds an answer it is wrong, and closed book it says nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from rag_model.encoders.files import CONFIG, optional_object
from rag_model.encoders.pretrained import load_pretrained
from rag_model.encoders.weights import stored_tensors
from rag_model.errors import InputError, StoppedError
from rag_model.reading.answer import Answer, Support, Usage
from rag_model.reading.reader import Stop, Tell, check_lists, found_by
from rag_model.reading.stages import EXTRACTION, Marks, timed
from rag_model.retrieve.retriever import Hit, Retriever

K = 5  # passages a question, unless a caller says otherwise: as many as a RAG model
_DPR = "dpr"
_LONGEST = {_DPR: 10}  # tokens of a span, by the model's type
_OTHERS = 30  # as in the scripts for SQuAD
_MOST = 512  # tokens of a question and a passage
_QUESTION = 128  # tokens of a question: the rest is the passage's


@dataclass(frozen=True, slots=True)
class SpanModel:
    """A model that scores starts and ends of answers, and its tokenizer."""

    module: Any
    tokenizer: Any
    kind: str  # transformers' model type

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a folder of safetensors.

        Raises:
            InputError: a file is missing or corrupt, or the model has no head for spans.
        """
        kind = str(optional_object(folder / CONFIG).get("model_type", ""))
        names = stored_tensors(folder) if kind else ()
        head = "qa_classifier" if kind == _DPR else "qa_outputs"
        if not any(head in name for name in names):
            raise InputError(f"model {folder} has no head for spans ({head}): give one trained to answer questions")
        loader: Any = transformers.DPRReader if kind == _DPR else transformers.AutoModelForQuestionAnswering
        module = load_pretrained(loader, folder, "model", "fetch it again", use_safetensors=True)
        tokenizer = load_pretrained(transformers.AutoTokenizer, folder, "the tokenizer of model", "fetch it again")
        return cls(module.eval(), tokenizer, kind)

    @property
    def longest(self) -> int:
        """The most tokens of a span."""
        return _LONGEST.get(self.kind, _OTHERS)

    @torch.inference_mode()
    def score(self, question: str, texts: Sequence[str]) -> "Spans":
        """Score every token of the texts as the start and the end of the answer."""
        room = min(_MOST, getattr(self.module.config, "max_position_embeddings", _MOST))
        whole = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        asked = whole[: min(_QUESTION, room // 2)]
        question = question[: asked[-1][1]] if asked else question
        read = self.tokenizer(
            [question] * len(texts),
            list(texts),
            truncation="only_second",
            max_length=room,
            padding=True,
            return_tensors="pt",
            return_offsets_mapping=True,
        )
        offsets = read.pop("offset_mapping")
        second = torch.tensor([[one == 1 for one in read.sequence_ids(row)] for row in range(len(texts))])
        if self.kind == _DPR:
            read.pop("token_type_ids", None)
        found = self.module(**read)
        starts, ends = (
            logits.float().masked_fill(~second, -torch.inf) for logits in (found.start_logits, found.end_logits)
        )
        relevance = found.relevance_logits.view(-1) if self.kind == _DPR else None
        return Spans(starts, ends, offsets, relevance, int(read["attention_mask"].sum()))


@dataclass(frozen=True, slots=True)
class Spans:
    """Scores of k texts, padded to t tokens; -inf outside the text."""

    starts: Tensor  # (k, t)
    ends: Tensor  # (k, t)
    offsets: Tensor  # (k, t, 2) characters of the text
    relevance: Tensor | None  # (k,) DPR's
    tokens: int  # read

    def best(self, longest: int) -> tuple[int, int, int, float]:
        """Return text, first and last character, and log p of the best span; where no token is left, an empty one."""
        starts, ends = (_normalised(one) for one in (self.starts, self.ends))
        pairs = starts[:, :, None] + ends[:, None]  # (k, t, t)
        allowed = torch.ones(pairs.shape[1:], dtype=torch.bool).triu() & ~torch.ones(
            pairs.shape[1:], dtype=torch.bool
        ).triu(longest)
        pairs = pairs.masked_fill(~allowed, -torch.inf)
        if self.relevance is not None:
            chosen = torch.arange(len(pairs)) == self.relevance.argmax()
            pairs = pairs.masked_fill(~chosen[:, None, None], -torch.inf)
        place = int(pairs.argmax())
        text, start, end = (int(one) for one in torch.unravel_index(torch.tensor(place), pairs.shape))
        score = float(pairs[text, start, end])
        if score == -torch.inf:
            return 0, 0, 0, score
        return text, int(self.offsets[text, start, 0]), int(self.offsets[text, end, 1]), score


def _normalised(logits: Tensor) -> Tensor:
    """Return log-probabilities over all tokens of all texts, (k, t)."""
    if bool((logits == -torch.inf).all()):
        return logits
    return logits.flatten().log_softmax(0).view_as(logits)


class ExtractiveReader:
    """A `Reader` whose answers are spans of passages."""

    def __init__(self, retriever: Retriever | None, model: SpanModel, k: int = K, passages: int | None = None) -> None:
        """Read with `model` what `retriever` finds; where it finds fewer passages than `k`, all."""
        self.retriever, self._model = retriever, model
        self.k = min(k, passages or k)

    @property
    def decides(self) -> dict[str, Any]:
        """Return the most tokens of a span."""
        return {"longest": self._model.longest}

    def answer(
        self, questions: Sequence[str], k: int | None = None, stop: Stop | None = None, tell: Tell | None = None
    ) -> list[Answer]:
        """Return the answer of each question as `Reader.answer`; `stop` is called before each question."""
        return self.answer_from(questions, found_by(self.retriever, questions, self.k if k is None else k), stop, tell)

    def answer_from(
        self,
        questions: Sequence[str],
        hits: Sequence[Sequence[Hit]],
        stop: Stop | None = None,
        tell: Tell | None = None,
    ) -> list[Answer]:
        """Return the answer of each question as `Reader.answer_from`; nothing without passages."""
        marks = Marks()
        check_lists(questions, hits)
        answers: list[Answer] = []
        for place, (question, found) in enumerate(zip(questions, hits, strict=True)):
            if stop is not None and stop():
                raise StoppedError("no caller waits for the answers")
            answers.append(self._answer(question, found))
            if tell is not None and answers[-1].text:
                tell(place, answers[-1].text)
        marks.end(EXTRACTION)
        return timed(answers, marks)

    def _answer(self, question: str, hits: Sequence[Hit]) -> Answer:
        support = tuple(Support(hit) for hit in hits)
        texts = [hit.passage.text for hit in hits]
        if not any(text.strip() for text in texts):
            return Answer(question, "", None, support, usage=Usage(0, 0))
        spans = self._model.score(question, texts)
        text, start, end, log_p = spans.best(self._model.longest)
        return Answer(question, texts[text][start:end].strip(), log_p, support, usage=Usage(spans.tokens, 0))
