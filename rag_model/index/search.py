"""Search: one call for every index, safe from many threads with different settings.

Settings are arguments of the call (faiss's `SearchParameters`); the index is not changed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rag_model.errors import InputError
from rag_model.index.factory import Structure
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.files.setting import write_setting
from rag_model.index.files.vectors import VectorFiles
from rag_model.index.lists.training import lists_of
from rag_model.index.quality.question import check_question
from rag_model.index.recipe import REFINE, check_search
from rag_model.index.refine import rank_again

_MOST_MADE = 64  # settings of searches that are kept


class SearchIndex(Protocol):
    """An index that is searched by vectors: an index file, or the vectors themselves."""

    n: int  # vectors held; rows are 0 … n-1
    dim: int
    metric: Metric

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector, best first: (q, k) float32 scores, (q, k) int64 rows.

        Scores are inner products, or negated squared distances: larger is better. If an approximate index finds fewer
        than k, the rest is row -1 with score -inf.

        Args:
            vectors: (q, dim) float32, finite.
            k: 1 <= k <= n.
            parameters: `efSearch` of a graph; of lists `nprobe`, and `refine` if there is a refinement; the default is
            the index's own.

        Raises:
            UsageError: the vectors, `k` or a parameter do not fit the index.
        """
        ...


class IndexFile:
    """A `SearchIndex` read from a faiss file."""

    def __init__(
        self,
        path: Path,
        *,
        mmap: bool = True,
        defaults: Mapping[str, int] | None = None,
        vectors: Sequence[Path] = (),
    ) -> None:
        """Open `path`; see `open_index`."""
        self._path, self._index = path, engine.read(path, mmap=mmap)
        self._lists = lists_of(self._index)
        self.kind = _kind(path, self._index)
        self.lists = 0 if self._lists is None else int(self._lists.nlist)  # 0: it has none
        self.n, self.dim = int(self._index.ntotal), int(self._index.d)
        self.metric: Metric = engine.metric_of(self._index)
        self._files = VectorFiles.of(vectors, self.n, self.dim) if vectors else None
        own = _settings_of(self._index, self._lists) | ({"refine": REFINE} if vectors else {})
        check_search(defaults or {}, tuple(own))
        self.defaults = {**own, **(defaults or {})}
        self._made: dict[tuple[int, ...], Any] = {}  # faiss's parameter objects, which are costly to create

    @property
    def opened(self) -> FaissIndex:
        """The index as faiss opened it, to look into."""
        return self._index

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector; see `SearchIndex.search`."""
        vectors = check_question(vectors, k, self.n, self.dim)
        if parameters:
            check_search(parameters, tuple(self.defaults))
        parameters = self.defaults | parameters
        if self._files is None:
            return self._found(vectors, k, parameters)
        _, rows = self._found(vectors, min(k * parameters["refine"], self.n), parameters)
        return rank_again(self._files, self.metric, vectors, rows, k)

    def _found(self, vectors: Vectors, k: int, parameters: Mapping[str, int]) -> tuple[Vectors, Rows]:
        parameters = self._bounded(parameters, k)
        asked = tuple(parameters.values())
        settings = self._made.get(asked)
        if settings is None:
            if len(self._made) >= _MOST_MADE:  # requests choose parameters; the index's own are made again at once
                self._made.clear()
            settings = self._made[asked] = self._settings(parameters)
        damaged = f"{self._path} cannot be searched: it is damaged, fetch or build it again"
        with engine.guarded(InputError, damaged):
            scores, rows = self._index.search(vectors, k, params=settings)
        if rows.max(initial=-1) >= self.n or rows.min(initial=0) < -1:
            raise InputError(damaged)
        scores = scores if self.metric == "ip" else -scores
        return (np.where(rows < 0, np.float32(-np.inf), scores) if rows.min(initial=0) < 0 else scores), rows

    def _bounded(self, parameters: Mapping[str, int], k: int) -> dict[str, int]:
        """Return the parameters, none larger than finds all there is: faiss allocates what they ask for."""
        most = {"efSearch": self.n, "nprobe": self.lists, "refine": -(-self.n // k)}
        return {name: min(value, most[name]) for name, value in parameters.items()}

    def _settings(self, parameters: Mapping[str, int]) -> Any:
        """Return faiss's search parameters, nested like the index; each keeps a reference to the inner one."""
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
        if self._lists is None:
            return None
        settings = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])
        refined = isinstance(self._index, faiss.IndexRefine)
        base = faiss.downcast_index(self._index.base_index) if refined else self._index
        if isinstance(base, faiss.IndexPreTransform):
            settings = faiss.SearchParametersPreTransform(index_params=settings)
        if refined:
            settings = faiss.IndexRefineSearchParameters(k_factor=parameters["refine"], base_index_params=settings)
        return settings


def open_index(
    path: Path, *, mmap: bool = True, defaults: Mapping[str, int] | None = None, vectors: Sequence[Path] = ()
) -> IndexFile:
    """Open an index file to search it.

    Args:
        path: any faiss file of a graph, of inverted lists, or of plain vectors.
        mmap: map the file: it opens at once, and processes that search it share its memory.
        defaults: search parameters for calls without any; by default those written in the file.
        vectors: the corpus's `.npy` files, in row order: they rank the index's candidates again, `refine` times k for
        each query. Without them the index's own scores rank.

    Raises:
        InputError: the file is missing, truncated, or not an index that can be searched by inner product or L2; or the
        vectors are not those that it was built from.
        UsageError: a default does not apply to this index.
    """
    return IndexFile(path, mmap=mmap, defaults=defaults, vectors=vectors)


def set_default(path: Path, parameters: Mapping[str, int]) -> None:
    """Write search parameters into an index file, in place: plain faiss then uses them as defaults.

    Call it before the file is published, because its bytes change.

    Raises:
        InputError: the file is damaged, or has an unknown layout.
        UsageError: a parameter does not apply to this index.
    """
    index = engine.read(path, mmap=True)
    _kind(path, index)
    check_search(parameters, tuple(_settings_of(index, lists_of(index))))
    for name, value in parameters.items():
        write_setting(path, index, name, value)
    written = open_index(path).defaults
    if any(written[name] != value for name, value in parameters.items()):
        raise InputError(f"{path} does not keep {dict(parameters)}: build it again")


def _kind(path: Path, index: FaissIndex) -> Structure:
    if lists_of(index) is not None:
        return "ivf"
    if isinstance(index, faiss.IndexHNSW):
        return "hnsw"
    if isinstance(index, faiss.IndexFlat):
        return "exact"
    name = type(index).__name__
    raise InputError(f"{path} is an {name}, which bookwheel cannot search: build HNSW, IVF or Flat")


def _settings_of(index: FaissIndex, lists: FaissIndex | None) -> dict[str, int]:
    """Return the search parameters that an index takes, with those written in its file."""
    if isinstance(index, faiss.IndexHNSW):
        return {"efSearch": int(index.hnsw.efSearch)}
    if lists is None:
        return {}
    return {"nprobe": int(lists.nprobe)} | (
        {"refine": int(index.k_factor)} if isinstance(index, faiss.IndexRefine) else {}
    )
