"""The steps that a GPU takes over where faiss sees one: k-means, and finding the nearest centroid of every vector.

Both compare vectors with all centroids, which is most of the work of training and adding. Codes are written on the
CPU all the same, so every factory works, and the file is one that any machine reads. Nothing is asked for: a faiss
built with GPUs (`faiss-gpu-cuvs`, `faiss-gpu`) that sees one uses all it sees. Sums of float32 differ there in their
last bits, so an index's bytes repeat on machines of one kind and not from one kind to the other.

Source: https://github.com/facebookresearch/faiss/wiki/Faiss-on-the-GPU.
"""

from typing import Any

from rag_model.index.engine import FaissIndex, Rows, Vectors, faiss


def present() -> bool:
    """Return whether this faiss can use a GPU, and sees one."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def lend_to_kmeans(lists: FaissIndex) -> list[Any]:
    """Let `train` of inverted lists find centroids on the GPUs; return what must outlive the training."""
    if not present():
        return []
    lists.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlat(lists.d, lists.metric_type))
    return [lists.clustering_index]


class Assigner:
    """Finds the list of each vector: with the index's own quantizer, or among all centroids on the GPUs."""

    def __init__(self, lists: FaissIndex) -> None:
        """Copy the centroids to the GPUs, if there are any."""
        self._quantizer = lists.quantizer
        if present():
            centroids = faiss.IndexFlat(lists.d, lists.metric_type)
            centroids.add(lists.quantizer.reconstruct_n(0, lists.nlist))
            self._quantizer = faiss.index_cpu_to_all_gpus(centroids)

    def __call__(self, vectors: Vectors) -> Rows:
        """Return (m,) int64: the list of each of (m, d) float32 vectors, as the lists see them."""
        found: Rows = self._quantizer.search(vectors, 1)[1].ravel()
        return found
