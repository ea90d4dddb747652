"""The forms of a representation's rows: one vector a passage, many, or weighted terms; how a part becomes each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rag_model.corpus.sparse_file import SparseFile, SparseVectors, SparseWriter, is_sparse_file
from rag_model.corpus.token_file import TokenFile, TokenVectors, TokenWriter, is_token_file
from rag_model.encoders.embed import Dtype, EmbedFacts, count_known, embed_changes
from rag_model.encoders.embed_rows import RowForm, count_known_rows, embed_rows

FormName = Literal["vectors", "tokens", "sparse"]
Pairs = Sequence[tuple[Path, Path]]  # of passages and their rows


class Form(Protocol):
    """How the rows of a part are made, and kept from earlier parts."""

    def embed(self, passages: Path, out: Path, encoder: Callable[[], Any], earlier: Pairs = ()) -> EmbedFacts:
        """Write the rows of a part's passages; `encoder` is called only if a passage is in none of `earlier`."""
        ...

    def count_known(self, passages: Path, earlier: Pairs) -> int:
        """Return how many passages would keep a row of `earlier`."""
        ...


@dataclass(frozen=True, slots=True)
class VectorForm:
    """One vector a passage."""

    dim: int
    dtype: Dtype

    def embed(self, passages: Path, out: Path, encoder: Callable[[], Any], earlier: Pairs = ()) -> EmbedFacts:
        """Write vectors; see `Form`."""
        return embed_changes(passages, out, encoder, self.dim, self.dtype, earlier)

    def count_known(self, passages: Path, earlier: Pairs) -> int:
        """Count known passages; see `Form`."""
        return count_known(passages, earlier, self.dim, self.dtype)


class RowsOfAnyLength:
    """What forms share whose rows have any length."""

    __slots__ = ()

    def embed(
        self: RowForm[Any], passages: Path, out: Path, encoder: Callable[[], Any], earlier: Pairs = ()
    ) -> EmbedFacts:
        """Write rows; see `Form`."""
        return embed_rows(passages, out, encoder, self, earlier)

    def count_known(self: RowForm[Any], passages: Path, earlier: Pairs) -> int:
        """Count known passages; see `Form`."""
        return count_known_rows(passages, earlier, self)


@dataclass(frozen=True, slots=True)
class TokenForm(RowsOfAnyLength):
    """Many vectors a passage."""

    dim: int
    dtype: Dtype

    def open(self, path: Path) -> TokenFile | None:
        """Open token vectors of the same size and type."""
        file = TokenFile(path) if is_token_file(path) else None
        return file if file and (file.dim, file.dtype) == (self.dim, np.dtype(self.dtype)) else None

    def writer(self, path: Path) -> TokenWriter:
        """Begin a file."""
        return TokenWriter(path, self.dim, self.dtype)

    def joined(self, pieces: Sequence[TokenVectors]) -> TokenVectors:
        """Join token vectors."""
        return TokenVectors.joined(pieces)


@dataclass(frozen=True, slots=True)
class SparseForm(RowsOfAnyLength):
    """Weighted terms."""

    dim: int
    scale: int

    def open(self, path: Path) -> SparseFile | None:
        """Open weighted terms of the same vocabulary and scale."""
        file = SparseFile(path) if is_sparse_file(path) else None
        return file if file and (file.dim, file.scale) == (self.dim, self.scale) else None

    def writer(self, path: Path) -> SparseWriter:
        """Begin a file."""
        return SparseWriter(path, self.dim, self.scale)

    def joined(self, pieces: Sequence[SparseVectors]) -> SparseVectors:
        """Join weighted terms."""
        return SparseVectors.joined(pieces)


def form_of(name: FormName, dim: int, dtype: Dtype, scale: int) -> Form:
    """Return the form of that name; `dtype` is of vectors, `scale` of weights."""
    forms: dict[FormName, Form] = {
        "vectors": VectorForm(dim, dtype),
        "tokens": TokenForm(dim, dtype),
        "sparse": SparseForm(dim, scale),
    }
    return forms[name]
