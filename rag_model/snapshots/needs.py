"""What a build will need, told by the size of its dump and of its encoder before anything is read.

A scheduler asks it which machine to start. The figures are bounds to plan by: a dump's share of prose is not known yet,
so its passages are counted as if it held little else. Once they are cut, `snapshots.sizing` weighs the real ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rag_model.corpus.multistream import is_index
from rag_model.corpus.parts import LARGEST, SMALLEST
from rag_model.corpus.source import basename, expand, size_of
from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.files import vector_length
from rag_model.encoders.weights import weight_files
from rag_model.errors import ResourceError
from rag_model.index.recipe import resolve
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.choice import fitted
from rag_model.index.sizing.estimate import Estimate, estimate
from rag_model.machine import CORE, GPU, LAUNCHER, SPARE, Limits, Needs
from rag_model.snapshots.recipe import Recipe

CHUNKER = 256 << 20  # of a worker that cuts pages: 209 MB measured
ENCODER = 600 << 20  # of a worker that encodes, beside its weights: 720 MB measured with MiniLM's 90
_WORDS = 100  # of a passage, in the figures below
_ARTICLE = 60  # passages of an article at most, on average: 54 in the demo's long ones
# Bytes of source a passage of 100 words, by what the file's name ends in: measured on the demo's dump, which is prose
# for the most part, and on psgs_w100.tsv. A whole Wikipedia has twice as many bytes a passage.
_BYTES = {".bz2": 324, ".gz": 400, ".parquet": 300, "": 650}
_XML = 1165  # of an export that is not compressed
_TOKENS = 160  # of a passage and its title
_GRAPH = 180e-6  # seconds of a core to put a vector of 96 dimensions into the indexes
_CUT = 2e-4  # seconds of a core to cut a passage


@dataclass(frozen=True, slots=True)
class Bulk:
    """How much a build has to do."""

    passages: int
    part: int  # passages of the largest part
    dim: int  # of a vector
    weights: int  # bytes of the encoder's
    operations: float  # of encoding one passage


def bulk_of(dump: str, encoder: Path, recipe: Recipe, limit: int | None = None) -> Bulk:
    """Return how much there is to do: the dump's bytes and the encoder's, and no byte of either is read.

    Args:
        dump: URL, path or glob, as `reindex` takes it.
        encoder: folder of the passage encoder.
        recipe: of the snapshot.
        limit: articles at most.

    Raises:
        InputError: there is no such dump, or the folder holds no encoder.
    """
    urls = [url for url in expand(dump) if not is_index(url)]
    sizes = {url: size_of(url) for url in urls}
    share = _WORDS / getattr(recipe.chunk.built(), "words", _WORDS)  # other chunkers: as long as the default's
    passages = sum(size / _passage(url) for url, size in sizes.items()) * share
    if limit is not None:
        passages = min(passages, limit * _ARTICLE * share)
    total = sum(sizes.values())
    part = recipe.part_bytes or min(LARGEST, max(SMALLEST, total // 16))
    count = max(1, ceil(passages))
    return Bulk(
        passages=count,
        part=max(1, min(count, ceil(count * part / max(total, 1)))),
        dim=vector_length(encoder),
        weights=sum(path.stat().st_size for path in weight_files(encoder)),
        operations=_TOKENS * architecture_of(encoder).operations,
    )


def needs_of(bulk: Bulk, recipe: Recipe, limits: Limits, hours: float, *, local: bool = True) -> Needs:
    """Return what the build shall be given so that it takes about `hours`, or as near to it as the limits allow.

    A GPU is asked for only where cores alone would take longer. Cores that memory has no room for are not asked for,
    nor one for less than a second's work.

    Args:
        bulk: how much there is to do.
        recipe: of the snapshot.
        limits: what a run may have.
        hours: the time it may take; 0: as little as possible.
        local: whether the workers run beside the launcher; else they are another machine's to count.

    Raises:
        ResourceError: it does not fit into the limits; the sentence says what would.
    """
    most = int(limits.memory / SPARE)
    costs = _indexes(bulk, recipe, most - LAUNCHER if local else None)
    if not local:
        return _given(bulk, costs, {"launcher": LAUNCHER}, 1, 0, 0.0)
    wanted = max(1.0, hours * 3600)
    encoding, other = bulk.passages * bulk.operations, bulk.passages * (_CUT + _GRAPH * bulk.dim / 96)
    on_cores = encoding / CORE + other
    gpus = 0 if on_cores / limits.cores <= wanted else min(limits.gpus, ceil(encoding / GPU / wanted))
    work = on_cores if not gpus else other
    cores = min(limits.cores, max(1, ceil(work / wanted), gpus))
    while cores > 1 and max(_stages(bulk, costs, cores).values()) > most:
        cores -= 1
    stages = _stages(bulk, costs, cores)
    worst = max(stages, key=lambda stage: stages[stage])
    if stages[worst] > most:
        raise ResourceError(
            f"about {bulk.passages:,} passages of {bulk.dim} dimensions need {gigabytes(SPARE * stages[worst])} of "
            f"memory to {worst}, and a run may have {gigabytes(limits.memory)}: raise the limit"
        )
    return _given(bulk, costs, stages, cores, gpus, (work / cores + (encoding / GPU / gpus if gpus else 0)) / 3600)


def _indexes(bulk: Bulk, recipe: Recipe, room: int | None) -> list[Estimate]:
    """Weigh the indexes; those that do not fit into the room are refused with one that would."""
    if room is None:
        plans = [resolve(index, bulk.passages, bulk.dim) for index in recipe.index.values()]
    elif room <= 0:
        raise ResourceError(
            f"a run may have {gigabytes(SPARE * (room + LAUNCHER))} of memory, and its launcher alone takes "
            f"{gigabytes(SPARE * LAUNCHER)}: raise the limit"
        )
    else:
        plans = [fitted(index, bulk.passages, bulk.dim, room, bulk.part) for index in recipe.index.values()]
    return [estimate(plan, bulk.part) for plan in plans]


def _stages(bulk: Bulk, costs: Sequence[Estimate], cores: int) -> dict[str, int]:
    stages = {"chunk": cores * CHUNKER, "embed": cores * (ENCODER + 2 * bulk.weights)}
    for cost in costs:
        for stage, size in cost.stages.items():
            times = 1 if stage in {"train", "merge"} else cores
            stages[stage] = max(stages.get(stage, 0), times * size)
    return {stage: LAUNCHER + size for stage, size in stages.items()}


def _given(
    bulk: Bulk, costs: Sequence[Estimate], stages: Mapping[str, int], cores: int, gpus: int, hours: float
) -> Needs:
    disk = sum(cost.work_bytes for cost in costs)
    work = {
        "passages, about": f"{bulk.passages:,}",
        "dimensions": f"{bulk.dim:,}",
        "weights of the encoder": gigabytes(bulk.weights),
    }
    return Needs(work, dict(stages), ceil(SPARE * max(stages.values())), cores, gpus, disk, hours)


def _passage(url: str) -> float:
    """Return the bytes of a file that one passage comes from."""
    name = basename(url).lower()
    if name.endswith(".xml"):
        return _XML
    return next(size for ending, size in _BYTES.items() if name.endswith(ending))
