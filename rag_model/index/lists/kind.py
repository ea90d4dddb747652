"""The kinds `ivf` and `exact`: inverted lists of codes, and plain vectors.

The lists' centroids and the codec are trained once, on a sample. The vectors of each part are
encoded on their own, and their codes are sorted by list. The merge writes the index in faiss's
layout, list by list; a list consists of its slices of all parts, in row order. So the file has the
same bytes as if all parts had been added in turn to one index. Neither the index nor a list is held
in memory as a whole. `Flat` is built in the same way; its file has only a header and the vectors.

Reference: Jégou, Douze, Schmid. Product quantization for nearest neighbor search. PAMI 2011.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from rag_model.arrays import RowLists
from rag_model.errors import InputError, ResourceError
from rag_model.index.factory import IvfSpec, parse_factory
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, ListAssigner, Metric, Rows, Vectors, faiss
from rag_model.index.files.layout import find_row_lists
from rag_model.index.files.pieces import Opener
from rag_model.index.files.vectors import VectorFiles, find_equal_rows, map_vectors, sample_vectors
from rag_model.index.graphs.graph import score_targets
from rag_model.index.graphs.graph_file import write_storage
from rag_model.index.kind import PreviousPiece
from rag_model.index.lists.list_file import (
    BLOCK_BYTES,
    CodePieces,
    Codes,
    read_codes,
    write_codes,
    write_list_block,
    write_lists_head,
    write_refine_head,
    write_refine_tail,
)
from rag_model.index.lists.training import apply_transforms, continue_training, get_inverted_lists, train_index
from rag_model.index.plan import IndexStats
from rag_model.index.quality.health import compute_centroid_distance, measure_error
from rag_model.index.quality.results import DEFAULT_FLOOR, RecallFloor, compute_recall
from rag_model.index.recipe import PQ_SAMPLE, VectorPlan, count_lists
from rag_model.index.vector_kind import BYTES_PER_SECOND, KMEANS_ROUNDS, PRODUCTS_PER_SECOND, VectorKind
from rag_model.ranges import pack_bounds

# Sizes of the blocks that are verified if only byte ranges of the file are read. The codes of a
# probed list are always read as a whole, so their blocks may be large. The blocks of ids are
# smaller, because a search may read only the ids of its hits.
_MIN_BLOCK_BYTES, _MAX_CODE_BLOCK_BYTES, _MAX_ID_BLOCK_BYTES = 1 << 10, 32 << 10, 8 << 10
# Number of vectors from which a loss by codes is measured; at most twice as many are used.
LOSS_SAMPLE = 4_096
# Number of rows that faiss compares in one BLAS call. Adding blocks whose length is a multiple of
# it gives the same bytes as adding all rows at once.
_TILE_ROWS = 4096
# Codes alone change the order of near neighbours even if every list is searched: recall is .90 (p5
# .80) over 5,227 passages of Wikipedia at 1 byte per 4 dimensions, .79 (p5 .60) at 1 byte per 8,
# and lower in a large corpus. A search with codes trained on other data finds almost nothing.
# Reranked candidates (`Refine`) have the order of exact search, so `DEFAULT_FLOOR` applies to them.
QUANTISED_FLOOR = RecallFloor(mean=0.60, p5=0.30)
_QUANTISERS = ("PQ", "RaBitQ")  # lossy codecs in factory strings; scalar quantisers lose little
# `recalls` searches for so many new and so many old vectors; a recall is then exact to about .03.
_RECALL_QUERIES = 256
_MIN_VECTORS = 32  # with fewer new or old vectors, a recall is too uncertain
_RECALL_K = 10  # k of the recall@k that `recalls` measures
# Multiply-adds per second of one core that encodes vectors with a product quantizer.
_CODE_PRODUCTS_PER_SECOND = 1.4e10
_CODE_KMEANS_ROUNDS = 25
# With OPQ, codes are trained repeatedly: 4.7 to 5.0 times as long at 96 and 384 dimensions.
_OPQ_FACTOR = 4.8
_NEW_SHARE = 0.1  # assumed share of new vectors in a changed part; a month brings a few hundredths
# With fewer lists, encoding a vector again is faster than reading its stored code.
_MIN_LISTS_TO_REUSE = 1_024
_COARSE_GRAPH_COST = (380, 0.3)  # (a, b): a search of n centroids by graph compares a * n^b


class ListKind(VectorKind):
    """The kind `ivf`: `IVF1024,PQ48np`, `OPQ48_192,IVF65536_HNSW32,PQ48np`, `IVF4096,SQ8`."""

    name: ClassVar[str] = "ivf"
    VERSION: ClassVar[int] = 6
    # A search is estimated to read as many bytes for the id of a hit.
    block_bytes: ClassVar[int] = 4 << 10
    factories = re.compile("IVF|OPQ|PCA|RR")

    def floor(self, factory: str) -> RecallFloor:
        """Return the lowest accepted recall, which is lower for codes without a refinement."""
        codes_rank_alone = any(name in factory for name in _QUANTISERS) and "Refine" not in factory
        return QUANTISED_FLOOR if codes_rank_alone else DEFAULT_FLOOR

    def build_outline(self, path: Path) -> dict[str, Any] | None:
        """Return the ranges outside the lists, and the boundaries of blocks of codes and of ids.

        The result is None for a file without inverted lists; see `RangedKind`.
        """
        row_lists, file_bytes = find_row_lists(path), path.stat().st_size
        with path.open("rb") as file:
            has_refinement = file.read(4) == b"IxRF"
        if row_lists is None or row_lists.by_row or has_refinement:
            return None
        bounds = pack_bounds(_divide_lists(row_lists, file_bytes))
        return {"pinned": [[0, row_lists.start], [row_lists.end, file_bytes]], "bounds": bounds}

    def train(self, plan: VectorPlan, rows: Sequence[Path], out: Path) -> IndexStats:
        """Train centroids, rotation and codec on a sample of all parts; write the empty index.

        Memory holds the sample: train_sample x d float32.

        Raises:
            InputError: the vectors do not match the plan, or the sample holds a NaN or an infinity.
            ResourceError: memory ran out, or the file cannot be written.
        """
        sample = sample_vectors(rows, plan.n, plan.d, plan.train_sample, plan.seed)
        index = train_index(plan, sample)
        engine.write_index(index, out)
        sample_losses = _compute_losses(plan, index, sample[:: -(-len(sample) // LOSS_SAMPLE)])
        return {"sample": len(sample), "bytes": out.stat().st_size, "losses": sample_losses}

    def losses(self, plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the losses of vectors, (m, d) float32: `lists` and `codes`.

        `lists` is the distance to the lists' centroids, and `codes` the error of the codes. RaBitQ
        has no `codes` loss: its codes estimate inner products and cannot be decoded.

        Raises:
            InputError: the trained file is damaged.
        """
        return _compute_losses(plan, engine.read_index(trained), vectors)

    def recalls(
        self, plan: VectorPlan, trained: Path, new_vectors: Vectors, old_vectors: Vectors
    ) -> tuple[float, float] | None:
        """Return the recall@10 of new and of old vectors with the trained lists; None if either are
        too few.
        """
        if min(len(new_vectors), len(old_vectors)) < _MIN_VECTORS:
            return None
        index, all_vectors, recalls = engine.read_index(trained), np.concatenate([new_vectors, old_vectors]), []
        with engine.translate_errors(InputError, f"{trained} could not be searched: build it again"):
            index.add(all_vectors)
            for queries in (new_vectors[:_RECALL_QUERIES], old_vectors[:_RECALL_QUERIES]):
                scores, exact_rows = faiss.knn(
                    queries, all_vectors, _RECALL_K, metric=engine.to_faiss_metric(plan.metric)
                )
                exact_scores = scores if plan.metric == "ip" else -scores
                # Any vector with the score of a true neighbour is correct.
                rescore = partial(_score_rows, queries, all_vectors, plan.metric)
                recalls.append(
                    compute_recall(index.search(queries, _RECALL_K)[1], exact_rows, exact_scores, _RECALL_K, rescore)
                )
        new_recall, old_recall = (round(float(recall.mean()), 4) for recall in recalls)
        return new_recall, old_recall

    def follow(self, plan: VectorPlan, trained: Path, rows: Sequence[Path], out: Path) -> IndexStats:
        """Adapt the lists and the codec of a trained file to the current vectors; keep its
        rotation.

        Memory holds the sample, as in `train`.

        Raises:
            InputError: the trained file is damaged, the vectors do not match the plan, or the
                sample holds a NaN or an infinity.
            ResourceError: memory ran out, or the file cannot be written.
        """
        sample = sample_vectors(rows, plan.n, plan.d, plan.train_sample, plan.seed)
        index = engine.read_index(trained)
        base_index = _without_refinement(index)
        with engine.translate_errors(
            ResourceError, f"lists of {plan.factory} could not be moved: run with --debug for the cause"
        ):
            continue_training(get_inverted_lists(base_index), apply_transforms(base_index, sample), plan.seed)
        engine.write_index(index, out)
        sample_losses = _compute_losses(plan, index, sample[:: -(-len(sample) // LOSS_SAMPLE)])
        return {"sample": len(sample), "bytes": out.stat().st_size, "losses": sample_losses}

    def scatter(self, plan: VectorPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Encode the vectors of a part and write the codes sorted by list; see `carry`."""
        return self.carry(plan, trained, rows, number, (), out)

    def carries(self, plan: VectorPlan) -> bool:
        """Return whether encoding is slow, as it is with product codes or with many lists."""
        factory = parse_factory(plan.factory)
        return isinstance(factory, IvfSpec) and (
            factory.codes.pieces is not None or count_lists(plan) >= _MIN_LISTS_TO_REUSE
        )

    def carry(
        self,
        plan: VectorPlan,
        trained: Path,
        rows: Path,
        number: int,
        previous_pieces: Sequence[PreviousPiece],
        out: Path,
    ) -> IndexStats:
        """Encode the vectors of part `number` block by block, and write the codes sorted by list.

        The codes of vectors in `previous_pieces` are copied instead of computed; after a month,
        these are nearly all vectors. Memory holds two copies of the part's codes. `Flat` only
        checks the vectors, because there is nothing to sort.

        Raises:
            InputError: a file is damaged or of another dimension, a row holds a NaN or an infinity,
                or a previous piece is missing or damaged.
            ResourceError: memory ran out, or the file cannot be written.
        """
        files, index = VectorFiles([rows]), engine.read_index(trained)
        if files.dim != plan.d:
            raise InputError(f"{rows} has {files.dim} dimensions, the index has {plan.d}: encode both with one encoder")
        base_index = _without_refinement(index)
        list_numbers, codes = _allocate_codes(base_index, files.n)
        for previous_piece in previous_pieces if codes.shape[1] else ():
            _copy_previous_codes(plan, trained, rows, previous_piece, list_numbers, codes)
        with engine.translate_errors(
            ResourceError, f"part {number} of {plan.factory} could not be encoded: run with --debug for the cause"
        ):
            n_encoded = _encode_new_vectors(base_index, files, list_numbers, codes)
        write_codes(plan, trained, number, list_numbers, codes, out)
        return {"rows": files.n, "encoded": n_encoded, "bytes": out.stat().st_size}

    def merge(
        self,
        plan: VectorPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> IndexStats:
        """Write the index, with the same bytes as if all parts were added in turn.

        Memory holds two copies of the trained index, a block of `BLOCK_BYTES`, one part's slice of
        the block, and 8 bytes per part and block.

        Raises:
            InputError: a piece is missing, truncated, of another build, or has another number of
                rows than its part.
            ResourceError: memory ran out, or the file cannot be written.
        """
        files, index = VectorFiles.open_checked(rows, plan.n, plan.d), engine.read_index(trained)
        part_starts = [0, *accumulate(VectorFiles([path]).n for path in rows)]
        code_pieces = CodePieces(plan, trained, scattered, part_starts)
        try:
            with out.open("wb", buffering=1 << 20) as file:
                _write_index(file, index, code_pieces, files)
        except OSError as error:
            raise ResourceError(f"cannot write {out}: {error.strerror}") from error
        return {"rows": plan.n, "bytes": out.stat().st_size}

    def seconds(self, plan: VectorPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return the estimated seconds of one task of a stage on one core."""
        n_lists = n_compared = count_lists(plan)
        factory = parse_factory(plan.factory)
        n_pieces = factory.codes.pieces if isinstance(factory, IvfSpec) else None
        code_seconds = (
            (1 << factory.codes.bits) / _CODE_PRODUCTS_PER_SECOND if isinstance(factory, IvfSpec) and n_pieces else 0.0
        )
        if stage == "train":
            n_points = min(plan.train_sample, PQ_SAMPLE)
            n_rounds = _CODE_KMEANS_ROUNDS * (_OPQ_FACTOR if "OPQ" in plan.factory else 1)
            training_seconds = (
                KMEANS_ROUNDS * plan.train_sample * n_lists / PRODUCTS_PER_SECOND + n_rounds * n_points * code_seconds
            ) * plan.d
            return 1 if inherited else 0.1 + training_seconds
        if stage == "scatter":  # size / (2 d) rows, each compared with lists x d numbers
            if isinstance(factory, IvfSpec) and factory.quantizer_links:
                n_compared = min(n_lists, int(_COARSE_GRAPH_COST[0] * n_lists ** _COARSE_GRAPH_COST[1]))
            # A parent's rows and piece are read too.
            read_factor, new_share = (3, _NEW_SHARE) if inherited else (1, 1)
            return read_factor * size / BYTES_PER_SECOND + new_share * size / 2 * (
                n_compared / PRODUCTS_PER_SECOND + code_seconds
            )
        return 0.1 * plan.n * plan.d / BYTES_PER_SECOND


class ExactKind(ListKind):
    """The kind `exact`: `Flat`, built like inverted lists, as one list without codes."""

    name: ClassVar[str] = "exact"
    factories = re.compile(r"Flat\Z")

    def recalls(
        self, plan: VectorPlan, trained: Path, new_vectors: Vectors, old_vectors: Vectors
    ) -> tuple[float, float] | None:
        """Return None: a search compares all vectors, so new vectors have the recall of old
        ones.
        """
        return None


def _without_refinement(index: FaissIndex) -> FaissIndex:
    """Return the index without its refinement, if it has one."""
    return faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index


def _divide_lists(lists: RowLists, file_bytes: int) -> list[int]:
    """Return block boundaries: the codes and the ids of a list are separate blocks.

    Long blocks are divided evenly, and blocks below `_MIN_BLOCK_BYTES` join the next one.
    """
    code_ends = lists.starts[:-1] + lists.lengths * lists.code_bytes
    section_ends = np.stack([code_ends, lists.starts[1:]], axis=1).ravel().tolist()
    bounds = [0]
    for end, max_bytes in [
        (lists.start, _MAX_CODE_BLOCK_BYTES),
        *zip(section_ends, cycle((_MAX_CODE_BLOCK_BYTES, _MAX_ID_BLOCK_BYTES))),
        (file_bytes, _MAX_CODE_BLOCK_BYTES),
    ]:
        start, n_blocks = bounds[-1], -(-(end - bounds[-1]) // max_bytes)
        if end - start >= _MIN_BLOCK_BYTES:
            bounds += [start + (end - start) * i // n_blocks for i in range(1, n_blocks + 1)]
    # The rest of the file is too short for a block, so it joins the last one.
    return bounds if bounds[-1] == file_bytes else [*bounds[: max(1, len(bounds) - 1)], file_bytes]


def _compute_losses(plan: VectorPlan, index: FaissIndex, vectors: Vectors) -> dict[str, float]:
    base_index = _without_refinement(index)
    ivf_index = get_inverted_lists(base_index)
    if ivf_index is None:
        return {}
    list_vectors = apply_transforms(base_index, vectors)
    # (m,) -> (m, d)
    centroids = faiss.downcast_index(ivf_index.quantizer).reconstruct_batch(ListAssigner(ivf_index)(list_vectors))
    losses_by_name = {"lists": compute_centroid_distance(list_vectors, centroids, plan.metric)}
    if isinstance(ivf_index, faiss.IndexIVFPQ | faiss.IndexIVFScalarQuantizer):
        losses_by_name["codes"] = measure_error(vectors, base_index.sa_decode(base_index.sa_encode(vectors)))
    return {name: float(f"{loss:.4g}") for name, loss in losses_by_name.items()}


def _allocate_codes(base_index: FaissIndex, n: int) -> tuple[Rows, Codes]:
    """Return (n,) list numbers, all -1, and empty codes, (n, bytes per code)."""
    ivf_index = get_inverted_lists(base_index)
    return np.full(n, -1), np.empty((n, 0 if ivf_index is None else ivf_index.code_size), np.uint8)


def _copy_previous_codes(
    plan: VectorPlan, trained: Path, path: Path, previous_piece: PreviousPiece, lists: Rows, codes: Codes
) -> None:
    """Copy the lists and the codes of those vectors in `path` that a previous piece has too."""
    equal_previous_rows = find_equal_rows(path, previous_piece.rows)
    n_rows, code_bytes = len(map_vectors(previous_piece.rows)), codes.shape[1]
    previous_codes = read_codes(plan, trained, previous_piece.piece, previous_piece.number, n_rows, code_bytes)
    reused_rows = np.flatnonzero(equal_previous_rows >= 0)
    lists[reused_rows], codes[reused_rows] = (array[equal_previous_rows[reused_rows]] for array in previous_codes)


def _encode_new_vectors(base_index: FaissIndex, files: VectorFiles, lists: Rows, codes: Codes) -> int:
    """Compute the list and the code of each vector whose list is -1, as faiss does; return the
    number of these vectors.
    """
    ivf_index, n_encoded = get_inverted_lists(base_index), 0
    assigner = None if ivf_index is None else ListAssigner(ivf_index)
    for first_row, block in files.blocks(max(1, BLOCK_BYTES // (4 * files.dim * _TILE_ROWS)) * _TILE_ROWS):
        new_rows = first_row + np.flatnonzero(lists[first_row : first_row + len(block)] < 0)
        n_encoded += len(new_rows)
        if ivf_index is None or assigner is None:
            lists[new_rows] = 0
        elif len(new_rows):
            vectors = apply_transforms(
                base_index, _pad_selection(block, new_rows - first_row, -(-engine.MIN_BLAS_SIZE // ivf_index.d))
            )
            lists[new_rows] = assigner(vectors)[: len(new_rows)]
            codes[new_rows] = _encode_vectors(ivf_index, vectors[: len(new_rows)], lists[new_rows])
    return n_encoded


def _pad_selection(block: Vectors, block_rows: Rows, min_rows: int) -> Vectors:
    """Return rows of a block, (m, d), repeated up to `min_rows` rows.

    With fewer rows, faiss does not use matrix products, and rounds differently than for the whole
    block.
    """
    if len(block_rows) == len(block):
        return block
    return block[np.resize(block_rows, max(len(block_rows), min(min_rows, len(block))))]


def _encode_vectors(ivf_index: FaissIndex, vectors: Vectors, list_numbers: Rows) -> Codes:
    codes = np.empty((len(vectors), ivf_index.code_size), np.uint8)
    ivf_index.encode_vectors(len(vectors), *map(faiss.swig_ptr, (vectors, list_numbers, codes)))
    return codes


def _write_index(file: BinaryIO, index: FaissIndex, code_pieces: CodePieces, files: VectorFiles) -> None:
    refiner = index if isinstance(index, faiss.IndexRefine) else None
    base_index = _without_refinement(index)
    if refiner is not None:
        write_refine_head(file, refiner, files.n)
    _write_base(file, base_index, code_pieces, files)
    if refiner is not None:
        write_storage(file, faiss.downcast_index(refiner.refine_index), files.n, (block for _, block in files.blocks()))
        write_refine_tail(file, refiner)


def _write_base(file: BinaryIO, index: FaissIndex, code_pieces: CodePieces, files: VectorFiles) -> None:
    ivf_index = get_inverted_lists(index)
    list_sizes = code_pieces.count_list_sizes(1 if ivf_index is None else ivf_index.nlist)
    if ivf_index is None:
        write_storage(file, index, files.n, (block for _, block in files.blocks()))
        return
    write_lists_head(file, index, list_sizes)
    _write_lists(file, code_pieces, list_sizes, int(ivf_index.code_size) + 8)


def _write_lists(file: BinaryIO, code_pieces: CodePieces, sizes: Rows, vector_bytes: int) -> None:
    """Write all lists in blocks of `BLOCK_BYTES`; write a longer list in slices."""
    n_rows = max(1, BLOCK_BYTES // vector_bytes)
    block_borders = _divide_into_blocks(sizes, n_rows)
    block_starts = code_pieces.find_list_starts(block_borders)
    # (lists,) -> (blocks,)
    for block_index, block_rows in enumerate(np.add.reduceat(sizes, block_borders[:-1]).tolist()):
        entry_ranges = block_starts[:, block_index : block_index + 2]  # (parts, 2)
        if block_rows > n_rows:
            for slice_column in (2, 1):  # first the codes of the block, then its ids
                for slices in code_pieces.iter_slices(entry_ranges, n_rows):
                    file.write(np.ascontiguousarray(slices[slice_column]).data)
        elif block_rows:
            write_list_block(file, *code_pieces.read_block(entry_ranges, vector_bytes - 8))


def _divide_into_blocks(list_sizes: Rows, n_rows: int) -> Rows:
    """Divide the lists into blocks of at most `n_rows` vectors, or of one longer list.

    Return the first list of each block, and the number of lists.
    """
    block_borders, block_rows = [0], 0
    for list_number, list_size in enumerate(list_sizes.tolist()):
        if block_rows and block_rows + list_size > n_rows:
            block_borders.append(list_number)
            block_rows = 0
        block_rows += list_size
    return np.array([*block_borders, len(list_sizes)])


def _score_rows(queries: Vectors, vectors: Vectors, metric: Metric, query_numbers: Rows, hit_rows: Rows) -> Vectors:
    """Return exact scores of the queries `query_numbers`, (m,), with their `hit_rows`, (m, k)."""
    return score_targets(queries[query_numbers], vectors, hit_rows, metric)


KIND = ListKind()
EXACT_KIND = ExactKind()
