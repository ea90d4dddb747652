"""MUVERA: one fixed vector for many, whose inner product approximates MaxSim (Dhulipala et al. 2024, arXiv 2405.19504).

k random hyperplanes cut the space into 2^k buckets. A question *sums* its tokens in each bucket, a passage takes their
*mean*, and fills an empty bucket with its token whose bucket is nearest in Hamming distance. Each bucket is projected
to d' components by random signs, and all of it is repeated R times: R 2^k d' components (section 2). Nothing is
trained: the seed decides every random number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.token_file import TokenVectors
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import read_object
from rag_model.encoders.space import Space, asked_space
from rag_model.encoders.spec import RECORD_FILE, TextInput
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.token_spec import TokenSpec
from rag_model.errors import InputError, UsageError

if TYPE_CHECKING:
    from rag_model.encoders.token_model import TokenModel

RECORDED = "muvera"  # field of an encoder's record
_MOST_BITS = 10
_WINDOW = 512  # passages whose token vectors are held at a time
Buckets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Muvera:
    """The random numbers of one encoding; questions and passages must share them."""

    dim: int  # components of a token's vector, d
    repetitions: int = 20  # R; the paper's (20, 5, 16) gives 10,240 components
    bits: int = 5  # k_sim
    projected: int = 16  # d_proj, at most d
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that make no encoding."""
        good = self.repetitions >= 1 and 0 <= self.bits <= _MOST_BITS and 1 <= self.projected <= self.dim
        if not good:
            raise UsageError(
                f"repetitions {self.repetitions}, bits {self.bits} and projected {self.projected} of MUVERA: need 1 or "
                f"more repetitions, 0 to {_MOST_BITS} bits, and 1 to {self.dim} projected components"
            )

    @property
    def width(self) -> int:
        """The number of components of an encoding."""
        return self.repetitions * (1 << self.bits) * self.projected

    def questions(self, tokens: Vectors) -> Vectors:
        """Return (q, width) float32 encodings of questions, (q, l, d): sums."""
        return np.stack([self._encoded(question, passage=False) for question in tokens])

    def passages(self, tokens: TokenVectors) -> Vectors:
        """Return (m, width) float32 encodings of passages: means, and empty buckets filled; 0 without tokens."""
        out = np.zeros((len(tokens), self.width), np.float32)
        for row, (first, last) in enumerate(zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)):
            if last > first:
                out[row] = self._encoded(np.asarray(tokens.vectors[first:last], np.float32), passage=True)
        return out

    def _encoded(self, tokens: Vectors, *, passage: bool) -> Vectors:
        buckets = self.buckets(tokens)  # (R, t)
        pieces = []
        for own, signs in zip(buckets, self._signs, strict=True):
            sums = np.zeros((1 << self.bits, self.dim), np.float32)
            np.add.at(sums, own, tokens)  # (t,), (t, d) -> (2^k, d)
            if passage:
                counts = np.bincount(own, minlength=1 << self.bits)
                sums /= np.maximum(counts, 1)[:, None]
                empty = np.flatnonzero(counts == 0)
                sums[empty] = tokens[nearest(own, empty)]
            pieces.append(sums @ signs)  # (2^k, d) @ (d, d') -> (2^k, d')
        return np.concatenate(pieces).reshape(-1)  # (R 2^k, d') -> (R 2^k d',)

    def buckets(self, tokens: Vectors) -> Buckets:
        """Return the (R, t) buckets of (t, d) tokens: bit j is the side of hyperplane j that a token lies on."""
        sides = np.einsum("rkd,td->rtk", self._planes, tokens) > 0
        found: Buckets = sides @ (1 << np.arange(self.bits))  # (R, t, k) @ (k,) -> (R, t)
        return found

    @cached_property
    def _planes(self) -> Vectors:
        drawn = np.random.default_rng([self.seed, 0]).standard_normal((self.repetitions, self.bits, self.dim))
        return drawn.astype(np.float32)

    @cached_property
    def _signs(self) -> Vectors:
        """Return (R, d, d') random signs over sqrt(d'): the inner product stays the same on average.

        Where nothing is projected away they are the identity, and over sqrt(R): the mean over the repetitions.
        """
        shape, scale = (self.repetitions, self.dim, self.projected), self.repetitions**-0.5
        if self.projected == self.dim:
            return np.broadcast_to(np.eye(self.dim, dtype=np.float32) * np.float32(scale), shape)
        drawn = np.random.default_rng([self.seed, 1]).integers(0, 2, shape) * 2 - 1
        signs: Vectors = (drawn * scale / np.sqrt(self.projected)).astype(np.float32)
        return signs


def nearest(buckets: Buckets, wanted: Buckets) -> Buckets:
    """Return for each of (w,) buckets the place of the token, (t,), whose bucket differs in the fewest bits.

    Of several the first.
    """
    distance = np.bitwise_count(wanted[:, None] ^ buckets[None, :])  # (w, 1), (1, t) -> (w, t)
    found: Buckets = distance.argmin(axis=1)
    return found


@dataclass(frozen=True, slots=True)
class MuveraEncoder:
    """A ColBERT whose vectors become one: an encoder of dense vectors, with another side for questions."""

    tokens: TokenEncoder
    muvera: Muvera

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the encoder of a folder whose record says how its ColBERT's vectors become one.

        Raises:
            InputError: the record or a file of the ColBERT is missing or corrupt.
        """
        tokens = TokenEncoder.load(folder)
        told = read_object(folder / RECORD_FILE).get(RECORDED)
        if not isinstance(told, dict):
            raise InputError(f"{folder} does not say how its token vectors become one: reindex the snapshot")
        return cls(tokens, muvera_of(told, tokens.dim))

    @property
    def name(self) -> str:
        """The ColBERT's name."""
        return self.tokens.name

    @property
    def spec(self) -> TokenSpec:
        """How a passage is read."""
        return self.tokens.spec

    @property
    def model(self) -> "TokenModel":
        """The ColBERT's model."""
        return self.tokens.model

    @property
    def dim(self) -> int:
        """The number of components of a vector."""
        return self.muvera.width

    @property
    def window(self) -> int:
        """How many passages are encoded together."""
        return _WINDOW

    def space(self) -> Space:
        """Return the space of its question vectors."""
        return asked_space(self.tokens.folder) or muvera_space(self.tokens.space(), self.muvera)

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (n, d) float32 vectors of questions, in order: sums."""
        return self.muvera.questions(self.tokens.encode_questions(questions))

    def stream(self, windows: Iterable[Sequence[TextInput]], *, steady: bool = False) -> Iterator[tuple[Vectors, int]]:
        """Yield each window's (n, d) float32 vectors of passages, and its number of token vectors."""
        for window in windows:
            tokens = self.tokens.encode_inputs([one if isinstance(one, str) else " ".join(one) for one in window])
            yield self.muvera.passages(tokens), int(tokens.offsets[-1])


def muvera_of(settings: Mapping[str, Any], dim: int) -> Muvera:
    """Return the encoding that settings ask for, of token vectors of `dim` components.

    Raises:
        UsageError: a setting is unknown or wrong.
    """
    known = [field.name for field in fields(Muvera) if field.name != "dim"]
    for name, value in settings.items():
        if name not in known or type(value) is not int:
            raise UsageError(f"{name} = {value!r} is no setting of MUVERA: give whole numbers for {', '.join(known)}")
    return Muvera(dim, **settings)


def muvera_space(tokens: Space, muvera: Muvera) -> Space:
    """Return the space of the single vectors, from that of the token vectors."""
    numbers = f"{muvera.repetitions}x{muvera.bits}x{muvera.projected}, seed {muvera.seed}"
    return replace(tokens, pooling=f"{tokens.pooling}, muvera {numbers}", normalize=False, dim=muvera.width)
