"""Factory strings: faiss's description of an index, parsed and checked before any work starts.

Supported are `Flat`; `HNSW32` with storage `Flat`, `SQ8` or `SQfp16` (`HNSW32_SQ8`); and inverted lists,
optionally with a transform, a graph over the centroids, and a refinement that ranks candidates again:
`IVF1024,PQ48np`, `OPQ48_192,IVF65536_HNSW32,PQ48np`, `IVF4096,SQ8`, `IVF4096,RaBitQ4,Refine(SQfp16)`. left out (`HNSW`,
`IVF,PQ`) is chosen by `recipe.resolve` for the corpus.

bookwheel adds one word: `Refine(vectors)` ranks again by the snapshot's own vector files. No byte of the
index depends on it, and `without_vectors` removes it for faiss.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from rag_model.errors import UsageError

Structure = Literal["exact", "hnsw", "ivf"]  # of a faiss file; each is built by the index kind of that name

_GRAPH = re.compile(r"HNSW(\d*)(?:[_,](Flat|SQ8|SQfp16))?")
_ROTATION = re.compile(r"(OPQ)(\d*)(?:_(\d+))?|(PCAR?)(\d+)")
_LISTS = re.compile(r"IVF(\d*)(?:_HNSW(\d*))?")
_CODES = re.compile(r"Flat|SQ(?:4|6|8|fp16|bf16)|RaBitQ(\d?)|PQ(\d*)(?:x(\d+))?(np)?")
_REFINE = re.compile(r"Refine\((Flat|SQfp16|SQ8|vectors)\)")
_EXAMPLES = "for example HNSW32, IVF1024,PQ48np or OPQ48_192,IVF65536_HNSW32,PQ48np"


@dataclass(frozen=True, slots=True)
class Graph:
    """`HNSW<links>_<storage>`."""

    links: int | None  # M: links per node and level, twice that at the bottom; None = to be chosen
    storage: str  # Flat, SQ8, SQfp16

    def __str__(self) -> str:
        """Return the factory string."""
        tail = "" if self.storage == "Flat" else f"_{self.storage}"
        return f"HNSW{_number(self.links)}{tail}"


@dataclass(frozen=True, slots=True)
class Rotation:
    """A linear transform before the lists: `OPQ<m>_<out>` or `PCA<out>`."""

    name: str  # OPQ, PCA, PCAR
    pieces: int | None  # of OPQ; None = as many as the codes have
    out: int | None  # output dimensions; None = the input dimensions

    def __str__(self) -> str:
        """Return the factory piece."""
        if self.name != "OPQ":
            return f"{self.name}{self.out}"
        return f"OPQ{_number(self.pieces)}" + (f"_{self.out}" if self.out else "")


@dataclass(frozen=True, slots=True)
class Codes:
    """How a list keeps a vector: `Flat`, `SQ8`, `RaBitQ4`, or `PQ<pieces>x<bits>`."""

    name: str  # Flat, SQ8, RaBitQ, PQ …
    pieces: int | None = None  # of PQ; None = to be chosen
    bits: int = 8  # of a PQ piece, or of a RaBitQ dimension
    fast: bool = True  # PQ without polysemous training, which costs far more than it gains

    def __str__(self) -> str:
        """Return the factory piece."""
        if self.name == "RaBitQ":
            return f"RaBitQ{self.bits if self.bits > 1 else ''}"
        if self.name != "PQ":
            return self.name
        bits = "" if self.bits == 8 else f"x{self.bits}"
        return f"PQ{_number(self.pieces)}{bits}{'np' if self.fast else ''}"


@dataclass(frozen=True, slots=True)
class Lists:
    """`<rotation>,IVF<lists>_HNSW<coarse>,<codes>,Refine(<refine>)`."""

    rotation: Rotation | None
    lists: int | None  # None = to be chosen
    coarse: int | None  # M of a graph over the centroids; None = all centroids are compared
    codes: Codes
    refine: str | None = (
        None  # Flat, SQfp16, SQ8: kept behind the lists; vectors: the corpus's own; None: no refinement
    )

    def __str__(self) -> str:
        """Return the factory string."""
        graph = f"_HNSW{self.coarse}" if self.coarse else ""
        pieces = [str(self.rotation)] if self.rotation else []
        pieces += [f"IVF{_number(self.lists)}{graph}", str(self.codes)]
        return ",".join([*pieces, f"Refine({self.refine})"] if self.refine else pieces)

    def code_dim(self, d: int) -> int:
        """Return the dimensions that the codes see."""
        return d if self.rotation is None or self.rotation.out is None else self.rotation.out


@dataclass(frozen=True, slots=True)
class Exact:
    """`Flat`: the vectors themselves; a search compares all of them."""

    def __str__(self) -> str:
        """Return the factory string."""
        return "Flat"


Factory = Graph | Lists | Exact


def parse(text: str) -> Factory:
    """Read a factory string.

    >>> parse("OPQ48_192,IVF65536_HNSW32,PQ48np").codes
    Codes(name='PQ', pieces=48, bits=8, fast=True)

    Raises:
        UsageError: a piece is unknown, missing or misplaced; the message names it.
    """
    if text == "Flat":
        return Exact()
    if text.startswith("HNSW"):
        return _graph(text)
    return _lists(text)


def structure_of(text: str) -> Structure:
    """Return the structure that a factory string describes.

    Raises:
        UsageError: it is not a factory string known here.
    """
    factory = parse(text)
    if isinstance(factory, Exact):
        return "exact"
    return "hnsw" if isinstance(factory, Graph) else "ivf"


def with_refinement(text: str, refine: str | None) -> str:
    """Return an index's factory string with its refinement by the snapshot's vectors, as a recipe gives it.

    >>> with_refinement("IVF1024,PQ48np", "vectors")
    'IVF1024,PQ48np,Refine(vectors)'
    """
    return f"{text},Refine({refine})" if refine else text


def without_vectors(factory: Factory) -> Factory:
    """Return the factory in faiss's form, without `Refine(vectors)`."""
    return replace(factory, refine=None) if isinstance(factory, Lists) and factory.refine == "vectors" else factory


def check(factory: Factory, d: int) -> None:
    """Check that a factory fits vectors of `d` dimensions.

    Raises:
        UsageError: a number does not fit; the message gives one that does.
    """
    if isinstance(factory, Lists):
        rotation = factory.rotation
        if rotation is not None and rotation.out is not None and rotation.out > d and rotation.name != "OPQ":
            raise UsageError(f"{rotation} cannot turn {d} dimensions into {rotation.out}: use at most {d}")
        width = factory.code_dim(d)
        _check_divides(str(factory), factory.codes.pieces, width, "PQ")
        if rotation is not None:
            _check_divides(str(factory), rotation.pieces, width, "OPQ")


def divisor(width: int, at_most: int) -> int:
    """Return the largest divisor of `width` that is at most `at_most`, at least 1.

    >>> divisor(384, 50)
    48
    """
    return next(pieces for pieces in range(max(1, min(at_most, width)), 0, -1) if width % pieces == 0)


def _check_divides(text: str, pieces: int | None, width: int, name: str) -> None:
    if pieces is not None and width % pieces:
        raise UsageError(
            f"{text} is wrong: {name}{pieces} cannot cut {width} dimensions into {pieces} equal pieces, "
            f"but {name}{divisor(width, pieces)} can"
        )


def _graph(text: str) -> Graph:
    found = _GRAPH.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{text!r} is not a factory string: HNSW<M> may be followed by Flat, SQ8 or SQfp16, as in HNSW32_SQ8"
        )
    links = _positive(text, found[1])
    if links is not None and links < 2:
        raise UsageError(f"{text!r} gives a node {links} link: use at least 2, usually 16 to 64")
    return Graph(links, found[2] or "Flat")


def _lists(text: str) -> Lists:
    pieces = text.split(",")
    rotation = _rotation(text, pieces[0])
    if rotation is not None:
        del pieces[0]
    found = _LISTS.fullmatch(pieces[0]) if pieces else None
    if found is None:
        wrong = pieces[0] if pieces and pieces[0] else "nothing"
        raise UsageError(
            f"{text!r} is not a factory string of vectors: it has {wrong!r} where IVF<lists> belongs; {_EXAMPLES}"
        )
    if len(pieces) == 1:
        raise UsageError(
            f"{text!r} does not say how its lists store a vector: add Flat, SQ8, PQ<m>np or RaBitQ4, {_EXAMPLES}"
        )
    codes = _CODES.fullmatch(pieces[1])
    if codes is None:
        raise UsageError(f"{text!r} is not a factory string: {','.join(pieces[1:])!r} is unknown; {_EXAMPLES}")
    coarse = None if found[2] is None else _positive(text, found[2]) or 32
    refine = _refine(text, pieces[2:])
    return Lists(rotation, _positive(text, found[1]), coarse, _codes(text, pieces[1], codes), refine)


def _refine(text: str, pieces: list[str]) -> str | None:
    if not pieces:
        return None
    found = _REFINE.fullmatch(pieces[0])
    if found is None or len(pieces) > 1:
        raise UsageError(
            f"{text!r} is not a factory string: {','.join(pieces)!r} is unknown; after the codes use "
            "Refine(Flat), Refine(SQfp16), Refine(SQ8) or Refine(vectors)"
        )
    return found[1]


def _rotation(text: str, piece: str) -> Rotation | None:
    found = _ROTATION.fullmatch(piece)
    if found is None:
        return None
    if found[4]:
        return Rotation(found[4], None, _positive(text, found[5]))
    return Rotation("OPQ", _positive(text, found[2]), _positive(text, found[3] or ""))


def _codes(text: str, piece: str, found: re.Match[str]) -> Codes:
    if piece.startswith("RaBitQ"):
        return Codes("RaBitQ", bits=_positive(text, found[1]) or 1)
    if not piece.startswith("PQ"):
        return Codes(piece)
    pieces, bits = _positive(text, found[2]), _positive(text, found[3] or "") or 8
    if bits > 8:
        raise UsageError(f"{text!r} asks for {bits} bits per piece: use at most 8, the usual number")
    return Codes("PQ", pieces, bits, fast=pieces is None or found[4] is not None)


def _positive(text: str, digits: str) -> int | None:
    if len(digits) > 9:
        raise UsageError(f"{text!r} is not a factory string: {digits} is too large")
    if digits and int(digits) == 0:
        raise UsageError(f"{text!r} is not a factory string: it has a 0 where a positive number belongs")
    return int(digits) if digits else None


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
