"""A SiDR in training: one encoder of weighted terms for questions and one for passages, or one for both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import longest_input
from rag_model.encoders.model import learning_multiple
from rag_model.encoders.sidr_model import SidrModel
from rag_model.encoders.space import check_same_tokenizer
from rag_model.encoders.sparse_encoder import SparseEncoder, batch_tokens, rectangle, sparse_space
from rag_model.encoders.sparse_spec import SIDR, SparseSpec, is_sparse_encoder, read_sparse_spec
from rag_model.encoders.tokens import load_tokenizer, tokenize
from rag_model.errors import UsageError
from rag_model.store.versions.model_parts import PASSAGE, QUESTION
from rag_model.training.objectives.sidr.semiparametric import kept_terms

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
        here = self.model.device
        ids, real = rectangle(tokenize(self._tokenizer, texts), self.model.pad_id, learning_multiple(here))
        tokens = torch.from_numpy(ids).to(here)
        weights: Tensor = self.model(tokens, torch.from_numpy(real).to(here))
        return weights, self.model.own(tokens)

    def encoder(self) -> SparseEncoder:
        """Return the encoder of the current weights, for retrieval."""
        budget = batch_tokens(self.model.device)
        return SparseEncoder(str(self.folder), self.folder, self.spec, self._tokenizer, self.model, budget)


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

    def asked(self, questions: Sequence[str]) -> Vectors:
        """Return (n, l, 2) weighted terms of questions without gradient, as `SparseEncoder.encode_questions` does.

        Raises:
            InputError: a weight is not finite.
        """
        return self.question.encoder().encode_questions(questions, steady=False)

    @torch.no_grad()
    def scores(self, asked: Vectors, passages: Sequence[Passage]) -> Weighed:
        """Return the (n, m) scores of questions and passages by the weights of both, and by the passages' bags.

        `asked` as `asked` returns it; each passage is encoded once, with those of its length. Scores are float32, also
        under autocast.
        """
        model, spec = self.passage.model, self.passage.spec
        questions = self._sparse(asked)
        by_weights, by_bags = (torch.empty((len(asked), len(passages)), device=model.device) for _ in range(2))
        texts = [spec.passage(one.title, one.text) for one in passages]
        for rows, weights, ids in self.passage.encoder().weighed(texts, steady=False):
            bag, exact = model.own(ids), weights.float()
            with torch.autocast(model.device.type, enabled=False):
                by_weights[:, rows] = torch.sparse.mm(questions, kept_terms(exact, bag, spec.passage_terms).T)
                by_bags[:, rows] = torch.sparse.mm(questions, bag.to(exact).T)
        return by_weights, by_bags

    def save(self, folder: Path) -> None:
        """Write `passage/`, and `question/` for the space of the first."""
        self.passage.model.save(folder / PASSAGE, self.passage.folder, self.passage.spec)
        asks = sparse_space(folder / PASSAGE, self.passage.spec)
        self.question.model.save(folder / QUESTION, self.question.folder, self.question.spec, asks)

    def _sparse(self, asked: Vectors) -> Tensor:
        """Return the (n, V) weights of (n, l, 2) terms."""
        terms, weights = (torch.from_numpy(asked[..., part]).to(self.passage.model.device) for part in (0, 1))
        rows = torch.arange(len(asked), device=terms.device)[:, None].expand(terms.shape)
        places = torch.stack([rows.flatten(), terms.flatten().long()])
        size = len(asked), len(self.passage.model.terms)
        return torch.sparse_coo_tensor(places, weights.flatten(), size, check_invariants=True).coalesce()
