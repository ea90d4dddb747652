"""Inverted lists (IVF-PQ and similar): trained once on a sample, encoded by part, merged exactly.

A part's codes are sorted by list. The merge writes the index in faiss's layout, list by list, each with its slice of
every part in row order: the same codes and ids in the same places as in one index to which all parts were added in
turn, so the distances, ids and bytes are the same. Neither the index nor a list is held in memory as a whole.
`Flat` is built in the same way: a header and the vectors.

Reference: Jégou, Douze, Schmid. Product quantization for nearest neighbor search. PAMI 2011.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rag_model.errors import InputError, ResourceError
from rag_model.index.carrying import EarlierPiece, equal_rows
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Rows, Vectors, faiss
from rag_model.index.files.pieces import Opener
from rag_model.index.files.vectors import VectorFiles, map_vectors
from rag_model.index.gpu import Assigner
from rag_model.index.graphs.graph_file import write_storage
from rag_model.index.lists.coded import Coded, Codes, read_coded, write_coded
from rag_model.index.lists.list_file import write_list_block, write_lists_head, write_refine_head, write_refine_tail
from rag_model.index.lists.training import lists_of, move, trained_on
from rag_model.index.plan import Facts
from rag_model.index.quality.losses import distance, relative_error
from rag_model.index.recipe import VectorPlan

VERSION = 4
LOSSES = 4_096  # vectors of the sample, at most twice as many, on which `losses` are measured
BLOCK_BYTES = 32 << 20  # bytes of lists that are written at once
_TILE = 4096  # rows per BLAS call of faiss: blocks of multiples of it round like one `add` of all rows


def train(plan: VectorPlan, vectors: Sequence[Path], out: Path) -> Facts:
    """Train centroids, rotation and codes on a sample of all parts; write the empty index that the parts share.

    Holds the sample in memory: train_sample x d float32.

    Raises:
        InputError: the vectors are not the plan's, or the sample holds a NaN or an infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    sample = VectorFiles.of(vectors, plan.n, plan.d).sample(plan.train_sample, plan.seed)
    index = trained_on(plan, sample)
    engine.write(index, out)
    lost = _losses(plan, index, sample[:: -(-len(sample) // LOSSES)])
    return {"sample": len(sample), "bytes": out.stat().st_size, "losses": lost}


def follow(plan: VectorPlan, trained: Path, vectors: Sequence[Path], out: Path) -> Facts:
    """Adapt a trained file's lists and codes to the current vectors; a rotation is not changed.

    Holds the sample in memory, as `train` does.

    Raises:
        InputError: the trained file is damaged, the vectors are not the plan's, or the sample holds a NaN or an
        infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    sample = VectorFiles.of(vectors, plan.n, plan.d).sample(plan.train_sample, plan.seed)
    index = engine.read(trained)
    base = _base(index)
    with engine.guarded(ResourceError, f"lists of {plan.factory} could not be moved: run with --debug for the cause"):
        move(lists_of(base), _transformed(base, sample), plan.seed)
    engine.write(index, out)
    lost = _losses(plan, index, sample[:: -(-len(sample) // LOSSES)])
    return {"sample": len(sample), "bytes": out.stat().st_size, "losses": lost}


def losses(plan: VectorPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
    """Return how far vectors, (m, d) float32, lie from their lists' centroids, and the error of their `codes`.

    RaBitQ has no `codes` error: its codes estimate inner products and cannot be decoded.

    Raises:
        InputError: the trained file is damaged.
    """
    return _losses(plan, engine.read(trained), vectors)


def scatter(
    plan: VectorPlan, trained: Path, vectors: Path, number: int, out: Path, earlier: Sequence[EarlierPiece] = ()
) -> Facts:
    """Encode the vectors of part `number` block by block, and write the codes sorted by list.

    Vectors that `earlier` pieces hold as well are not encoded again: the bytes are the same, and a month later nearly
    all of them are there. Holds the part's codes twice. For `Flat` the vectors are only checked: there is nothing to
    sort.

    Raises:
        InputError: a file is damaged, of another dimension, or a row holds a NaN or an infinity; or an earlier piece
            is missing or damaged.
        ResourceError: memory ran out, or the file cannot be written.
    """
    files, index = VectorFiles([vectors]), engine.read(trained)
    if files.dim != plan.d:
        raise InputError(f"{vectors} has {files.dim} dimensions, the index has {plan.d}: encode both with one encoder")
    base = _base(index)
    lists, codes = _unknown(base, files.n)
    for one in earlier if codes.shape[1] else ():
        _take(plan, trained, vectors, one, lists, codes)
    with engine.guarded(
        ResourceError, f"part {number} of {plan.factory} could not be coded: run with --debug for the cause"
    ):
        encoded = _encode(base, files, lists, codes)
    write_coded(plan, trained, number, lists, codes, out)
    return {"rows": files.n, "encoded": encoded, "bytes": out.stat().st_size}


def merge(
    plan: VectorPlan,
    trained: Path,
    vectors: Sequence[Path],
    scattered: Sequence[Opener],
    shards: Sequence[Opener],
    out: Path,
) -> Facts:
    """Write the index: the same bytes as if all parts were added to the trained index in turn.

    Holds the trained index twice, a block of `BLOCK_BYTES`, one part's slice of it, and 8 bytes per part and block.

    Raises:
        InputError: a piece is missing, truncated, of another build, or holds another number of rows than its part.
        ResourceError: memory ran out, or the file cannot be written.
    """
    files, index = VectorFiles.of(vectors, plan.n, plan.d), engine.read(trained)
    starts = [0, *accumulate(VectorFiles([path]).n for path in vectors)]
    coded = Coded(plan, trained, scattered, starts)
    try:
        with out.open("wb", buffering=1 << 20) as file:
            _write(file, index, coded, files)
    except OSError as failed:
        raise ResourceError(f"cannot write {out}: {failed.strerror}") from failed
    return {"rows": plan.n, "bytes": out.stat().st_size}


def _base(index: FaissIndex) -> FaissIndex:
    """Return the index without its refinement, if it has one."""
    return faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index


def _losses(plan: VectorPlan, index: FaissIndex, vectors: Vectors) -> dict[str, float]:
    base = _base(index)
    lists = lists_of(base)
    if lists is None:
        return {}
    inner = _transformed(base, vectors)
    centroids = faiss.downcast_index(lists.quantizer).reconstruct_batch(Assigner(lists)(inner))  # (m,) -> (m, d)
    found = {"lists": distance(inner, centroids, plan.metric)}
    if isinstance(lists, faiss.IndexIVFPQ | faiss.IndexIVFScalarQuantizer):
        found["codes"] = relative_error(vectors, base.sa_decode(base.sa_encode(vectors)))
    return {name: float(f"{loss:.4g}") for name, loss in found.items()}


def _unknown(base: FaissIndex, n: int) -> tuple[Rows, Codes]:
    """Return the lists of n vectors, (n,), each -1, and room for their codes, (n, bytes per code)."""
    lists = lists_of(base)
    return np.full(n, -1), np.empty((n, 0 if lists is None else lists.code_size), np.uint8)


def _take(plan: VectorPlan, trained: Path, vectors: Path, earlier: EarlierPiece, lists: Rows, codes: Codes) -> None:
    """Write lists and codes of the vectors that an earlier part has too."""
    found = equal_rows(vectors, earlier.rows)
    rows, size = len(map_vectors(earlier.rows)), codes.shape[1]
    held = read_coded(plan, trained, earlier.piece, earlier.number, rows, size)
    here = np.flatnonzero(found >= 0)
    lists[here], codes[here] = (of[found[here]] for of in held)


def _encode(base: FaissIndex, files: VectorFiles, lists: Rows, codes: Codes) -> int:
    """Write list and code of each vector whose list is -1, as `index.add` would compute them; return how many."""
    inverted, encoded = lists_of(base), 0
    assign = None if inverted is None else Assigner(inverted)
    for first, block in files.blocks(max(1, BLOCK_BYTES // (4 * files.dim * _TILE)) * _TILE):
        new = first + np.flatnonzero(lists[first : first + len(block)] < 0)
        encoded += len(new)
        if inverted is None or assign is None:
            lists[new] = 0
        elif len(new):
            vectors = _transformed(base, _chosen(block, new - first, -(-engine.PRODUCTS_FROM // inverted.d)))
            lists[new] = assign(vectors)[: len(new)]
            codes[new] = _encoded(inverted, vectors[: len(new)], lists[new])
    return encoded


def _chosen(block: Vectors, rows: Rows, least: int) -> Vectors:
    """Return some rows of a block, (m, d), and behind them as many more as make `least`.

    Of fewer faiss would compute no products of matrices, and so round otherwise than for the whole block.
    """
    if len(rows) == len(block):
        return block
    return block[np.resize(rows, max(len(rows), min(least, len(block))))]


def _encoded(lists: FaissIndex, vectors: Vectors, numbers: Rows) -> Codes:
    codes = np.empty((len(vectors), lists.code_size), np.uint8)
    lists.encode_vectors(len(vectors), *map(faiss.swig_ptr, (vectors, numbers, codes)))
    return codes


def _transformed(index: FaissIndex, vectors: Vectors) -> Vectors:
    """Return the vectors after the index's transforms, if it has any: (m, d) -> (m, d')."""
    if isinstance(index, faiss.IndexPreTransform):
        for number in range(index.chain.size()):
            vectors = faiss.downcast_VectorTransform(index.chain.at(number)).apply(vectors)
    return vectors


def _write(file: BinaryIO, index: FaissIndex, coded: Coded, files: VectorFiles) -> None:
    refine = index if isinstance(index, faiss.IndexRefine) else None
    base = _base(index)
    if refine is not None:
        write_refine_head(file, refine, files.n)
    _write_base(file, base, coded, files)
    if refine is not None:
        write_storage(file, faiss.downcast_index(refine.refine_index), files.n, (block for _, block in files.blocks()))
        write_refine_tail(file, refine)


def _write_base(file: BinaryIO, index: FaissIndex, coded: Coded, files: VectorFiles) -> None:
    lists = lists_of(index)
    sizes = coded.sizes(1 if lists is None else lists.nlist)
    if lists is None:
        write_storage(file, index, files.n, (block for _, block in files.blocks()))
        return
    write_lists_head(file, index, sizes)
    _write_lists(file, coded, sizes, int(lists.code_size) + 8)


def _write_lists(file: BinaryIO, coded: Coded, sizes: Rows, width: int) -> None:
    """Write all lists in blocks of `BLOCK_BYTES`; a longer list is its own block, written in slices."""
    rows = max(1, BLOCK_BYTES // width)
    borders = _borders(sizes, rows)
    cuts = coded.cuts(borders)
    for number, held in enumerate(np.add.reduceat(sizes, borders[:-1]).tolist()):  # (lists,) -> (blocks,)
        block = cuts[:, number : number + 2]  # (parts, 2)
        if held > rows:
            for column in (2, 1):  # all codes, then all ids
                for slices in coded.slices(block, rows):
                    file.write(np.ascontiguousarray(slices[column]).data)
        elif held:
            write_list_block(file, *coded.block(block, width - 8))


def _borders(sizes: Rows, rows: int) -> Rows:
    """Return the starts of blocks of at most `rows` vectors, or of one list, and the end."""
    borders, held = [0], 0
    for number, size in enumerate(sizes.tolist()):
        if held and held + size > rows:
            borders.append(number)
            held = 0
        held += size
    return np.array([*borders, len(sizes)])
