"""Train an index of lists on a sample: centroids, rotation and codes, seeded, with faster settings than faiss's.

faiss's own settings cost far more than they gain: 50 OPQ rounds, polysemous training (used by a factory string without
`np`). Here OPQ takes 10 rounds and every k-means is seeded by the plan.
"""

from typing import Any

from rag_model.errors import ResourceError
from rag_model.index import gpu
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Vectors, faiss
from rag_model.index.recipe import VectorPlan, default_search

OPQ_ROUNDS = 10  # faiss's 50 take five times as long and gave no measurable recall
LIST_MOVES = 10  # rounds of k-means that continues from inherited lists: after three, recall does not rise
CODE_MOVES = 1  # rounds from inherited codes: five more gain .0004 of recall, and each costs ten rounds of the lists


def trained_on(plan: VectorPlan, sample: Vectors) -> FaissIndex:
    """Return an index trained on `sample`, (m, d) float32, that does not hold vectors yet.

    Raises:
        ResourceError: memory ran out, or the sample is too small for the factory.
    """
    sentence = f"{plan.factory} could not be trained on {len(sample)} vectors: use a smaller factory"
    with engine.guarded(ResourceError, sentence):
        index = faiss.index_factory(plan.d, plan.factory, engine.metric_code(plan.metric))
        kept = _set_training(index, plan.seed)
        index.train(sample)
    del kept
    codes = plan.factory.partition(",Refine")[0]
    _set_search(index, default_search(plan.factory) | default_search(codes))  # lists for plain faiss; plans say more
    return index


def move(lists: FaissIndex, sample: Vectors, seed: int) -> None:
    """Continue k-means from an index's lists and codes on `sample`, (m, d) float32 after the index's transforms.

    The number of lists does not change. Values trained without k-means, such as scalar ranges, are trained again.
    """
    parameters = faiss.ClusteringParameters()
    _set_kmeans(parameters, seed)
    parameters.niter = LIST_MOVES
    parameters.spherical = lists.metric_type == faiss.METRIC_INNER_PRODUCT  # as a factory sets it
    kmeans = faiss.Clustering(lists.d, lists.nlist, parameters)
    quantizer = faiss.downcast_index(lists.quantizer)
    # (lists, d) -> (lists d,)
    faiss.copy_array_to_vector(quantizer.reconstruct_n(0, lists.nlist).ravel(), kmeans.centroids)
    kmeans.train(sample, gpu.comparer(lists))
    centroids = engine.array_of(kmeans.centroids).reshape(lists.nlist, lists.d)  # (lists d,) -> (lists, d)
    quantizer.reset()
    quantizer.add(centroids)
    _move_codes(lists, sample, centroids, seed)


def _move_codes(lists: FaissIndex, sample: Vectors, centroids: Vectors, seed: int) -> None:
    numbers = gpu.Assigner(lists)(sample)
    coded = sample - centroids[numbers] if lists.by_residual else sample  # (m, d)
    if isinstance(lists, faiss.IndexIVFPQ):
        _set_kmeans(lists.pq.cp, seed)
        lists.pq.cp.niter = CODE_MOVES
        lists.pq.train_type = faiss.ProductQuantizer.Train_hot_start
    lists.train_encoder(len(coded), *map(faiss.swig_ptr, (coded, numbers)))


def _set_search(index: FaissIndex, search: dict[str, int]) -> None:
    """Write search parameters into an index, so that plain faiss searches with the plan's parameters."""
    if "nprobe" in search:
        faiss.extract_index_ivf(index).nprobe = search["nprobe"]
    if "refine" in search:
        index.k_factor = search["refine"]


def lists_of(index: FaissIndex) -> FaissIndex | None:
    """Return the index's inverted lists, inside its transform and refinement; None if it has none.

    They are a part of `index`, and valid only while it exists.
    """
    lists = faiss.try_extract_index_ivf(index)
    return None if lists is None else faiss.downcast_index(lists)


def _set_training(index: FaissIndex, seed: int) -> list[Any]:
    """Seed every k-means and cut OPQ's rounds; return objects to keep until training ends."""
    kept: list[Any] = []
    if isinstance(index, faiss.IndexRefine):
        kept += _set_training(faiss.downcast_index(index.base_index), seed)
    elif isinstance(index, faiss.IndexPreTransform):
        transform = faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(transform, faiss.OPQMatrix):
            kept.append(_set_rotation(transform, seed))
        kept += _set_training(faiss.downcast_index(index.index), seed)
    elif isinstance(index, faiss.IndexIVF):
        _set_kmeans(index.cp, seed)
        kept += gpu.lend_to_kmeans(index)
        if isinstance(index, faiss.IndexIVFPQ):
            _set_kmeans(index.pq.cp, seed)
    return kept


def _set_rotation(transform: Any, seed: int) -> Any:
    quantizer = faiss.ProductQuantizer(transform.d_out, transform.M, 8)
    _set_kmeans(quantizer.cp, seed)
    quantizer.cp.niter = 4  # as faiss sets for its own: each round continues from the last centroids
    transform.pq = quantizer
    transform.niter = OPQ_ROUNDS
    transform.verbose = False
    return quantizer


def _set_kmeans(parameters: Any, seed: int) -> None:
    parameters.seed = 1234 + seed  # 1234 is faiss's own
    parameters.min_points_per_centroid = 1  # the plan has already checked that
    parameters.max_points_per_centroid = 256
