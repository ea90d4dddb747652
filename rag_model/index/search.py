"""Search faiss files: any index, from many threads, with different settings for each call.

Settings are arguments of a call (faiss's `SearchParameters`) and do not change the index. The
defaults are in the file: efSearch follows the graph's arrays, nprobe is in the header of the lists,
and the refinement factor ends the file. `write_default_search` changes the defaults in place.
Source: `faiss/impl/index_write.cpp`.
"""

import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from rag_model.errors import InputError, UsageError
from rag_model.index.exact_search import check_queries, rerank
from rag_model.index.factory import Structure, parse_factory
from rag_model.index.files import engine
from rag_model.index.files.engine import UNUSED, FaissIndex, Metric, Rows, Vectors, faiss
from rag_model.index.files.layout import find_row_lists
from rag_model.index.files.vectors import open_vectors
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.index.kind import IndexEntry, IndexFiles, IndexOpener, RepresentationType, get_kind_of_entry
from rag_model.index.lists.training import apply_transforms, get_inverted_lists
from rag_model.index.recipe import REFINE_FACTOR, check_search_parameters, list_search_parameters
from rag_model.ranges import CachedFile

# header of inverted lists: d, n, two unused fields, is_trained, metric, number of lists; nprobe
# follows
_LISTS_HEADER = struct.Struct("<iqqq?iQ")
# If only byte ranges of the file are read, a search reads the ids of its hits in an additional
# round of requests, instead of all ids of the probed lists, if this saves more bytes.
_MIN_SAVED_BYTES = 256 << 10
_ID_BYTES = 8  # bytes of the id of an entry; the ids of a list follow its codes
_MAX_CACHED_PARAMETERS = 64  # maximum number of faiss parameter objects that an index caches
# nprobe is tuned for searches with k = `_TUNED_DEPTH`. The neighbours beyond this depth are in more
# lists, so for each further hit, lists with `_VECTORS_PER_HIT` vectors are added. With 6 the recall
# of IVF64 and IVF256 over 5,417 passages stays above .96 for every k; with 4 it falls to .92.
_TUNED_DEPTH = 20
_VECTORS_PER_HIT = 6
_BUILT_IN_KINDS = frozenset({"exact", "hnsw", "ivf"})  # kinds over vectors


def write_parameter(path: Path, index: FaissIndex, name: str, value: int) -> None:
    """Write one search parameter into an index file.

    Args:
        path: the file.
        index: the opened index of the file.
        name: efSearch of a graph, nprobe of lists, or refine of lists with a refinement.
        value: at least 1.

    Raises:
        InputError: the file has an unknown layout.
    """
    layout = {"efSearch": "<i", "nprobe": "<Q", "refine": "<f"}[name]
    size = struct.calcsize(layout)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        offset = _find_offset(path, data, index, name)
        if offset is None or struct.unpack(layout, data[offset : offset + size])[0] != _get_current_value(index, name):
            raise InputError(f"{path} has an unknown layout: {name} cannot be set in it, so build it again")
        data[offset : offset + size] = struct.pack(layout, value)
        data.flush()


def _get_current_value(index: FaissIndex, name: str) -> float:
    if name == "efSearch":
        return int(index.hnsw.efSearch)
    return int(faiss.extract_index_ivf(index).nprobe) if name == "nprobe" else float(index.k_factor)


def _find_offset(path: Path, data: mmap.mmap, index: FaissIndex, name: str) -> int | None:
    """Return the offset of a parameter in the file; None if it is not found."""
    if name == "efSearch":
        # efSearch follows the entry point, the top level and efConstruction
        return GraphFile.open(path).tail_offset + 12
    return _find_nprobe(data, index) if name == "nprobe" else len(data) - struct.calcsize("<f")


def _find_nprobe(data: mmap.mmap, index: FaissIndex) -> int | None:
    """Find the header of the lists by its bytes, because the transform before the header has many
    layouts.
    """
    ivf = faiss.extract_index_ivf(index)
    header = _LISTS_HEADER.pack(ivf.d, ivf.ntotal, UNUSED, UNUSED, ivf.is_trained, ivf.metric_type, ivf.nlist)
    header_offset = data.find(header)
    return None if header_offset < 0 else header_offset + len(header)


class VectorIndex(Protocol):
    """An index that is searched with vectors: an index file, or the vectors themselves."""

    n: int  # number of vectors; rows are 0 … n-1
    dim: int
    metric: Metric

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector: (q, k) float32 scores and (q, k) int64 rows.

        Scores are inner products, or negated squared distances, so larger is better. If fewer than
        k rows can be reached, the remaining entries are row -1 with score -inf.

        Args:
            vectors: (q, dim) float32, finite.
            k: 1 <= k <= n.
            parameters: `efSearch` of a graph, which is raised to k if it is less; `nprobe` of
                lists, which is raised for a k above 20; and `refine` if the index has a refinement.
                Parameters that are not given have the index's defaults.

        Raises:
            UsageError: the vectors, `k` or a parameter do not fit the index.
        """
        ...


class FaissFileIndex:
    """A `VectorIndex` read from a faiss file."""

    def __init__(
        self,
        path: Path,
        *,
        mmap: bool = True,
        defaults: Mapping[str, int] | None = None,
        vectors: Sequence[Path] = (),
        ranges: CachedFile | None = None,
    ) -> None:
        """Open an index file for search.

        Args:
            path: a faiss file of a graph, of inverted lists, or of plain vectors.
            mmap: map the file, so that it opens at once and processes that search it share memory.
            defaults: search parameters for calls without any; None uses those in the file.
            vectors: the corpus's `.npy` files, in row order; of `RemoteRowFiles`, only byte ranges
                are read. If they are given, `refine` times k candidates per query are reranked with
                them; otherwise the index's own scores rank.
            ranges: loads ranges of a file of inverted lists that is not completely on this disk.

        Raises:
            InputError: the file is missing, truncated, or not an index that can be searched by
                inner product or L2; or `vectors` are not those that it was built from.
            UsageError: the index has no search parameter of a name in `defaults`.
        """
        self._path, self._ranges = path, ranges
        self.faiss_index = engine.read_index(path, mmap=mmap or ranges is not None)
        self._ivf = get_inverted_lists(self.faiss_index)
        self._quantizer = None if self._ivf is None else faiss.downcast_index(self._ivf.quantizer)
        # If only byte ranges of the file are read: (lists,) offsets in the file at which the codes
        # and the ids of each list begin, and at which its ids end.
        self._code_starts = self._id_starts = self._id_ends = np.empty(0, np.int64)
        if ranges is not None and self._ivf is not None:
            list_offsets, entry_bytes = _locate_lists(path), int(self._ivf.code_size) + _ID_BYTES
            self._code_starts, self._id_ends = list_offsets[:-1], list_offsets[1:]
            self._id_starts = self._id_ends - _ID_BYTES * (np.diff(list_offsets) // entry_bytes)
        self.structure = _detect_structure(path, self.faiss_index)
        self.n_lists = 0 if self._ivf is None else int(self._ivf.nlist)  # 0 if not an IVF index
        self.n, self.dim = int(self.faiss_index.ntotal), int(self.faiss_index.d)
        self.metric: Metric = engine.get_metric(self.faiss_index)
        self._vector_files = open_vectors(vectors, self.n, self.dim) if vectors else None
        file_settings = _read_settings(self.faiss_index, self._ivf)
        file_settings |= {"refine": REFINE_FACTOR} if vectors else {}
        check_search_parameters(defaults or {}, tuple(file_settings))
        self.defaults = {**file_settings, **(defaults or {})}
        self._parameter_cache: dict[tuple[int, ...], Any] = {}  # creating faiss's objects is slow

    def search(self, vectors: Vectors, k: int, **parameters: int) -> tuple[Vectors, Rows]:
        """Return the k best rows of each vector; see `VectorIndex.search`."""
        vectors = check_queries(vectors, k, self.n, self.dim)
        if parameters:
            check_search_parameters(parameters, tuple(self.defaults))
        parameters = self.defaults | parameters
        n_candidates = k if self._vector_files is None else min(k * parameters["refine"], self.n)
        effective_parameters = self._adapt_parameters(parameters, k, n_candidates)
        scores, hit_rows = self._search_faiss(vectors, n_candidates, effective_parameters)
        # A query may have too few hits because its probed lists are short, or, in a graph, because
        # the search enters the bottom level at one of many duplicates, which are only linked to
        # each other.
        was_widened = False
        while (is_too_short := np.count_nonzero(hit_rows >= 0, axis=1) < k).any():
            wider_parameters = self._double_width(effective_parameters)
            if was_widened and wider_parameters == effective_parameters:
                break
            was_widened, effective_parameters = True, wider_parameters
            scores[is_too_short], hit_rows[is_too_short] = self._search_faiss(
                vectors[is_too_short], n_candidates, effective_parameters, from_entry_point=True
            )
        if self._vector_files is None:
            return scores, hit_rows
        return rerank(self._vector_files, self.metric, vectors, hit_rows, k)

    def _search_faiss(
        self, vectors: Vectors, k: int, parameters: Mapping[str, int], *, from_entry_point: bool = False
    ) -> tuple[Vectors, Rows]:
        cache_key = tuple(parameters.values())
        faiss_parameters = self._parameter_cache.get(cache_key)
        if faiss_parameters is None:
            # Requests may contain any parameters, so the cache has a limit. A full cache is
            # cleared; the objects of the defaults are soon built again.
            if len(self._parameter_cache) >= _MAX_CACHED_PARAMETERS:
                self._parameter_cache.clear()
            faiss_parameters = self._parameter_cache[cache_key] = self._build_faiss_parameters(parameters)
        damage_message = f"{self._path} cannot be searched: it is damaged, fetch or build it again"
        with engine.translate_errors(InputError, damage_message):
            if self._ranges is not None:
                scores, rows = self._search_ranges(self._ranges, vectors, k, faiss_parameters)
            elif from_entry_point and self.structure == "hnsw":
                scores, rows = engine.search_bottom_level(self.faiss_index, vectors, k, faiss_parameters)
            else:
                scores, rows = self.faiss_index.search(vectors, k, params=faiss_parameters)
        if rows.max(initial=-1) >= self.n or rows.min(initial=0) < -1:
            raise InputError(damage_message)
        scores = scores if self.metric == "ip" else -scores
        return (np.where(rows < 0, np.float32(-np.inf), scores) if rows.min(initial=0) < 0 else scores), rows

    def _search_ranges(
        self, ranges: CachedFile, vectors: Vectors, k: int, faiss_parameters: Any
    ) -> tuple[Vectors, Rows]:
        """Search inverted lists of which only byte ranges are on this disk.

        The nearest lists are loaded with all their ids, or without ids; then those of the hits are
        loaded in a second round of requests.
        """
        assert self._ivf is not None
        assert self._quantizer is not None
        vectors = apply_transforms(self.faiss_index, vectors)
        distances, list_numbers = self._quantizer.search(
            vectors, faiss_parameters.nprobe, params=faiss_parameters.quantizer_params
        )
        probed_lists = list_numbers[list_numbers >= 0]
        if len(vectors) > 1:
            probed_lists = np.unique(probed_lists)
        id_starts, id_ends = self._id_starts[probed_lists], self._id_ends[probed_lists]
        bytes_saved = (id_ends - id_starts).sum() - len(vectors) * k * ranges.layout.block_bytes
        reads_hit_ids = bytes_saved > _MIN_SAVED_BYTES
        with ranges.cache.hold():
            ranges.load(self._code_starts[probed_lists], id_starts if reads_hit_ids else id_ends)
            scores, hit_rows = np.empty((len(vectors), k), np.float32), np.empty((len(vectors), k), np.int64)
            arguments = (vectors, k, list_numbers, distances, scores, hit_rows)
            pointers = (faiss.swig_ptr(array) if isinstance(array, np.ndarray) else array for array in arguments)
            self._ivf.search_preassigned_c(len(vectors), *pointers, bool(reads_hit_ids), faiss_parameters)
            if reads_hit_ids:  # faiss returns a list and a position in it instead of each id
                is_hit = hit_rows >= 0
                hits = hit_rows[is_hit]
                id_offsets = self._id_starts[hits >> 32] + _ID_BYTES * (hits & 0xFFFFFFFF)
                ranges.load(id_offsets, id_offsets + _ID_BYTES)
                hit_rows[is_hit] = ranges.copy_loaded(id_offsets, _ID_BYTES).view(np.int64)[:, 0]
        return scores, hit_rows

    def _adapt_parameters(self, parameters: Mapping[str, int], k: int, n_candidates: int) -> dict[str, int]:
        """Return the parameters, raised for the depth of a search, and limited to the size of the
        index.

        faiss allocates memory in proportion to the parameters.
        """
        adapted_parameters = dict(parameters)
        if "efSearch" in adapted_parameters:
            adapted_parameters["efSearch"] = max(adapted_parameters["efSearch"], n_candidates)
        if "nprobe" in adapted_parameters:
            n_further_hits = max(0, k - _TUNED_DEPTH)
            adapted_parameters["nprobe"] += -(-_VECTORS_PER_HIT * n_further_hits * self.n_lists // self.n)
        upper_bounds = {**self._max_widths, "refine": -(-self.n // k)}
        return {name: min(value, upper_bounds[name]) for name, value in adapted_parameters.items()}

    @property
    def _max_widths(self) -> dict[str, int]:
        """The maximum of each parameter that widens a search."""
        return {"efSearch": self.n, "nprobe": self.n_lists}

    def _double_width(self, parameters: Mapping[str, int]) -> dict[str, int]:
        """Return the parameters with efSearch or nprobe doubled, up to the size of the index."""
        widths = self._max_widths
        return {name: min(2 * value, widths[name]) if name in widths else value for name, value in parameters.items()}

    def _build_faiss_parameters(self, parameters: Mapping[str, int]) -> Any:
        """Return faiss's search parameters, nested like the index."""
        if self.structure == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
        if self._ivf is None:
            return None
        nprobe = parameters["nprobe"]
        settings = faiss.SearchParametersIVF(nprobe=nprobe)
        # With a smaller efSearch, the graph over the centroids finds fewer than `nprobe` lists.
        if isinstance(self._quantizer, faiss.IndexHNSW):
            ef_search = max(int(self._quantizer.hnsw.efSearch), nprobe)
            settings = faiss.SearchParametersIVF(
                nprobe=nprobe, quantizer_params=faiss.SearchParametersHNSW(efSearch=ef_search)
            )
        # Ranges are searched in the lists themselves, without transform and refinement.
        if self._ranges is not None:
            return settings
        index = self.faiss_index
        has_refinement = isinstance(index, faiss.IndexRefine)
        base_index = faiss.downcast_index(index.base_index) if has_refinement else index
        if isinstance(base_index, faiss.IndexPreTransform):
            settings = faiss.SearchParametersPreTransform(index_params=settings)
        if has_refinement:
            settings = faiss.IndexRefineSearchParameters(k_factor=parameters["refine"], base_index_params=settings)
        return settings


open_index = FaissFileIndex


def write_default_search(path: Path, parameters: Mapping[str, int]) -> None:
    """Write default search parameters into an index file, in place; plain faiss uses them too.

    Call this before the file is published, because its bytes change.

    Raises:
        InputError: the file is damaged, or has an unknown layout.
        UsageError: a parameter does not apply to this index.
    """
    index = engine.read_index(path, mmap=True)
    _detect_structure(path, index)
    check_search_parameters(parameters, tuple(_read_settings(index, get_inverted_lists(index))))
    for name, setting in parameters.items():
        write_parameter(path, index, name, setting)
    stored_defaults = open_index(path).defaults
    if any(stored_defaults[name] != setting for name, setting in parameters.items()):
        raise InputError(f"{path} does not store the search parameters {dict(parameters)}: build it again")


def _locate_lists(path: Path) -> Rows:
    """Return the offset of each inverted list in a file, and the end of the last one."""
    row_lists = find_row_lists(path)
    if row_lists is None or row_lists.by_row:
        raise InputError(f"{path} is no file of inverted lists, so it cannot be searched by ranges: pull it")
    return row_lists.starts


def _detect_structure(path: Path, index: FaissIndex) -> Structure:
    if get_inverted_lists(index) is not None:
        return "ivf"
    if isinstance(index, faiss.IndexHNSW):
        return "hnsw"
    if isinstance(index, faiss.IndexFlat):
        return "exact"
    name = type(index).__name__
    raise InputError(f"{path} is an {name}, which bookwheel cannot search: build HNSW, IVF or Flat")


def _read_settings(index: FaissIndex, ivf_index: FaissIndex | None) -> dict[str, int]:
    """Return the search parameters that an index takes, with their values in the file."""
    if isinstance(index, faiss.IndexHNSW):
        return {"efSearch": int(index.hnsw.efSearch)}
    if ivf_index is None:
        return {}
    return {"nprobe": int(ivf_index.nprobe)} | (
        {"refine": int(index.k_factor)} if isinstance(index, faiss.IndexRefine) else {}
    )


class VectorOpener:
    """Opens faiss files for search."""

    represents: ClassVar[RepresentationType] = "vectors"

    def open(self, files: IndexFiles, entry: IndexEntry, *, mmap: bool = True) -> FaissFileIndex:
        """Open a faiss file, with the corpus's vectors if they rerank its candidates."""
        vectors: Sequence[Path] = files.rows() if entry.get("refine") == "vectors" else []
        if files.ranges is None:
            vectors = [*vectors]  # fetches the files that are in an object store
        files.pin_ranges()
        return open_index(files.index, mmap=mmap, defaults=entry["search"], vectors=vectors, ranges=files.ranges)

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Check efSearch, nprobe and refine: whole numbers from 1 to the number of vectors."""
        refine_parameter = ("refine",) if entry.get("refine") == "vectors" else ()
        check_search_parameters(
            parameters, (*list_search_parameters(parse_factory(str(entry["factory"]))), *refine_parameter)
        )
        for name, value in parameters.items():
            if value > entry["n"]:
                raise UsageError(f"{name} is {value:,}, but the index holds {entry['n']:,} vectors: give at most that")


def get_opener(entry: IndexEntry) -> IndexOpener:
    """Return the opener of an index by its manifest entry.

    The opener of a built-in kind over vectors does not import the modules that build an index.

    Raises:
        StoreError: no installed package provides the kind.
        UsageError: the entry is of format 1 and its factory is unknown.
    """
    return VectorOpener() if entry.get("kind") in _BUILT_IN_KINDS else get_kind_of_entry(entry)
