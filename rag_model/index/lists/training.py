"""Train inverted lists on a sample: centroids, rotation and codec, seeded, and faster than faiss.

Some of faiss's settings cost far more than they gain: 50 rounds of OPQ, and polysemous training
(used by a factory string without `np`). This module trains OPQ in 10 rounds, and seeds every
k-means with the plan's seed.
"""

import math
from typing import Any

import numpy as np

from rag_model.errors import ResourceError
from rag_model.index.files import engine
from rag_model.index.files.engine import FaissIndex, Vectors, faiss
from rag_model.index.recipe import VectorPlan, choose_search

OPQ_ROUNDS = 10  # faiss's 50 take five times as long without a measurable gain in recall
LIST_ROUNDS = 10  # rounds of k-means from reused lists: after three, recall does not rise
# Maximum number of training vectors for OPQ or PCA, as in faiss; but 100 per dimension if more.
_PROJECTION_ROWS = 1 << 16
_PROJECTION_ROWS_PER_DIM = 100
# Rounds of k-means of the codes: five more gain .0004 of recall, and each costs ten rounds of the
# lists.
CODE_ROUNDS = 1


def train_index(plan: VectorPlan, sample: Vectors) -> FaissIndex:
    """Return an index without vectors, trained on `sample`, (m, d) float32.

    Raises:
        ResourceError: memory ran out, or the sample is too small for the factory.
    """
    error_message = f"{plan.factory} could not be trained on {len(sample)} vectors: use a smaller factory"
    with engine.translate_errors(ResourceError, error_message):
        index = faiss.index_factory(plan.d, plan.factory, engine.to_faiss_metric(plan.metric))
        live_objects = _configure_training(index, plan.seed)
        _train_projection(index, sample, plan.seed)
        index.train(sample)
    del live_objects
    unrefined_factory = plan.factory.partition(",Refine")[0]
    _write_search_parameters(index, choose_search(plan.factory) | choose_search(unrefined_factory))
    return index


def continue_training(ivf_index: FaissIndex, sample: Vectors, seed: int) -> None:
    """Continue k-means of lists and codes with `sample`, (m, d) float32 transformed vectors.

    The number of lists does not change. Values trained without k-means, such as scalar ranges, are
    trained again.
    """
    clustering_parameters = faiss.ClusteringParameters()
    _configure_kmeans(clustering_parameters, seed)
    clustering_parameters.niter = LIST_ROUNDS
    # faiss's factory sets this parameter in the same way.
    clustering_parameters.spherical = ivf_index.metric_type == faiss.METRIC_INNER_PRODUCT
    clustering = faiss.Clustering(ivf_index.d, ivf_index.nlist, clustering_parameters)
    quantizer = faiss.downcast_index(ivf_index.quantizer)
    # (lists, d) -> (lists d,)
    faiss.copy_array_to_vector(quantizer.reconstruct_n(0, ivf_index.nlist).ravel(), clustering.centroids)
    clustering.train(sample, engine.create_flat_index(ivf_index))
    # (lists d,) -> (lists, d)
    centroids = engine.copy_array(clustering.centroids).reshape(ivf_index.nlist, ivf_index.d)
    quantizer.reset()
    quantizer.add(centroids)
    _continue_code_training(ivf_index, sample, centroids, seed)


def _continue_code_training(ivf_index: FaissIndex, sample: Vectors, centroids: Vectors, seed: int) -> None:
    list_numbers = engine.ListAssigner(ivf_index)(sample)
    code_inputs = sample - centroids[list_numbers] if ivf_index.by_residual else sample  # (m, d)
    if isinstance(ivf_index, faiss.IndexIVFPQ):
        _configure_kmeans(ivf_index.pq.cp, seed)
        ivf_index.pq.cp.niter = CODE_ROUNDS
        ivf_index.pq.train_type = faiss.ProductQuantizer.Train_hot_start
    ivf_index.train_encoder(len(code_inputs), *map(faiss.swig_ptr, (code_inputs, list_numbers)))


def _write_search_parameters(index: FaissIndex, search: dict[str, int]) -> None:
    """Write search parameters into an index, as the defaults of plain faiss."""
    if "nprobe" in search:
        faiss.extract_index_ivf(index).nprobe = search["nprobe"]
    if "refine" in search:
        index.k_factor = search["refine"]


def get_inverted_lists(index: FaissIndex) -> FaissIndex | None:
    """Return the index's inverted lists, inside its transform and refinement; None if it has none.

    The lists belong to `index` and are valid only while it exists.
    """
    ivf_index = faiss.try_extract_index_ivf(index)
    return None if ivf_index is None else faiss.downcast_index(ivf_index)


def apply_transforms(index: FaissIndex, vectors: Vectors) -> Vectors:
    """Apply the transforms of an index, if it has any: (m, d) -> (m, d')."""
    if isinstance(index, faiss.IndexPreTransform):
        for i in range(index.chain.size()):
            vectors = faiss.downcast_VectorTransform(index.chain.at(i)).apply(vectors)
    return vectors


def _configure_training(index: FaissIndex, seed: int) -> list[Any]:
    """Seed every k-means and reduce OPQ's rounds.

    Return objects that must live until training ends.
    """
    live_objects: list[Any] = []
    if isinstance(index, faiss.IndexRefine):
        live_objects += _configure_training(faiss.downcast_index(index.base_index), seed)
    elif isinstance(index, faiss.IndexPreTransform):
        transform = faiss.downcast_VectorTransform(index.chain.at(0))
        if isinstance(transform, faiss.OPQMatrix):
            live_objects.append(_configure_rotation(transform, seed))
        live_objects += _configure_training(faiss.downcast_index(index.index), seed)
    elif isinstance(index, faiss.IndexIVF):
        _configure_kmeans(index.cp, seed)
        live_objects += engine.train_kmeans_on_gpu(index)
        if isinstance(index, faiss.IndexIVFPQ):
            _configure_kmeans(index.pq.cp, seed)
    return live_objects


def _train_projection(index: FaissIndex, sample: Vectors, seed: int) -> None:
    """Train the projection of an index that compares by inner product.

    faiss subtracts the mean before it fits PCA and OPQ, and so ignores the direction of the mean,
    which may contribute most of a product. Random signs remove the mean, and keep the absolute
    values of products.
    """
    if isinstance(index, faiss.IndexRefine):
        index = faiss.downcast_index(index.base_index)
    if not isinstance(index, faiss.IndexPreTransform) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        return
    transform = faiss.downcast_VectorTransform(index.chain.at(0))
    is_pca = isinstance(transform, faiss.PCAMatrix)
    if is_pca or (isinstance(transform, faiss.OPQMatrix) and transform.d_out < transform.d_in):
        max_rows = max(_PROJECTION_ROWS, _PROJECTION_ROWS_PER_DIM * transform.d_in)
        projection_sample = sample[:: math.ceil(len(sample) / max_rows)]
        random_signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (len(projection_sample), 1))
        transform.train(projection_sample * random_signs)
        if is_pca:
            transform.have_bias = False


def _configure_rotation(transform: Any, seed: int) -> Any:
    quantizer = faiss.ProductQuantizer(transform.d_out, transform.M, 8)
    _configure_kmeans(quantizer.cp, seed)
    quantizer.cp.niter = 4  # each round of OPQ continues from the last centroids, as in faiss
    transform.pq = quantizer
    transform.niter = OPQ_ROUNDS
    transform.verbose = False
    return quantizer


def _configure_kmeans(parameters: Any, seed: int) -> None:
    parameters.seed = 1234 + seed  # faiss's own seed is 1234
    parameters.min_points_per_centroid = 1  # the plan ensures a large enough sample
    parameters.max_points_per_centroid = 256
