"""The questions of one batch, and their vectors, which are computed only if a leg needs them."""

import time
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

from rag_model.encoders.space import Space
from rag_model.errors import UsageError
from rag_model.index.files.engine import Vectors

if TYPE_CHECKING:
    from rag_model.retrieve.watch import Watch

_SEEN = frozenset("LMNPS")  # letters, marks, numbers, punctuation, symbols: not spaces, controls, zero-width characters


class QuestionEncoder(Protocol):
    """The encoder that retrieval needs; `Encoder` is one."""

    def space(self) -> Space:
        """Return the space of its question vectors."""
        ...

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors, in order; (n, l, d) of a ColBERT; (n, l, 2) of weighted terms."""
        ...


class Questions:
    """Texts that are asked together. Each encoder encodes all of them once, when a leg first asks for its vectors."""

    def __init__(self, texts: Sequence[str], watch: "Watch | None" = None) -> None:
        """Hold `texts`, in order; a `watch` times every stage that they go through."""
        self.texts = texts
        self.watch = watch
        self.seconds = 0.0  # that encoders took
        self.used: list[QuestionEncoder] = []  # the encoder of each time that vectors were asked for
        self._spent: dict[int, float] = {}  # seconds by an encoder's identity
        self._vectors: list[tuple[QuestionEncoder, Vectors]] = []
        self._whole: tuple[Questions, Sequence[int]] | None = None

    @classmethod
    def encoded(cls, texts: Sequence[str], encoder: QuestionEncoder, vectors: Vectors) -> Self:
        """Hold `texts` whose (n, d) vectors by `encoder` are known already."""
        asked = cls(texts)
        asked._vectors.append((encoder, vectors))
        return asked

    def __len__(self) -> int:
        """Return how many questions there are."""
        return len(self.texts)

    def vectors(self, encoder: QuestionEncoder) -> Vectors:
        """Return the (n, d) float32 vectors of the questions by `encoder`, in order; see `QuestionEncoder`."""
        self.used.append(encoder)
        known = self.known(encoder)
        if known is None:
            known = self._made(encoder)
            self._vectors.append((encoder, known))
        return known

    def known(self, encoder: QuestionEncoder | None) -> Vectors | None:
        """Return the vectors that `encoder` has made already; None: it has made none."""
        return next((vectors for by, vectors in self._vectors if by is encoder), None)

    def spent(self, encoder: QuestionEncoder) -> float:
        """Return the seconds that `encoder` took; 0 where its vectors were known."""
        return self._spent.get(id(encoder), 0.0)

    def some(self, places: Sequence[int]) -> "Questions":
        """Return the questions at `places`; what is encoded for them is encoded for all."""
        part = Questions([self.texts[place] for place in places], self.watch)
        part._whole = self, places
        return part

    def _made(self, encoder: QuestionEncoder) -> Vectors:
        if self._whole is not None:
            whole, places = self._whole
            before = whole.spent(encoder)
            found: Vectors = whole.vectors(encoder)[list(places)]
            self._note(encoder, whole.spent(encoder) - before)
            return found
        began = time.perf_counter()
        vectors = encoder.encode_questions(self.texts)
        self._note(encoder, time.perf_counter() - began)
        return vectors

    def _note(self, encoder: QuestionEncoder, seconds: float) -> None:
        self.seconds += seconds
        self._spent[id(encoder)] = self.spent(encoder) + seconds


def check_questions(questions: Sequence[str]) -> None:
    """Check that every question is a text that can be encoded.

    Raises:
        UsageError: one is empty or no text; the sentence gives its number, from 1.
    """
    for number, question in enumerate(questions, start=1):
        if not any(unicodedata.category(one)[0] in _SEEN for one in question):
            raise UsageError(f"question {number} is empty: ask something")
        try:
            question.encode()
        except UnicodeEncodeError as broken:
            raise UsageError(f"question {number} is not UTF-8 text ({broken.reason}): check the terminal") from broken
