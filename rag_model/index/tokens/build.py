"""The stages of an index over token vectors: train a codec once, encode part by part, join the codes as a stream."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.corpus.ragged_file import offsets_of
from rag_model.index.files.engine import Vectors
from rag_model.index.files.pieces import Array, Opener, Piece, stamp_of, write_piece
from rag_model.index.files.tensors import Stream, write_tensors
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.tokens import centroids
from rag_model.index.tokens.codec import Codec, form_of, read_codec, streams_of, write_codec
from rag_model.index.tokens.rows import TokenRows

VERSION = 2  # increased when the same plan and rows would give other bytes
_LENGTHS, _IDS, _CODES = range(3)  # arrays of a piece
_BLOCK = 1 << 18  # tokens joined at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(IndexPlan):
    """A recipe resolved for n passages of token vectors."""

    d: int  # components of a vector
    train_sample: int | None = None  # tokens that train; None: by their number

    def entry(self) -> dict[str, Any]:
        """Return the plan's fields in a manifest, with `d`."""
        return {**IndexPlan.entry(self), "d": self.d}


def train(plan: TokenPlan, rows: Sequence[Path], out: Path) -> Facts:
    """Learn centroids and codes from a sample of the tokens."""
    every = TokenRows(rows, plan.d)
    size = plan.train_sample or centroids.sample_size(every.tokens)
    sample = every.sample(size, plan.seed)
    learnt = centroids.learn(sample, centroids.affordable(every.tokens, len(sample)), plan.seed)
    codec = form_of(plan.factory, plan.d).train(sample, learnt)
    write_codec(codec, out)
    return {"losses": {"codes": loss(codec, sample)}, "tokens": every.tokens, "centroids": len(learnt)}


def loss(codec: Codec, vectors: Vectors) -> float:
    """Return the mean squared distance of (t, d) unit vectors from what is rebuilt of them."""
    some = vectors[:: max(1, len(vectors) // 8192)]
    return round(float(np.square(some - codec.decode(*codec.encode(some))).sum(axis=1).mean()), 6)


def scatter(plan: TokenPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
    """Write the codes of a part."""
    codec, part = read_codec(trained), TokenRows([rows], plan.d)
    blocks = [codec.encode(block.vectors) for block in part.blocks()]
    nothing = codec.encode(np.empty((0, plan.d), np.float32))
    ids, codes = (np.concatenate(arrays) for arrays in zip(nothing, *blocks, strict=True))
    write_piece(out, stamp_of(plan, trained, "tokens", number), [part.lengths, ids, codes])
    return {"rows": part.n, "tokens": part.tokens}


def merge(plan: TokenPlan, trained: Path, scattered: Sequence[Opener], out: Path) -> Facts:
    """Join the parts' codes, in order, into the index file; one block of them is held in memory."""
    codec = read_codec(trained)
    with ExitStack() as opened:
        pieces = [
            opened.enter_context(
                Piece.open(piece, stamp_of(plan, trained, "tokens", number), 3, f"the codes of part {number}")
            )
            for number, piece in enumerate(scattered)
        ]
        offsets = offsets_of(np.concatenate([np.zeros(0, np.int64), *(piece.read(_LENGTHS) for piece in pieces)]))
        tokens = int(offsets[-1])
        ids = codec.encode(np.empty((0, plan.d), np.float32))[0].dtype
        joined = [
            Stream("offsets", offsets.dtype, offsets.shape, [offsets]),
            Stream("ids", ids, (tokens,), _blocks(pieces, _IDS)),
            Stream("codes", np.dtype(np.uint8), (tokens, codec.width), _blocks(pieces, _CODES)),
        ]
        write_tensors(out, [*streams_of(codec), *joined], {"codec": type(codec).__name__, "factory": plan.factory})
    return {"rows": len(offsets) - 1, "tokens": tokens}


def _blocks(pieces: Sequence[Piece], array: int) -> Iterator[Array]:
    for piece in pieces:
        for first in range(0, piece.rows(array), _BLOCK):
            yield piece.read(array, first, min(first + _BLOCK, piece.rows(array)))
