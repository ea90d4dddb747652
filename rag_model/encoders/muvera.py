"""MUVERA: encode token vectors as one vector of fixed size (Dhulipala et al. 2024, 2405.19504).

The inner product of two encodings approximates MaxSim. k random hyperplanes divide the space into
2^k buckets. Each bucket of a question is the *sum* of its token vectors, and each bucket of a
passage their *mean*; an empty bucket of a passage gets the token whose bucket is nearest in Hamming
distance. Random signs project each bucket to d' components. With R repetitions there are R 2^k d'
components (section 2). Nothing is trained: the seed determines all random numbers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import TokenVectors
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import read_json_object
from rag_model.encoders.space import Space, read_declared_space
from rag_model.encoders.spec import MUVERA_KEY, RECORD_FILE, TextInput, TokenSpec
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.tokens import TokenCounts, count_truncated
from rag_model.errors import InputError, UsageError

if TYPE_CHECKING:
    from rag_model.encoders.token_model import TokenModel

_MAX_BITS = 10  # maximum number of hyperplanes
_WINDOW = 512  # number of passages whose token vectors are in memory at a time
Buckets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Muvera:
    """Parameters of an encoding; questions and passages must share them."""

    dim: int  # dimension d of a token vector
    repetitions: int = 20  # R; the paper's (20, 5, 16) gives 10,240 components
    bits: int = 5  # number k of hyperplanes (k_sim in the paper)
    projected: int = 16  # components d' per bucket (d_proj in the paper), at most d
    seed: int = 0  # seed of hyperplanes and signs

    def __post_init__(self) -> None:
        """Check the parameters."""
        is_valid = self.repetitions >= 1 and 0 <= self.bits <= _MAX_BITS and 1 <= self.projected <= self.dim
        if not is_valid:
            raise UsageError(
                f"repetitions {self.repetitions}, bits {self.bits} and projected {self.projected} "
                f"of MUVERA are invalid: give 1 or more repetitions, 0 to {_MAX_BITS} bits, and 1 "
                f"to {self.dim} projected components"
            )

    @property
    def encoded_dim(self) -> int:
        """Dimension of an encoding."""
        return self.repetitions * (1 << self.bits) * self.projected

    def encode_questions(self, token_vectors: Vectors) -> Vectors:
        """Return the (q, encoded_dim) float32 encodings of (q, l, d) question token vectors."""
        return np.stack([self._encode(vectors, is_passage=False) for vectors in token_vectors])

    def encode_passages(self, tokens: TokenVectors) -> Vectors:
        """Return the (m, encoded_dim) float32 encodings of the token vectors of m passages.

        A passage without token vectors has a zero encoding.
        """
        encodings = np.zeros((len(tokens), self.encoded_dim), np.float32)
        for row, (first_token, end_token) in enumerate(pairwise(tokens.offsets)):
            if end_token > first_token:
                passage_vectors = np.asarray(tokens.vectors[first_token:end_token], np.float32)
                encodings[row] = self._encode(passage_vectors, is_passage=True)
        return encodings

    def _encode(self, token_vectors: Vectors, *, is_passage: bool) -> Vectors:
        buckets = self.assign_buckets(token_vectors)  # (R, t)
        projected_buckets = []
        for token_buckets, projection_signs in zip(buckets, self._signs, strict=True):
            bucket_vectors = np.zeros((1 << self.bits, self.dim), np.float32)
            np.add.at(bucket_vectors, token_buckets, token_vectors)  # (t,), (t, d) -> (2^k, d)
            if is_passage:
                bucket_counts = np.bincount(token_buckets, minlength=1 << self.bits)
                bucket_vectors /= np.maximum(bucket_counts, 1)[:, None]
                empty_buckets = np.flatnonzero(bucket_counts == 0)
                nearest_tokens = find_nearest_tokens(token_buckets, empty_buckets)
                bucket_vectors[empty_buckets] = token_vectors[nearest_tokens]
            projected_buckets.append(bucket_vectors @ projection_signs)  # (2^k, d) @ (d, d') -> (2^k, d')
        return np.concatenate(projected_buckets).reshape(-1)  # (R 2^k, d') -> (R 2^k d',)

    def assign_buckets(self, token_vectors: Vectors) -> Buckets:
        """Return the (R, t) bucket numbers of (t, d) vectors; bit j is the side of hyperplane j."""
        is_above_plane = np.einsum("rkd,td->rtk", self._planes, token_vectors) > 0
        # (R, t, k) @ (k,) -> (R, t)
        buckets: Buckets = is_above_plane @ (1 << np.arange(self.bits))
        return buckets

    @cached_property
    def _planes(self) -> Vectors:
        random_planes = np.random.default_rng([self.seed, 0]).standard_normal((self.repetitions, self.bits, self.dim))
        return random_planes.astype(np.float32)

    @cached_property
    def _signs(self) -> Vectors:
        """Return (R, d, d') random signs divided by sqrt(R d'), which preserve inner products on
        average.

        Without a projection (d' = d) the result is the identity divided by sqrt(R). The factor
        sqrt(R) makes the inner product the mean over the repetitions.
        """
        signs_shape, repetition_scale = (self.repetitions, self.dim, self.projected), self.repetitions**-0.5
        if self.projected == self.dim:
            return np.broadcast_to(np.eye(self.dim, dtype=np.float32) * np.float32(repetition_scale), signs_shape)
        random_signs = np.random.default_rng([self.seed, 1]).integers(0, 2, signs_shape) * 2 - 1
        signs: Vectors = (random_signs * repetition_scale / np.sqrt(self.projected)).astype(np.float32)
        return signs


def find_nearest_tokens(buckets: Buckets, empty_buckets: Buckets) -> Buckets:
    """Return, for each of w empty buckets, the position of the token with the nearest bucket.

    The nearest bucket differs in the fewest bits. `buckets` are the (t,) buckets of the tokens.
    Ties go to the first token.
    """
    # (w, 1), (1, t) -> (w, t)
    bit_distances = np.bitwise_count(empty_buckets[:, None] ^ buckets[None, :])
    nearest_positions: Buckets = bit_distances.argmin(axis=1)
    return nearest_positions


@dataclass(frozen=True, slots=True)
class MuveraEncoder:
    """An encoder that computes one vector per text with MUVERA from a ColBERT's token vectors."""

    token_encoder: TokenEncoder
    muvera: Muvera

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the ColBERT of a folder, with the MUVERA parameters of its record.

        Raises:
            InputError: the record or a file of the ColBERT is missing or corrupt.
        """
        token_encoder = TokenEncoder.load(folder)
        settings = read_json_object(folder / RECORD_FILE).get(MUVERA_KEY)
        if not isinstance(settings, dict):
            raise InputError(f"the record of {folder} has no MUVERA parameters: reindex")
        return cls(token_encoder, parse_muvera_settings(settings, token_encoder.dim))

    @property
    def name(self) -> str:
        """The ColBERT's name."""
        return self.token_encoder.name

    @property
    def spec(self) -> TokenSpec:
        """The ColBERT's settings."""
        return self.token_encoder.spec

    @property
    def model(self) -> "TokenModel":
        """The ColBERT's model."""
        return self.token_encoder.model

    @property
    def dim(self) -> int:
        """Dimension of a vector."""
        return self.muvera.encoded_dim

    @property
    def window(self) -> int:
        """Number of passages that are encoded together."""
        return _WINDOW

    def space(self) -> Space:
        """Return the vector space of the encoder's questions."""
        return read_declared_space(self.token_encoder.folder) or derive_muvera_space(
            self.token_encoder.space(), self.muvera
        )

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (n, d) float32 vectors of questions, in order."""
        return self.muvera.encode_questions(self.token_encoder.encode_questions(questions))

    def stream(
        self, windows: Iterable[Sequence[TextInput]], *, batch_invariant: bool = False
    ) -> Iterator[tuple[Vectors, TokenCounts]]:
        """Yield the (n, d) float32 vectors and the token counts of each window of passages."""
        for window in windows:
            texts = [text if isinstance(text, str) else " ".join(text) for text in window]
            token_vectors = self.token_encoder.encode_inputs(texts)
            n_truncated = count_truncated(self.token_encoder.tokenizer.passage_tokenizer, texts)
            yield (
                self.muvera.encode_passages(token_vectors),
                TokenCounts(int(token_vectors.offsets[-1]), n_truncated),
            )


def parse_muvera_settings(settings: Mapping[str, Any], dim: int) -> Muvera:
    """Return the encoding with these settings, for token vectors of dimension `dim`.

    Raises:
        UsageError: a setting is unknown or is not a whole number.
    """
    keys = [field.name for field in fields(Muvera) if field.name != "dim"]
    for name, setting in settings.items():
        if name not in keys or type(setting) is not int:
            raise UsageError(f"{name} = {setting!r} is not a MUVERA setting: give whole numbers for {', '.join(keys)}")
    return Muvera(dim, **settings)


def derive_muvera_space(token_space: Space, muvera: Muvera) -> Space:
    """Derive the vector space of the encodings from the space of the token vectors."""
    sizes_and_seed = f"{muvera.repetitions}x{muvera.bits}x{muvera.projected}, seed {muvera.seed}"
    return replace(
        token_space, pooling=f"{token_space.pooling}, muvera {sizes_and_seed}", normalize=False, dim=muvera.encoded_dim
    )
