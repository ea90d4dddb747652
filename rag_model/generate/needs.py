"""What one process needs that reads passages with a model: the sums that training and evaluation share.

Bounds to plan by: every passage counts as a long one, and each bound stands beside what was measured.
"""

from collections.abc import Mapping
from math import ceil

from rag_model.encoders.architecture import Architecture
from rag_model.errors import ResourceError
from rag_model.index.sizing.amounts import gigabytes
from rag_model.machine import CORE, GPU, SPARE, Limits, Needs
from rag_model.retrieve.survey import survey
from rag_model.store.versions.paths import EXACT, embeddings_path, index_path
from rag_model.store.versions.snapshot import Snapshot

PROCESS = 1 << 30  # bytes of a process with Prefect, torch, transformers and faiss: 700 MB measured
QUESTION = 32  # tokens of a question
PASSAGE = 160  # of a passage and its title
PROMPT = QUESTION + PASSAGE + 32  # of all that a generator reads beside an answer
NUMBER = 4  # bytes of a float32
_KEPT = 2  # numbers that a layer keeps of a token and a unit of its width while it decodes: key and value


def weights(*models: Architecture) -> int:
    """Return the bytes of models' weights in float32."""
    return NUMBER * sum(model.parameters for model in models)


def retriever_bytes(snapshot: Snapshot, retriever: str | None) -> int:
    """Return the bytes of a retriever's indexes in memory: their files'; of `exact` the vectors', which are mapped.

    `retriever` is an expression; None: the snapshot's default. A model that reranks is not counted.

    Raises:
        UsageError: the expression is wrong, or the snapshot has no such index.
    """
    files, indexes = snapshot.manifest.content.files, snapshot.manifest.content.indexes
    paths: list[str] = []
    for index in survey(snapshot, retriever).indexes:
        exact = index == EXACT and EXACT not in indexes
        paths += [embeddings_path(part.name) for part in snapshot.parts] if exact else [index_path(index)]
    return sum(files[path].size for path in paths if path in files)


def decoding_bytes(generator: Architecture, texts: int, answer: int) -> int:
    """Return about how many bytes it takes to decode answers of `answer` tokens after so many prompts at once."""
    kept = _KEPT * generator.layers * generator.hidden * (PROMPT + answer)
    return NUMBER * texts * (2 * kept + 2 * generator.vocabulary + 8 * generator.hidden * PROMPT)


def one_process(
    work: Mapping[str, str], stages: Mapping[str, int], operations: float, disk: int, limits: Limits, hours: float
) -> Needs:
    """Return what a run in one process shall be given so that it takes about `hours`, or as near as limits allow.

    A GPU, and no more than one, is asked for only where cores alone would take longer; it then holds what the largest
    stage holds beside the process itself.

    Args:
        work: what there is to do, for people.
        stages: bytes of memory of each stage, the process included.
        operations: of floating point, all in all.
        disk: bytes beside the store's.
        limits: what a run may have.
        hours: the time it may take; 0: as little as possible.

    Raises:
        ResourceError: it does not fit into the limits; the sentence says how much would.
    """
    worst = max(stages, key=lambda stage: stages[stage])
    memory = ceil(SPARE * stages[worst])
    if memory > limits.memory:
        raise ResourceError(
            f"it takes {gigabytes(memory)} of memory to {worst}, and a run may have {gigabytes(limits.memory)}: raise "
            "the limit, or take smaller batches, fewer passages or a smaller model"
        )
    wanted = max(1.0, 3600 * hours)
    gpus = min(1, limits.gpus) if operations / CORE / limits.cores > wanted else 0
    cores = 1 if gpus else min(limits.cores, max(1, ceil(operations / CORE / wanted)))
    seconds = operations / (GPU if gpus else CORE * cores)
    held = {"of them on the GPU": gigabytes(stages[worst] - PROCESS)} if gpus else {}
    threads = {"OMP_NUM_THREADS": str(cores)}  # torch would take every core that it sees, whatever a container may use
    return Needs({**work, **held}, dict(stages), memory, cores, gpus, disk, seconds / 3600, threads)
