"""Parse and check faiss factory strings before any work starts.

Supported are:

* `Flat`;
* `HNSW32` with storage `Flat`, `SQ4`, `SQ6`, `SQ8` or `SQfp16` (`HNSW32_SQ8`);
* inverted lists, optionally with a transform, a graph over the centroids, and a refinement that
  reranks candidates: `IVF1024,PQ48np`, `OPQ48_192,IVF65536_HNSW32,PQ48np`, `IVF4096,SQ8`,
  `IVF4096,RaBitQ4,Refine(SQfp16)`.

Numbers may be left out (`HNSW`, `IVF,PQ`): `recipe.resolve` chooses them for the corpus.

bookwheel adds `Refine(vectors)`, for graphs and inverted lists, which reranks with the snapshot's
own vector files. It changes no byte of the index. faiss does not know it, so
`without_vector_refinement` removes it from a factory.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from rag_model.errors import UsageError

# structure of a faiss file, which is also the name of its index kind
Structure = Literal["exact", "hnsw", "ivf"]

_GRAPH_PATTERN = re.compile(r"HNSW(\d*)(?:[_,](Flat|SQ(?:4|6|8|fp16)))?(?:,Refine\((vectors)\))?")
_ROTATION_PATTERN = re.compile(r"(OPQ)(\d*)(?:_(\d+))?|(PCAR?|RR)(\d+)")
_LISTS_PATTERN = re.compile(r"IVF(\d*)(?:_HNSW(\d*))?")
_CODES_PATTERN = re.compile(r"Flat|SQ(?:4|6|8|fp16|bf16)|RaBitQ(\d?)|PQ(\d*)(?:x(\d+))?(np)?")
_REFINE_PATTERN = re.compile(r"Refine\((Flat|SQfp16|SQ8|vectors)\)")
_EXAMPLES = "for example HNSW32, IVF1024,PQ48np or OPQ48_192,IVF65536_HNSW32,PQ48np"


@dataclass(frozen=True, slots=True)
class HnswSpec:
    """`HNSW<links>_<storage>,Refine(<refine>)`."""

    links: int | None  # M: links per node and level, 2M at the bottom level; None until chosen
    storage: str  # Flat, SQ4, SQ6, SQ8, SQfp16
    refine: str | None = None  # `vectors` (the corpus's own files), or None without refinement

    def __str__(self) -> str:
        """Return the factory string."""
        storage_suffix = "" if self.storage == "Flat" else f"_{self.storage}"
        return with_refinement(f"HNSW{_format_number(self.links)}{storage_suffix}", self.refine)


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """A transform before the lists: `OPQ<m>_<d>`, `PCA<d>` or `RR<d>` (random rotation)."""

    name: str  # OPQ, PCA, PCAR, RR
    pieces: int | None  # number of OPQ's sub-vectors; None: as many as the codec has
    out_dim: int | None  # number of output dimensions; None: as many as input dimensions

    def __str__(self) -> str:
        """Return this part of a factory string."""
        if self.name != "OPQ":
            return f"{self.name}{self.out_dim}"
        return f"OPQ{_format_number(self.pieces)}" + (f"_{self.out_dim}" if self.out_dim else "")


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """How a list stores a vector: `Flat`, `SQ8`, `RaBitQ4`, or `PQ<pieces>x<bits>`."""

    name: str  # Flat, SQ8, RaBitQ, PQ …
    pieces: int | None = None  # number of sub-quantizers of PQ; None until chosen
    bits: int = 8  # bits per sub-quantizer of PQ, or per dimension of RaBitQ
    fast: bool = True  # omits PQ's polysemous training, which is slow and helps little

    def __str__(self) -> str:
        """Return this part of a factory string."""
        if self.name == "RaBitQ":
            return f"RaBitQ{self.bits if self.bits > 1 else ''}"
        if self.name != "PQ":
            return self.name
        bits_suffix = "" if self.bits == 8 else f"x{self.bits}"
        return f"PQ{_format_number(self.pieces)}{bits_suffix}{'np' if self.fast else ''}"


@dataclass(frozen=True, slots=True)
class IvfSpec:
    """`<rotation>,IVF<lists>_HNSW<links>,<codes>,Refine(<refine>)`."""

    rotation: TransformSpec | None
    lists: int | None  # number of lists; None until chosen
    quantizer_links: int | None  # M of the graph over the centroids; None: no graph
    codes: CodecSpec
    # `Flat`, `SQfp16`, `SQ8` (vectors stored after the lists), `vectors` (the corpus's own files),
    # or None without refinement
    refine: str | None = None

    def __str__(self) -> str:
        """Return the factory string."""
        graph_suffix = f"_HNSW{self.quantizer_links}" if self.quantizer_links else ""
        segments = [str(self.rotation)] if self.rotation else []
        segments += [f"IVF{_format_number(self.lists)}{graph_suffix}", str(self.codes)]
        return with_refinement(",".join(segments), self.refine)

    def code_dim(self, d: int) -> int:
        """Return the number of dimensions that the codec encodes."""
        return d if self.rotation is None else self.rotation.out_dim or d


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """`Flat`: the vectors themselves, compared exhaustively."""

    def __str__(self) -> str:
        """Return the factory string."""
        return "Flat"


FactorySpec = HnswSpec | IvfSpec | FlatSpec


def parse_factory(text: str) -> FactorySpec:
    """Parse a factory string.

    >>> parse_factory("OPQ48_192,IVF65536_HNSW32,PQ48np").codes
    CodecSpec(name='PQ', pieces=48, bits=8, fast=True)

    Raises:
        UsageError: a part is unknown, missing or misplaced; the message names it.
    """
    if text == "Flat":
        return FlatSpec()
    if text.startswith("HNSW"):
        return _parse_hnsw(text)
    return _parse_ivf(text)


def get_structure(text: str) -> Structure:
    """Return the structure that a factory string describes.

    Raises:
        UsageError: the factory string is not supported.
    """
    factory = parse_factory(text)
    if isinstance(factory, FlatSpec):
        return "exact"
    return "hnsw" if isinstance(factory, HnswSpec) else "ivf"


def with_refinement(text: str, refine: str | None) -> str:
    """Append `Refine(...)` to a factory string, as in a recipe; without a refinement return `text`.

    >>> with_refinement("IVF1024,PQ48np", "vectors")
    'IVF1024,PQ48np,Refine(vectors)'
    """
    return f"{text},Refine({refine})" if refine else text


def without_vector_refinement(factory: FactorySpec) -> FactorySpec:
    """Return the factory without `Refine(vectors)`, which faiss does not know."""
    return factory if isinstance(factory, FlatSpec) or factory.refine != "vectors" else replace(factory, refine=None)


def check_dimensions(factory: FactorySpec, d: int) -> None:
    """Check that a factory fits vectors of `d` dimensions.

    Raises:
        UsageError: a number does not fit; the message suggests one that does.
    """
    if isinstance(factory, IvfSpec):
        rotation = factory.rotation
        if rotation is not None and rotation.name != "OPQ" and (rotation.out_dim or 0) > d:
            raise UsageError(f"{rotation} cannot turn {d} dimensions into {rotation.out_dim}: use at most {d}")
        code_dim = factory.code_dim(d)
        _check_divides(str(factory), factory.codes.pieces, code_dim, "PQ")
        if rotation is not None:
            _check_divides(str(factory), rotation.pieces, code_dim, "OPQ")


def find_largest_divisor(width: int, limit: int) -> int:
    """Return the largest divisor of `width` that is at most `limit`, and at least 1.

    >>> find_largest_divisor(384, 50)
    48
    """
    return next(factor for factor in range(max(1, min(limit, width)), 0, -1) if width % factor == 0)


def _check_divides(text: str, n_pieces: int | None, dim: int, name: str) -> None:
    if n_pieces is not None and dim % n_pieces:
        raise UsageError(
            f"{text} is wrong: {name}{n_pieces} cannot cut {dim} dimensions into {n_pieces} equal "
            f"pieces, but {name}{find_largest_divisor(dim, n_pieces)} can"
        )


def _parse_hnsw(text: str) -> HnswSpec:
    match = _GRAPH_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is not a factory string: HNSW<M> may be followed by Flat, SQ4, SQ6, SQ8 or SQfp16, and by "
            "Refine(vectors), as in HNSW32_SQ8 or HNSW32_SQ4,Refine(vectors)"
        )
    n_links = _parse_positive(text, match[1])
    if n_links is not None and n_links < 2:
        raise UsageError(f"{text!r} gives a node {n_links} link: use at least 2, usually 16 to 64")
    return HnswSpec(n_links, match[2] or "Flat", match[3])


def _parse_ivf(text: str) -> IvfSpec:
    segments = text.split(",")
    rotation = _parse_transform(text, segments[0])
    if rotation is not None:
        del segments[0]
    match = _LISTS_PATTERN.fullmatch(segments[0]) if segments else None
    if match is None:
        segment = segments[0] if segments and segments[0] else "nothing"
        raise UsageError(
            f"{text!r} is not a factory string of vectors: it has {segment!r} where IVF<lists> belongs; {_EXAMPLES}"
        )
    if len(segments) == 1:
        raise UsageError(
            f"{text!r} does not say how its lists store a vector: add Flat, SQ8, PQ<m>np or RaBitQ4, {_EXAMPLES}"
        )
    codec_match = _CODES_PATTERN.fullmatch(segments[1])
    if codec_match is None:
        raise UsageError(f"{text!r} is not a factory string: {','.join(segments[1:])!r} is unknown; {_EXAMPLES}")
    quantizer_links = None if match[2] is None else _parse_positive(text, match[2]) or 32
    refine = _parse_refinement(text, segments[2:])
    return IvfSpec(
        rotation, _parse_positive(text, match[1]), quantizer_links, _parse_codec(text, segments[1], codec_match), refine
    )


def _parse_refinement(text: str, segments: list[str]) -> str | None:
    if not segments:
        return None
    match = _REFINE_PATTERN.fullmatch(segments[0])
    if match is None or len(segments) > 1:
        raise UsageError(
            f"{text!r} is not a factory string: {','.join(segments)!r} is unknown; after the codes "
            "use Refine(Flat), Refine(SQfp16), Refine(SQ8) or Refine(vectors)"
        )
    return match[1]


def _parse_transform(text: str, segment: str) -> TransformSpec | None:
    match = _ROTATION_PATTERN.fullmatch(segment)
    if match is None:
        return None
    if match[4]:
        return TransformSpec(match[4], None, _parse_positive(text, match[5]))
    return TransformSpec("OPQ", _parse_positive(text, match[2]), _parse_positive(text, match[3] or ""))


def _parse_codec(text: str, segment: str, match: re.Match[str]) -> CodecSpec:
    if segment.startswith("RaBitQ"):
        return CodecSpec("RaBitQ", bits=_parse_positive(text, match[1]) or 1)
    if not segment.startswith("PQ"):
        return CodecSpec(segment)
    n_pieces, bits = _parse_positive(text, match[2]), _parse_positive(text, match[3] or "") or 8
    if bits > 8:
        raise UsageError(f"{text!r} asks for {bits} bits per piece: use at most 8, the usual number")
    return CodecSpec("PQ", n_pieces, bits, fast=n_pieces is None or match[4] is not None)


def _parse_positive(text: str, digits: str) -> int | None:
    if len(digits) > 9:
        raise UsageError(f"{text!r} is not a factory string: {digits} is too large")
    if digits and int(digits) == 0:
        raise UsageError(f"{text!r} is not a factory string: it has a 0 where a positive number belongs")
    return int(digits) if digits else None


def _format_number(optional_number: int | None) -> str:
    return "" if optional_number is None else str(optional_number)
