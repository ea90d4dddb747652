"""Describe a faiss file of another program, and check it against a recipe, to use it as an index.

Such files are published for corpora whose graphs take days to build. Only files that bookwheel
could have built are accepted, because they are searched, tuned and gated like a built index. The
header of a file is checked before any work; its vectors are checked when the corpus has been read.
"""

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.index.factory import (
    CodecSpec,
    FactorySpec,
    FlatSpec,
    HnswSpec,
    IvfSpec,
    TransformSpec,
    get_structure,
    parse_factory,
    without_vector_refinement,
)
from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.files.vectors import VectorRows
from rag_model.index.lists.training import get_inverted_lists
from rag_model.index.quality.health import measure_quantization_error
from rag_model.index.recipe import IndexRecipe, VectorPlan, choose_search
from rag_model.index.search import open_index

_SCALAR_NAMES = {
    faiss.ScalarQuantizer.QT_8bit: "SQ8",
    faiss.ScalarQuantizer.QT_6bit: "SQ6",
    faiss.ScalarQuantizer.QT_4bit: "SQ4",
    faiss.ScalarQuantizer.QT_fp16: "SQfp16",
    faiss.ScalarQuantizer.QT_bf16: "SQbf16",
}
_FAISS_DEFAULTS = {"efSearch": 16, "nprobe": 1, "refine": 1}
# Errors of stored vectors are shares of their squared length. This is the maximum for vectors
# stored unchanged or as scalar codes; 4 bits per dimension lose about .02.
_MAX_ERROR = 0.05
_ACCEPTED_ERROR = 1e-3  # error that is always accepted; rounding to float16 causes less
# Names in factory strings; "PQ" also matches OPQ. Short codes or dropped dimensions may lose most
# of a vector.
_LOSSY_CODECS = ("PQ", "PCA")
# maximum error relative to the error against unrelated rows; wrong rows have a ratio of about 1
_MAX_ERROR_RATIO = 0.99


@dataclass(frozen=True, slots=True)
class ReadyIndex:
    """A faiss file of another program that becomes the snapshot's index `name`."""

    name: str
    path: Path
    factory: str
    metric: Metric
    n: int
    d: int
    # search parameters from the file; bookwheel's default replaces a value that is faiss's default
    search: dict[str, int]

    @classmethod
    def inspect(cls, name: str, path: Path) -> Self:
        """Describe a file without reading its vectors; memory holds a byte per vector.

        Raises:
            InputError: the file is missing or damaged, bookwheel does not build such an index, or
                its ids are not the rows 0 … n-1.
        """
        file = open_index(path)
        if not file.n:
            raise InputError(f"{path} holds no vectors: give an index of the passages")
        factory = str(_describe_index(path, file.faiss_index))
        if (ivf_index := get_inverted_lists(file.faiss_index)) is not None:
            _check_ids(path, ivf_index, file.n)
        defaults = choose_search(factory)
        search = {
            parameter: setting if _FAISS_DEFAULTS[parameter] < setting <= file.n else defaults[parameter]
            for parameter, setting in file.defaults.items()
        }
        return cls(name, path, factory, file.metric, file.n, file.dim, search)

    def check_size(self, n: int, d: int) -> None:
        """Check that the file has n vectors of d dimensions.

        Raises:
            InputError: the number of vectors or their dimension differs.
        """
        if self.d != d:
            raise InputError(f"{self.path} has {self.d} dimensions, and the vectors have {d}: give an index of them")
        if self.n != n:
            raise InputError(f"{self.path} holds {self.n:,} vectors for {n:,} passages: give an index of all of them")

    def check_recipe(self, recipe: IndexRecipe) -> None:
        """Check that the file has the factory and metric of a recipe.

        Raises:
            UsageError: the factory or the metric differs.
        """
        file_spec = parse_factory(self.factory)
        if not _fits(without_vector_refinement(parse_factory(recipe.factory)), file_spec):
            raise UsageError(
                f"[index.{self.name}] of the recipe asks for {recipe.factory}, but {self.path} is {self.factory}: "
                "name that factory, or leave the table out"
            )
        if recipe.metric != self.metric:
            raise UsageError(
                f"[index.{self.name}] of the recipe has metric {recipe.metric!r}, but {self.path} has "
                f"{self.metric!r}: set metric = {self.metric!r}, or leave the table out"
            )

    def check_vectors(self, vectors: VectorRows) -> None:
        """Compare a sample of the file's vectors with the vectors of the same rows, and of other
        rows.

        A code may lose much of its vector, but must be nearer to that vector than to the vector of
        an unrelated row.

        Raises:
            RefusedError: the file was built over other vectors, or in another order.
            InputError: the vectors are damaged.
        """
        index = open_index(self.path).faiss_index
        error = measure_quantization_error(index, vectors)
        other_error = measure_quantization_error(index, _OtherRows(vectors))
        if error is None or other_error is None:  # RaBitQ codes cannot be decoded
            return
        is_lossy = any(name in self.factory for name in _LOSSY_CODECS)
        max_error = _MAX_ERROR_RATIO * other_error if is_lossy else min(other_error / 2, _MAX_ERROR)
        if not error <= max(max_error, _ACCEPTED_ERROR):
            raise RefusedError(
                f"{self.path} is not an index of these vectors in this order: its vectors differ "
                f"from them by "
                f"{error:.2f} of their squared length; give the file that was built over them"
            )

    def plan(self, recipe: IndexRecipe) -> VectorPlan:
        """Return the plan of the finished index, from which its manifest entry is made."""
        factory = parse_factory(recipe.factory)
        is_reranked = factory != without_vector_refinement(factory)
        search = choose_search(f"{self.factory},Refine(vectors)") if is_reranked else self.search
        return VectorPlan(
            kind=get_structure(self.factory),
            factory=self.factory,
            metric=self.metric,
            n=self.n,
            d=self.d,
            ef_construction=recipe.ef_construction,
            cells=1,
            border=0.0,
            linked=0.0,
            train_sample=0,
            seed=recipe.seed,
            search={**search, **recipe.search},
            refine="vectors" if is_reranked else None,
            recall_target=recipe.recall_target,
            drift=recipe.drift,
            notes=(f"taken ready from {self.path.name}",),
            over=recipe.over,
        )


class _OtherRows:
    """The vectors of a corpus, where each row has the vector of another row."""

    def __init__(self, vectors: VectorRows) -> None:
        self.n, self.dim, self._vectors = vectors.n, vectors.dim, vectors

    def read_rows(self, rows: Rows) -> Vectors:
        shifted_rows = (rows + (self.n + 1) // 2) % self.n
        sorted_positions = np.argsort(shifted_rows)
        vectors = np.empty((len(rows), self.dim), np.float32)
        vectors[sorted_positions] = self._vectors.read_rows(shifted_rows[sorted_positions])
        return vectors


def _describe_index(path: Path, index: FaissIndex) -> FactorySpec:
    """Return the factory that would build an index like this one.

    Raises:
        InputError: bookwheel has no such factory.
    """
    ivf_index = get_inverted_lists(index)
    if isinstance(index, faiss.IndexHNSW):
        spec: FactorySpec = HnswSpec(_get_link_count(index), _describe_codes(faiss.downcast_index(index.storage)).name)
    elif ivf_index is None:
        spec = FlatSpec()
    else:
        spec = _describe_lists(index, ivf_index)
    try:
        return parse_factory(str(spec))
    except UsageError as error:
        raise InputError(f"{path} is an index {spec}, which bookwheel cannot search: {error}") from error


def _describe_lists(index: FaissIndex, ivf_index: FaissIndex) -> IvfSpec:
    base_index, refinement, rotation = index, None, None
    if isinstance(index, faiss.IndexRefine):
        base_index = faiss.downcast_index(index.base_index)
        refinement = _describe_codes(faiss.downcast_index(index.refine_index)).name
    codes, quantizer = _describe_codes(ivf_index), faiss.downcast_index(ivf_index.quantizer)
    if isinstance(base_index, faiss.IndexPreTransform):
        transforms = [faiss.downcast_VectorTransform(base_index.chain.at(i)) for i in range(base_index.chain.size())]
        rotation = (
            _describe_transform(transforms[-1], codes) if len(transforms) == 1 else TransformSpec("chain", None, 0)
        )
    quantizer_links = _get_link_count(quantizer) if isinstance(quantizer, faiss.IndexHNSW) else None
    return IvfSpec(rotation, int(ivf_index.nlist), quantizer_links, codes, refinement)


def _describe_transform(transform: Any, codes: CodecSpec) -> TransformSpec:
    """Describe a transform; any other learned rotation counts as OPQ."""
    if isinstance(transform, faiss.RandomRotationMatrix):
        return TransformSpec("RR", None, int(transform.d_out))
    if isinstance(transform, faiss.PCAMatrix):
        return TransformSpec("PCAR" if transform.random_rotation else "PCA", None, int(transform.d_out))
    return TransformSpec("OPQ", codes.pieces, int(transform.d_out))


def _describe_codes(index: FaissIndex) -> CodecSpec:
    """Return the codec of an index; an unknown codec has the name of its faiss class."""
    if isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat):
        return CodecSpec("Flat")
    if isinstance(index, faiss.IndexIVFPQ):
        return CodecSpec("PQ", int(index.pq.M), int(index.pq.nbits))
    if isinstance(index, faiss.IndexIVFRaBitQ):
        return CodecSpec("RaBitQ", bits=int(index.rabitq.nb_bits))
    name = _SCALAR_NAMES.get(index.sq.qtype) if hasattr(index, "sq") else None
    return CodecSpec(name or type(index).__name__)


def _get_link_count(graph: FaissIndex) -> int:
    return int(graph.hnsw.nb_neighbors(0)) // 2


def _check_ids(path: Path, ivf_index: FaissIndex, n: int) -> None:
    """Check that the lists contain the ids 0 … n-1 of all vectors, in any order."""
    is_found = np.zeros(n, bool)
    for list_number in range(ivf_index.nlist):
        if list_size := ivf_index.invlists.list_size(list_number):
            ids = faiss.rev_swig_ptr(ivf_index.invlists.get_ids(list_number), list_size)
            if ids.min() < 0 or ids.max() >= n:
                raise InputError(
                    f"{path} has an id {ids.min() if ids.min() < 0 else ids.max()} among {n:,} vectors: "
                    "its ids must be the numbers of the passages, from 0 on"
                )
            is_found[ids] = True
    if not is_found.all():
        raise InputError(
            f"{path} has no vector of passage {int(is_found.argmin()):,}, and another twice: "
            "its ids must be the numbers of the passages, from 0 on"
        )


def _fits(recipe_spec: Any, file_spec: Any) -> bool:
    """Return whether a file's factory fits a recipe's; numbers that the recipe omits may have any
    value.
    """
    if recipe_spec is None or recipe_spec == file_spec:
        return True
    if not is_dataclass(recipe_spec) or type(recipe_spec) is not type(file_spec):
        return False
    # a file does not say how its codes or its rotation were trained
    unstored_field = "pieces" if isinstance(recipe_spec, TransformSpec) else "fast"
    return all(
        _fits(getattr(recipe_spec, field.name), getattr(file_spec, field.name))
        for field in fields(recipe_spec)
        if field.name != unstored_field
    )
