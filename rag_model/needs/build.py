"""Estimate the work of a build from the sizes of its dump and its encoder, without reading them.

The figures are upper bounds: the dump's share of prose is unknown, so it is assumed to be almost all of the dump. After
the passages are cut, `snapshots.sizing` uses their real number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rag_model.corpus.multistream import is_index
from rag_model.corpus.parts import LARGEST, SMALLEST
from rag_model.corpus.source import basename, expand, size_of
from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.files import vector_length
from rag_model.encoders.token_spec import DIM
from rag_model.encoders.weights import weight_files
from rag_model.errors import ResourceError
from rag_model.index.postings.impact import ROW_BYTES, VOCABULARY
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_for
from rag_model.index.sizing.amounts import gigabytes
from rag_model.index.sizing.rate import stage_seconds
from rag_model.index.tokens.kind import TOKENS
from rag_model.needs.machine import CHUNKER, CUT, ENCODER, LAUNCHER, SPARE, Work

WORDS = 120  # most words of a passage, in the figures below
_ARTICLE = 60  # upper bound of the mean passages per article: 54 in the demo's long articles
_TOKENS = 160  # tokens of a passage and its title
# Bytes of source per passage of the default chunker, by the ending of the file name: measured on the demo's dump, which
# is mostly prose, and on psgs_w100.tsv. A whole Wikipedia has twice as many bytes per passage.
_BYTES = {".bz2": 312, ".gz": 320, ".parquet": 240, ".xml": 1124, ".tsv": 650, "": 520}


@dataclass(frozen=True, slots=True)
class Bulk:
    """The amount of work of a build."""

    passages: int
    part: int  # passages of the largest part
    dim: int  # dimensions of a vector
    weights: int  # bytes of the encoder's weights
    operations: float  # operations to encode one passage


def bulk_of(dump: str, encoder: Path, words: int, part_bytes: int | None = None, limit: int | None = None) -> Bulk:
    """Return the amount of work.

    Args:
        dump: URL, path or glob, as `reindex` takes it.
        encoder: folder of the passage encoder.
        words: most words of a passage.
        part_bytes: bytes of compressed dump per part; None: by the dump's size.
        limit: most articles.

    Raises:
        InputError: there is no such dump, or the folder holds no encoder.
    """
    sizes = {url: size_of(url) for url in expand(dump) if not is_index(url)}
    found = sum(size / _bytes_a_passage(url) for url, size in sizes.items())
    count = max(1, ceil(min(found, found if limit is None else limit * _ARTICLE) * WORDS / words))
    total = max(1, sum(sizes.values()))
    part = part_bytes or min(LARGEST, max(SMALLEST, total // 16))
    return Bulk(
        passages=count,
        part=max(1, min(count, ceil(count * part / total))),
        dim=vector_length(encoder),
        weights=sum(path.stat().st_size for path in weight_files(encoder)),
        operations=_TOKENS * architecture_of(encoder).operations,
    )


def work_of(bulk: Bulk, indexes: Mapping[str, IndexRecipe], memory: int, *, local: bool = True) -> Work:
    """Return the work of a build, by stage.

    Args:
        bulk: the amount of work.
        indexes: the recipes of the indexes, by name.
        memory: bytes that the run may use; indexes are planned to fit.
        local: whether the workers run on the launcher's machine; else they are not counted.

    Raises:
        ResourceError: the launcher or an index does not fit; the message says what would.
    """
    room = int(memory / SPARE) - LAUNCHER
    if room <= 0:
        raise ResourceError(
            f"a run may have {gigabytes(memory)} of memory, and its launcher alone takes "
            f"{gigabytes(SPARE * LAUNCHER)}: raise the limit"
        )
    n, d, room_for = bulk.passages, bulk.dim, room if local else None
    sizes = {"passages, about": f"{n:,}", "dimensions": f"{d:,}", "weights of the encoder": gigabytes(bulk.weights)}
    stages, seconds, disk = {"chunk": CHUNKER, "embed": ENCODER + 2 * bulk.weights}, n * CUT, 0
    rows = {  # width, bytes
        "text": (0, _BYTES[".parquet"]),
        "vectors": (d, 2 * d),
        "tokens": (DIM, 2 * DIM * TOKENS),
        "sparse": (VOCABULARY, ROW_BYTES),
    }
    for recipe in indexes.values():
        kind = kind_for(recipe.factory)
        width, row_bytes = rows[kind.represents]
        plan = kind.plan(recipe, n, width, memory=room_for, part_rows=bulk.part)
        cost = kind.estimate(plan, bulk.part)
        disk += cost.work_bytes
        seconds += sum(stage_seconds(plan, row_bytes).values())
        stages |= {stage: max(size, stages.get(stage, 0)) for stage, size in cost.stages.items()}
    if not local:
        return Work(sizes, {"launcher": 0}, disk=disk, workers=True)
    takes = f"about {n:,} passages of {d} dimensions need"
    return Work(sizes, stages, n * bulk.operations, seconds, disk, workers=True, takes=takes, instead="")


def _bytes_a_passage(url: str) -> float:
    name = basename(url).lower()
    return next(size for ending, size in _BYTES.items() if name.endswith(ending))
