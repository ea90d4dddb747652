"""A SiDR in training: one encoder of weighted terms for questions and one for passages, or one for both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.files import longest_input
from rag_model.encoders.model import CPU_BATCH_TOKENS
from rag_model.encoders.sidr_model import SidrModel
from rag_model.encoders.space import check_same_tokenizer
from rag_model.encoders.sparse_encoder import SparseEncoder, rectangle, sparse_space
from rag_model.encoders.sparse_spec import SIDR, SparseSpec, is_sparse_encoder, read_sparse_spec
from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.errors import UsageError
from rag_model.store.versions.model_parts import PASSAGE, QUESTION
from rag_model.training.objectives.sidr.semiparametric import kept_terms

_AT_ONCE = 64  # texts encoded together, without gradient
Weighed = tuple[Tensor, Tensor]  # (b, V) weights with gradient; (b, V) bool: the bag


@dataclass(frozen=True, slots=True)
class TermSettings:
    """How a new SiDR reads texts and keeps terms; one that was trained keeps its own."""

    terms: int = 768
    question_length: int = 128
    passage_length: int = 256
    scale: int = 8


class TrainableSidr(nn.Module):
    """Texts to weighted terms and bags; make it with `load`."""

    def __init__(self, model: SidrModel, folder: Path, spec: SparseSpec, tokenizer: Tokenizer) -> None:
        """Join a model and the tokenizer of a folder."""
        super().__init__()
        self.model, self.folder, self.spec, self._tokenizer = model, folder, spec, tokenizer

    @classmethod
    def load(cls, folder: Path, length: int, settings: TermSettings, device: str | None = None) -> Self:
        """Load the SiDR of a folder, or begin one with a plain transformer; texts of a new one have `length` tokens.

        Raises:
            InputError: it cannot be loaded.
            UsageError: it is a sparse encoder, and no SiDR.
        """
        if is_sparse_encoder(folder):
            spec = read_sparse_spec(folder)
            if spec.activation != SIDR:
                raise UsageError(f"encoder {folder} weighs terms by {spec.activation}: name a SiDR or a plain encoder")
            model = SidrModel.load(folder, device=device)
        else:
            spec = SparseSpec(
                activation=SIDR,
                max_length=min(length, longest_input(folder)),
                passage_terms=settings.terms,
                question_terms=settings.terms,
                scale=settings.scale,
            )
            model = SidrModel.begin(folder, device=device)
        return cls(model, folder, spec, load_tokenizer(folder, spec.max_length))

    def forward(self, texts: Sequence[str]) -> Weighed:
        """Return the weights of texts over the whole vocabulary, and their bags; the texts are one batch."""
        ids, real = rectangle(tokenize(self._tokenizer, texts), self.model.pad_id)
        tokens = torch.from_numpy(ids).to(self.model.device)
        weights: Tensor = self.model(tokens, torch.from_numpy(real).to(self.model.device))
        return weights, self.model.own(tokens)

    def encoder(self) -> SparseEncoder:
        """Return the encoder of the current weights, for retrieval."""
        return SparseEncoder(str(self.folder), self.folder, self.spec, self._tokenizer, self.model, CPU_BATCH_TOKENS)


class SidrPair(nn.Module):
    """A question and a passage encoder; make it with `load`."""

    def __init__(self, question: TrainableSidr, passage: TrainableSidr) -> None:
        """Join two encoders, or one with itself.

        Raises:
            UsageError: their vocabularies differ.
        """
        super().__init__()
        check_same_tokenizer(question.folder, passage.folder)
        self.question, self.passage = question, passage

    @classmethod
    def load(
        cls,
        question: Path,
        passage: Path,
        settings: TermSettings | None = None,
        *,
        shared: bool = False,
        device: str | None = None,
    ) -> Self:
        """Load two encoders; `shared`: one for both.

        Raises:
            InputError: an encoder cannot be loaded.
            UsageError: a shared encoder has two folders, or as the class.
        """
        given = settings or TermSettings()
        if shared and question != passage:
            raise UsageError(f"encoders {question} and {passage} cannot be shared: name one of them, or train two")
        reading = TrainableSidr.load(passage, given.passage_length, given, device)
        asking = reading if shared else TrainableSidr.load(question, given.question_length, given, device)
        return cls(asking, reading)

    def ask(self, questions: Sequence[str]) -> Weighed:
        """Return the weights and bags of questions."""
        weighed: Weighed = self.question([self.question.spec.question(one) for one in questions])
        return weighed

    def read(self, passages: Sequence[Passage]) -> Weighed:
        """Return the weights and bags of passages."""
        weighed: Weighed = self.passage([self.passage.spec.passage(one.title, one.text) for one in passages])
        return weighed

    @torch.no_grad()
    def scores(self, questions: Sequence[str], passages: Sequence[Passage]) -> Weighed:
        """Return the (n, m) scores of questions and passages by the weights of both, and by the passages' bags."""
        asked = torch.cat([*self._asked(questions)]).coalesce()  # (n, V), sparse
        found = [
            (torch.sparse.mm(asked, kept.T), torch.sparse.mm(asked, bag.to(kept).T))
            for kept, bag in self._read(passages)
        ]
        return torch.cat([one for one, _ in found], 1), torch.cat([one for _, one in found], 1)

    def save(self, folder: Path) -> None:
        """Write `passage/`, and `question/` for the space of the first."""
        self.passage.model.save(folder / PASSAGE, self.passage.folder, self.passage.spec)
        asks = sparse_space(folder / PASSAGE, self.passage.spec)
        self.question.model.save(folder / QUESTION, self.question.folder, self.question.spec, asks)

    def _asked(self, questions: Sequence[str]) -> Iterator[Tensor]:
        for first in range(0, len(questions), _AT_ONCE):
            weights, own = self.ask(questions[first : first + _AT_ONCE])
            yield kept_terms(weights, own, self.question.spec.question_terms).to_sparse()

    def _read(self, passages: Sequence[Passage]) -> Iterator[Weighed]:
        for first in range(0, len(passages), _AT_ONCE):
            weights, own = self.read(passages[first : first + _AT_ONCE])
            yield kept_terms(weights, own, self.passage.spec.passage_terms), own
