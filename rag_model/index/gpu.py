"""The steps that a GPU takes over where faiss sees one: k-means, nearest centroids, and the graph of a cell.

The first two compare vectors with all centroids, which is most of the work of training and adding. Codes are written
on the CPU all the same, so every factory works, and the file is one that any machine reads. A cell's graph is CAGRA's,
turned into an HNSW; it is stitched as any other is. Nothing is asked for: a faiss
built with GPUs (`faiss-gpu-cuvs`, `faiss-gpu`) that sees one uses all it sees. Sums of float32 differ there in their
last bits, so an index's bytes repeat on machines of one kind and not from one kind to the other.

Source: https://github.com/facebookresearch/faiss/wiki/Faiss-on-the-GPU; Ootomo et al. CAGRA: highly parallel graph
construction and approximate nearest neighbor search for GPUs. ICDE 2024.
"""

from typing import Any

from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss, metric_code

_LEAST = 1_024  # vectors of a graph built there: of three or four, faiss's conversion never ends (its issue 4260)


def present() -> bool:
    """Return whether this faiss can use a GPU, and sees one."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def lend_to_kmeans(lists: FaissIndex) -> list[Any]:
    """Let `train` of inverted lists find centroids on the GPUs; return what must outlive the training."""
    if not present():
        return []
    lists.clustering_index = comparer(lists)
    return [lists.clustering_index]


def comparer(lists: FaissIndex) -> FaissIndex:
    """Return an empty flat index of the lists' metric, on the GPUs if there are any: what k-means compares with."""
    flat = faiss.IndexFlat(lists.d, lists.metric_type)
    return faiss.index_cpu_to_all_gpus(flat) if present() else flat


class Assigner:
    """Finds the list of each vector: with the index's own quantizer, or among all centroids on the GPUs."""

    def __init__(self, lists: FaissIndex) -> None:
        """Copy the centroids to the GPUs, if there are any."""
        self._quantizer = lists.quantizer
        if present():
            self._quantizer = comparer(lists)
            self._quantizer.add(lists.quantizer.reconstruct_n(0, lists.nlist))

    def __call__(self, vectors: Vectors) -> Rows:
        """Return (m,) int64: the list of each of (m, d) float32 vectors, as the lists see them."""
        found: Rows = self._quantizer.search(vectors, 1)[1].ravel()
        return found


def builds_graphs(vectors: int) -> bool:
    """Return whether the graph of so many vectors is built on a GPU: with cuVS, and where it is worth the way."""
    return present() and hasattr(faiss, "GpuIndexCagra") and vectors >= _LEAST


def cagra(vectors: Vectors, links: int, metric: Metric) -> FaissIndex:
    """Return an HNSW index over (m, d) float32, in memory, whose bottom lists of 2 x `links` come from CAGRA."""
    config = faiss.GpuIndexCagraConfig()
    config.graph_degree, config.intermediate_graph_degree = 2 * links, 4 * links
    resources = faiss.StandardGpuResources()
    built = faiss.GpuIndexCagra(resources, vectors.shape[1], metric_code(metric), config)
    built.train(vectors)
    graph = faiss.IndexHNSWCagra()
    built.copyTo(graph)
    return graph
