"""Inverted lists (IVF-PQ and kin): trained once on a sample, added by part, merged exactly.

Every shard is a copy of one trained index with one part's vectors added under local ids. Merging appends the
shards' lists in row order and shifts their ids, so the result holds the same codes in the same places as one
index to which all parts were added in turn: same distances, same ids, same bytes. `Flat` is built the same
way: one list, no codes.

Reference: Jégou, Douze, Schmid. Product quantization for nearest neighbor search. PAMI 2011.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.errors import InputError, ResourceError
from rag_model.index import engine
from rag_model.index.engine import faiss
from rag_model.index.recipe import Facts, IndexPlan
from rag_model.index.vectors import VectorFiles

VERSION = 1
OPQ_ROUNDS = 10  # faiss's 50 cost five times the time for no recall that could be measured


def reads(plan: IndexPlan, parts: int) -> list[tuple[int, ...]]:
    """Return the parts that each shard reads: shard i is part i."""
    return [(part,) for part in range(parts)]


def train(plan: IndexPlan, vectors: Sequence[Path], out: Path) -> Facts:
    """Train centroids, rotation and codes on a sample of all parts; write the empty index shards start from.

    Holds the sample in memory: train_sample x d float32.

    Raises:
        InputError: the vectors are not the plan's, or hold a NaN or an infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    sample = VectorFiles.of(vectors, plan.n, plan.d).sample(plan.train_sample, plan.seed)
    index = empty(plan, sample)
    engine.write(index, out)
    return {"sample": len(sample), "bytes": out.stat().st_size}


def empty(plan: IndexPlan, sample: engine.Vectors) -> engine.FaissIndex:
    """Return an index trained on `sample`, (m, d) float32, that holds no vector yet."""
    sentence = f"{plan.factory} could not be trained on {len(sample)} vectors: use a smaller one"
    with engine.guarded(ResourceError, sentence):
        index = faiss.index_factory(plan.d, plan.factory, engine.metric_code(plan.metric))
        kept = _set_training(index, plan.seed)
        index.train(sample)
    del kept
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.nprobe = plan.search["nprobe"]  # in the file, so plain faiss searches as the plan says
    return index


def shard(plan: IndexPlan, trained: Path, vectors: Sequence[Path], number: int, out: Path) -> Facts:
    """Add one part's vectors to a copy of the trained index, under ids from 0, block by block.

    Raises:
        InputError: a file is damaged, or a row holds a NaN or an infinity.
        ResourceError: memory ran out, or the file cannot be written.
    """
    index = engine.read(trained)
    for _, block in VectorFiles(vectors).blocks():
        if block.shape[1] != index.d:
            raise InputError(f"{vectors[0]} has {block.shape[1]} dimensions where the index has {index.d}")
        with engine.guarded(
            ResourceError, f"shard {number} of {plan.factory} could not be built: see the cause with --debug"
        ):
            index.add(block)
    engine.write(index, out)
    return {"rows": int(index.ntotal), "bytes": out.stat().st_size}


def merge(plan: IndexPlan, trained: Path, vectors: Sequence[Path], shards: Sequence[Path], out: Path) -> Facts:
    """Append the shards, in row order, to the trained index: equal to adding all vectors to it in that order.

    Holds the whole index and one shard in memory.

    Raises:
        InputError: a shard is damaged, of another training, or holds another number of rows than its part.
        ResourceError: memory ran out, or the file cannot be written.
    """
    index = engine.read(trained)
    for vector_file, path in zip(vectors, shards, strict=True):
        other = engine.read(path)
        rows = VectorFiles([vector_file]).n
        if other.ntotal != rows:
            raise InputError(
                f"shard {path} holds {other.ntotal} vectors where {vector_file} has {rows}: build it again"
            )
        with engine.guarded(InputError, f"shard {path} was not made from {trained}: build it again"):
            index.check_compatible_for_merge(other)
            index.merge_from(other, 0 if plan.kind == "exact" else int(index.ntotal))
    if index.ntotal != plan.n:
        raise InputError(f"the shards hold {index.ntotal} vectors where the plan says {plan.n}: plan the index anew")
    engine.write(index, out)
    return {"rows": plan.n, "bytes": out.stat().st_size} | _balance(index)


def _balance(index: engine.FaissIndex) -> Facts:
    """Return the largest list and the imbalance, L sum(size^2) / n^2: 1 where all L lists are equal."""
    lists = faiss.try_extract_index_ivf(index)
    if lists is None:
        return {}
    sizes = np.array([lists.invlists.list_size(number) for number in range(lists.nlist)], dtype=np.float64)
    return {
        "largest_list": int(sizes.max()),
        "imbalance": round(float(len(sizes) * (sizes**2).sum() / sizes.sum() ** 2), 4),
    }


def _set_training(index: engine.FaissIndex, seed: int) -> list[Any]:
    """Seed every k-means and cut OPQ's rounds; return what must outlive the training."""
    kept: list[Any] = []
    if isinstance(index, faiss.IndexPreTransform):
        transform = faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(transform, faiss.OPQMatrix):
            kept.append(_set_rotation(transform, seed))
        kept += _set_training(faiss.downcast_index(index.index), seed)
    elif isinstance(index, faiss.IndexIVF):
        _set_kmeans(index.cp, seed)
        if isinstance(index, faiss.IndexIVFPQ):
            _set_kmeans(index.pq.cp, seed)
    return kept


def _set_rotation(transform: Any, seed: int) -> Any:
    quantizer = faiss.ProductQuantizer(transform.d_out, transform.M, 8)
    _set_kmeans(quantizer.cp, seed)
    quantizer.cp.niter = 4  # as faiss sets for its own: each round goes on from the last one's centroids
    transform.pq = quantizer
    transform.niter = OPQ_ROUNDS
    transform.verbose = False
    return quantizer


def _set_kmeans(parameters: Any, seed: int) -> None:
    parameters.seed = 1234 + seed  # 1234 is faiss's own
    parameters.min_points_per_centroid = 1  # the plan has judged that already
    parameters.max_points_per_centroid = 256
