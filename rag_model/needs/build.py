"""Estimate the work of a build from the sizes of its dump and its encoder, without reading them.

The figures are upper bounds: the dump's share of prose is unknown, so it is assumed to be almost all of the dump. After
the passages are cut, `snapshots.sizing` uses their real number.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path

from rag_model.corpus.multistream import is_index
from rag_model.corpus.source import basename, expand, size_of
from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.files import vector_length
from rag_model.encoders.token_spec import DIM
from rag_model.encoders.weights import weight_files
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_for
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.rate import stage_seconds
from rag_model.needs.machine import CHUNKER, CUT, ENCODER, LAUNCHER, SPARE, Work
from rag_model.needs.reading import PASSAGE

WORDS = 120  # most words of a passage, in the figures below
_ARTICLE = 60  # upper bound of the mean passages per article: 54 in the demo's long articles
# Bytes of source per passage of the default chunker, by the ending of the file name: measured on the demo's dump, which
# is mostly prose, and on psgs_w100.tsv. A whole Wikipedia has twice as many bytes per passage.
_BYTES = {".bz2": 312, ".gz": 320, ".parquet": 240, ".xml": 1124, ".tsv": 650, "": 520}


def passages_of(dump: str, words: int, limit: int | None = None) -> int:
    """Return the number of passages, at most about.

    Args:
        dump: URL, path or glob, as `reindex` takes it.
        words: most words of a passage.
        limit: most articles.

    Raises:
        InputError: there is no such dump.
    """
    found = sum(size_of(url) / _bytes_a_passage(url) for url in expand(dump) if not is_index(url))
    return max(1, ceil(min(found, found if limit is None else limit * _ARTICLE) * WORDS / words))


def work_of(
    passages: int, encoder: Path, indexes: Mapping[str, IndexRecipe], memory: int, *, local: bool = True
) -> Work:
    """Return the work of a build, by stage.

    Args:
        passages: their number.
        encoder: folder of the passage encoder.
        indexes: the recipes of the indexes, by name.
        memory: bytes that the run may use; indexes are planned to fit.
        local: whether the workers run on the launcher's machine; else they are not counted.

    Raises:
        InputError: the folder holds no encoder.
        ResourceError: an index does not fit; the message says which would.
    """
    d, weights = vector_length(encoder), sum(path.stat().st_size for path in weight_files(encoder))
    stages, seconds, disk = {"chunk": CHUNKER, "embed": ENCODER + 2 * weights}, passages * CUT, 0
    room = max(ENCODER, int(memory / SPARE) - LAUNCHER)  # with less, the run is refused for its encoder
    for recipe in indexes.values():
        kind = kind_for(recipe.factory)
        width = {"vectors": d, "tokens": DIM}.get(kind.represents, 0)
        plan = kind.plan(recipe, passages, width, memory=room if local else None)
        cost = kind.estimate(plan)
        disk += cost.work_bytes
        seconds += sum(stage_seconds(plan, width).values())
        stages |= {stage: max(size, stages.get(stage, 0)) for stage, size in cost.stages.items()}
    sizes = {"passages, about": f"{passages:,}", "dimensions": f"{d:,}", "weights of the encoder": gigabytes(weights)}
    if not local:
        return Work(sizes, {"launcher": 0}, disk=disk, workers=True)
    return Work(sizes, stages, passages * PASSAGE * architecture_of(encoder).operations, seconds, disk, workers=True)


def _bytes_a_passage(url: str) -> float:
    name = basename(url).lower()
    return next(size for ending, size in _BYTES.items() if name.endswith(ending))
