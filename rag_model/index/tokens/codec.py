"""The codecs of token vectors: a centroid, and a code of the residual; both are offered at any number of bytes.

| factory | residual |
| --- | --- |
| `MaxSim,Bits2` | 2 bits a component, by quantiles of all residuals: ColBERTv2's codec (`bits`) |
| `MaxSim,PQ32`, `MaxSim,PQ64x4` | a product quantizer of 32 pieces of 8 bits, of 64 pieces of 4 (`products`) |
| `MaxSim` | the default: `PQ32`, or the nearest that divides the dimensions |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_model.errors import InputError, UsageError
from rag_model.index.factory import divisor
from rag_model.index.files.engine import Vectors
from rag_model.index.files.tensors import Stream, read_tensors, write_tensors
from rag_model.index.tokens.bits import ResidualBits
from rag_model.index.tokens.centroids import CentroidIds
from rag_model.index.tokens.products import ResidualProducts

NAME = "MaxSim"
_FORM = re.compile(NAME + r"(?:,(?:Bits(?P<bits>\d+)|PQ(?P<pieces>\d+)(?P<narrow>x4)?))?")
_BITS = (1, 2, 4, 8)
Array = npt.NDArray[Any]


class Codec(Protocol):
    """Trained: turns unit vectors into codes and back."""

    @property
    def centroids(self) -> Vectors:
        """The centroids, (K, d)."""
        ...

    @property
    def width(self) -> int:
        """Bytes of a residual's code."""
        ...

    def encode(self, vectors: Vectors) -> tuple[CentroidIds, npt.NDArray[np.uint8]]:
        """Return the centroids, (t,), and the residuals' codes, (t, width), of (t, d) unit vectors."""
        ...

    def decode(self, ids: CentroidIds, codes: npt.NDArray[np.uint8]) -> Vectors:
        """Return (t, d) float32 unit vectors."""
        ...

    def arrays(self) -> Mapping[str, Array]:
        """Return all that it has learnt, by name."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """What a factory string says of the codec."""

    bits: int | None = None  # a component, by quantiles; None: a product quantizer
    pieces: int = 0  # of the product quantizer
    piece_bits: int = 8

    def __str__(self) -> str:
        """Return it as a factory string has it."""
        if self.bits:
            return f"{NAME},Bits{self.bits}"
        return f"{NAME},PQ{self.pieces}{'x4' if self.piece_bits == 4 else ''}"

    def width(self, d: int) -> int:
        """Return the bytes of a residual's code."""
        return d * self.bits // 8 if self.bits else self.pieces * self.piece_bits // 8

    def train(self, sample: Vectors, centroids: Vectors) -> Codec:
        """Learn the codes of residuals from (t, d) unit vectors."""
        if self.bits:
            return ResidualBits.train(sample, centroids, self.bits)
        return ResidualProducts.train(sample, centroids, self.pieces, self.piece_bits)


def takes(factory: str) -> bool:
    """Whether a factory string asks for codes of token vectors."""
    return factory.partition(",")[0] == NAME


def form_of(factory: str, d: int | None = None) -> Form:
    """Read a factory string; numbers that it leaves open are chosen for `d` dimensions.

    Raises:
        UsageError: it is no such factory, or does not fit `d` dimensions.
    """
    found = _FORM.fullmatch(factory)
    if found is None:
        raise UsageError(f"{factory!r} is no codec of token vectors: use MaxSim, MaxSim,Bits2, MaxSim,PQ32 or similar")
    if found["bits"]:
        form = Form(bits=int(found["bits"]))
        if form.bits not in _BITS or (d is not None and d * form.bits % 8):
            raise UsageError(f"{factory} does not fill bytes: use 1, 2, 4 or 8 bits, and a multiple of 8 dimensions")
        return form
    pieces = int(found["pieces"] or (divisor(d, d // 4) or 1 if d else 0))
    form = Form(pieces=pieces, piece_bits=4 if found["narrow"] else 8)
    if found["pieces"] and (pieces < 1 or (d is not None and d % pieces) or (form.piece_bits == 4 and pieces % 2)):
        raise UsageError(f"{factory} cannot cut {d or 'the'} dimensions into {pieces} pieces: use a divisor of them")
    return form


def write_codec(codec: Codec, path: Path) -> None:
    """Write a trained codec: a small file, the same for all workers."""
    write_tensors(path, streams_of(codec), {"codec": type(codec).__name__})


def streams_of(codec: Codec) -> list[Stream]:
    """Return a codec's arrays to be written."""
    return [Stream(name, array.dtype, array.shape, [array]) for name, array in codec.arrays().items()]


def read_codec(path: Path) -> Codec:
    """Read a trained codec.

    Raises:
        InputError: the file is missing or damaged, or holds no codec.
    """
    arrays, told = read_tensors(path, mmap=False)
    return codec_of(arrays, told, path)


def codec_of(arrays: Mapping[str, Array], told: Mapping[str, str], path: Path) -> Codec:
    """Return the codec of a file from its arrays and metadata.

    Raises:
        InputError: they hold none.
    """
    kinds = {kind.__name__: kind for kind in (ResidualBits, ResidualProducts)}
    try:
        return kinds[told["codec"]].of(arrays)
    except (KeyError, ValueError, TypeError, IndexError) as broken:
        raise InputError(f"{path} holds no codec of token vectors: build it again") from broken
