"""The steps that run on a GPU if faiss sees one: k-means, nearest centroids, and the graph of a cell.

The first two compare vectors with all centroids, which is most of the work of training and adding. Codes are still
computed on the CPU, so every factory works, and any machine can read the file. A cell's graph is CAGRA's, converted to
an HNSW; it is stitched like any other. It needs no setting: a faiss built for GPUs (`faiss-gpu-cuvs`, `faiss-gpu`) uses
all GPUs that it sees. float32 sums differ there in their last bits, so the bytes of an index are reproducible on
machines with a GPU or on those without, not across the two.

Source: https://github.com/facebookresearch/faiss/wiki/Faiss-on-the-GPU; Ootomo et al. CAGRA: highly parallel graph
construction and approximate nearest neighbor search for GPUs. ICDE 2024.
"""

from typing import Any

from rag_model.index.files.engine import FaissIndex, Metric, Rows, Vectors, faiss, metric_code

_LEAST = 1_024  # vectors of a graph built there: with three or four, faiss's conversion never ends (faiss issue 4260)


def present() -> bool:
    """Return whether this faiss can use a GPU, and sees one."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def lend_to_kmeans(lists: FaissIndex) -> list[Any]:
    """Let `train` of inverted lists find centroids on the GPUs; return objects to keep until training ends."""
    if not present():
        return []
    lists.clustering_index = comparer(lists)
    return [lists.clustering_index]


def comparer(lists: FaissIndex) -> FaissIndex:
    """Return an empty flat index of the lists' metric, on the GPUs if there are any: k-means compares with it."""
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
        """Return (m,) int64: the list of each of (m, d) float32 vectors, which are already transformed."""
        found: Rows = self._quantizer.search(vectors, 1)[1].ravel()  # (m, 1) -> (m,)
        return found


def builds_graphs(vectors: int) -> bool:
    """Return whether the graph of this many vectors is built on a GPU: with cuVS, and from 1,024 vectors on."""
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
