"""The stages of a token-vector index: train the codec, encode each part, concatenate the codes as a
stream.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.arrays import Partition
from rag_model.corpus.ragged_file import TokenFile, TokenVectors, compute_offsets
from rag_model.errors import InputError, UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Array, Opener, PieceReader, compute_stamp, write_piece
from rag_model.index.files.tensors import TensorStream, write_tensors
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.tokens import codec as centroids
from rag_model.index.tokens.codec import Codec, codec_streams, parse_codec_factory, read_codec, write_codec


class TokenRows:
    """The token vectors of all parts; a row is counted through the parts in order."""

    def __init__(self, paths: Sequence[Path], dim: int | None = None) -> None:
        """Map the files of the parts, in order; `dim` is the dimension that a plan requires.

        Raises:
            InputError: a file is missing, damaged or has another dimension.
            UsageError: no file is given.
        """
        if not paths:
            raise UsageError("there are no token vectors to index: give at least one file")
        self._files = [TokenFile(path) for path in paths]
        self.dim = self._files[0].dim if dim is None else dim
        for path, file in zip(paths, self._files, strict=True):
            if file.dim != self.dim:
                raise InputError(f"{path} has {file.dim} dimensions, not {self.dim}: encode all parts with one encoder")
        self._partition = Partition(file.n for file in self._files)
        self.n = self._partition.n
        self.lengths = np.concatenate([file.lengths for file in self._files])

    @property
    def tokens(self) -> int:
        """The number of token vectors."""
        return int(self.lengths.sum())

    def blocks(self) -> Iterator[TokenVectors]:
        """Yield the passages in row order, as float32, in blocks."""
        for file in self._files:
            yield from file.iter_batches()

    def take(self, rows: Rows) -> TokenVectors:
        """Return the passages at ascending global `rows`, float32."""
        pieces = [self._files[number].take(local) for number, _, local in self._partition.split(rows)]
        return TokenVectors.concatenate(pieces or [self._files[0].take(np.empty(0, np.int64))])

    def sample(self, tokens: int, seed: int) -> Vectors:
        """Return the (t, d) float32 vectors of passages that are drawn at random until they have
        `tokens` tokens.
        """
        order = np.random.default_rng(seed).permutation(self.n)
        passage_count = np.searchsorted(np.cumsum(self.lengths[order]), tokens) + 1
        vectors: Vectors = self.take(np.sort(order[:passage_count])).vectors
        return vectors


VERSION = 2  # increase it when the same plan and rows would give other bytes
_LENGTHS, _IDS, _CODES = range(3)  # arrays of a piece
_BLOCK = 1 << 18  # tokens copied at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(IndexPlan):
    """A recipe resolved for n passages of token vectors."""

    d: int  # components of a vector
    # Tokens to train with; None: determined by the number of tokens.
    train_sample: int | None = None

    def entry(self) -> dict[str, Any]:
        """Return the plan's fields in a manifest, with `d`."""
        return {**IndexPlan.entry(self), "d": self.d}


def train_codec(plan: TokenPlan, rows: Sequence[Path], out: Path) -> IndexStats:
    """Train centroids and codes with a sample of the tokens."""
    token_rows = TokenRows(rows, plan.d)
    size = plan.train_sample or centroids.sample_size(token_rows.tokens)
    sample = token_rows.sample(size, plan.seed)
    centroid_vectors = centroids.train_centroids(
        sample, centroids.centroid_count(token_rows.tokens, len(sample)), plan.seed
    )
    codec = parse_codec_factory(plan.factory, plan.d).train(sample, centroid_vectors)
    write_codec(codec, out)
    return {
        "losses": {"codes": reconstruction_loss(codec, sample)},
        "tokens": token_rows.tokens,
        "centroids": len(centroid_vectors),
    }


def reconstruction_loss(codec: Codec, vectors: Vectors) -> float:
    """Return the mean squared distance of (t, d) unit vectors from their reconstructions."""
    sampled = vectors[:: max(1, len(vectors) // 8192)]
    return round(float(np.square(sampled - codec.decode(*codec.encode(sampled))).sum(axis=1).mean()), 6)


def encode_part(plan: TokenPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
    """Write the codes of a part."""
    codec, part_rows = read_codec(trained), TokenRows([rows], plan.d)
    blocks = [codec.encode(block.vectors) for block in part_rows.blocks()]
    no_codes = codec.encode(np.empty((0, plan.d), np.float32))
    ids, codes = (np.concatenate(arrays) for arrays in zip(no_codes, *blocks, strict=True))
    write_piece(out, compute_stamp(plan, trained, "tokens", number), [part_rows.lengths, ids, codes])
    return {"rows": part_rows.n, "tokens": part_rows.tokens}


def merge_parts(plan: TokenPlan, trained: Path, scattered: Sequence[Opener], out: Path) -> IndexStats:
    """Concatenate the codes of all parts into the index file; one block at a time is in memory."""
    codec = read_codec(trained)
    with ExitStack() as stack:
        pieces = [
            stack.enter_context(
                PieceReader.open(
                    piece, compute_stamp(plan, trained, "tokens", number), 3, f"the codes of part {number}"
                )
            )
            for number, piece in enumerate(scattered)
        ]
        offsets = compute_offsets(np.concatenate([np.zeros(0, np.int64), *(piece.read(_LENGTHS) for piece in pieces)]))
        tokens = int(offsets[-1])
        id_dtype = codec.encode(np.empty((0, plan.d), np.float32))[0].dtype
        streams = [
            TensorStream("offsets", offsets.dtype, offsets.shape, [offsets]),
            TensorStream("ids", id_dtype, (tokens,), _iter_blocks(pieces, _IDS)),
            TensorStream("codes", np.dtype(np.uint8), (tokens, codec.width), _iter_blocks(pieces, _CODES)),
        ]
        write_tensors(out, [*codec_streams(codec), *streams], {"codec": type(codec).__name__, "factory": plan.factory})
    return {"rows": len(offsets) - 1, "tokens": tokens}


def _iter_blocks(pieces: Sequence[PieceReader], array: int) -> Iterator[Array]:
    for piece in pieces:
        for first in range(0, piece.count_rows(array), _BLOCK):
            yield piece.read(array, first, min(first + _BLOCK, piece.count_rows(array)))
