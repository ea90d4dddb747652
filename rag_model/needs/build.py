"""Estimate the work of a build from the sizes of its dump and its encoder, without reading them.

The figures are upper bounds: the dump's share of prose is unknown, so it is assumed to be almost all of the dump. After
the passages are cut, `snapshots.planning` uses their real number.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path

from rag_model.corpus.multistream import is_index
from rag_model.corpus.source import basename, expand, size_of
from rag_model.encoders.architecture import architecture_of
from rag_model.encoders.files import vector_length
from rag_model.encoders.token_spec import DIM
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.impact import ROW_BYTES
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_for, kind_named
from rag_model.index.tokens.kind import TOKENS
from rag_model.needs.machine import CUT, LOOKED_UP, PROCESS, SPARE, Work
from rag_model.needs.reading import PASSAGE, weights

WORDS = 120  # most words of a passage, in the figures below
_ARTICLE = 60  # upper bound of the mean passages per article: 54 in the demo's long articles
# Bytes of source per passage of the default chunker, by the ending of the file name: measured on the demo's dump, which
# is mostly prose, and on psgs_w100.tsv. A whole Wikipedia has twice as many bytes per passage.
_BYTES = {".bz2": 312, ".gz": 320, ".parquet": 240, ".xml": 1124, ".tsv": 650}
_OTHER = 520  # of sources whose name ends in something else


def passages_of(dump: str, words: int, limit: int | None = None) -> int:
    """Return the number of passages, at most about.

    Args:
        dump: URL, path or glob, as `reindex` takes it.
        words: most words of a passage.
        limit: most articles.

    Raises:
        InputError: there is no such dump.
    """
    urls = [url for url in expand(dump) if not is_index(url)]
    found = sum(size_of(url) / _BYTES.get(Path(basename(url)).suffix.lower(), _OTHER) for url in urls)
    return max(1, ceil(min(found, found if limit is None else limit * _ARTICLE) * WORDS / words))


def row_bytes(represents: str, d: int) -> int:
    """Estimate the bytes of a passage's row in a file.

    A row is its text, weighted terms, or vectors of `d` components in float16.
    """
    return {"text": _BYTES[".parquet"], "sparse": ROW_BYTES, "vectors": 2 * d, "tokens": 2 * d * TOKENS}[represents]


def stage_seconds(plan: IndexPlan, d: int = 0) -> dict[str, float]:
    """Return the seconds of one core by stage, for vectors of `d` components; 0 over text.

    The kinds' rates were measured on one processor with AVX512; others are up to twice as slow.
    """
    kind, tasks = kind_named(plan.kind), {"train": 1, "scatter": 1, "shard": plan.shards, "merge": 1}
    size = plan.n * row_bytes(kind.represents, d)
    return {stage: n * kind.seconds(plan, stage, plan.n // n, size) for stage, n in tasks.items() if n}


def work_of(passages: int, encoder: Path, indexes: Mapping[str, IndexRecipe], memory: int | None) -> Work:
    """Return the work of a build, by stage.

    Args:
        passages: their number.
        encoder: folder of the passage encoder.
        indexes: the recipes of the indexes, by name.
        memory: bytes that the run may use; indexes are planned to fit. None: unknown.

    Raises:
        InputError: the folder holds no encoder.
        ResourceError: an index does not fit; the message says which would.
    """
    model = architecture_of(encoder)
    d = vector_length(encoder) if model.layers else model.hidden
    stages, seconds, disk = {"chunk": PROCESS, "embed": PROCESS + 2 * weights(model)}, passages * (CUT + LOOKED_UP), 0
    room = max(PROCESS, int(memory / SPARE) - PROCESS) if memory else None  # with less, it cannot encode
    for recipe in indexes.values():
        kind = kind_for(recipe.factory)
        width = {"vectors": d, "tokens": DIM}.get(kind.represents, 0)
        plan = kind.plan(recipe, passages, width, memory=room)
        cost = kind.estimate(plan)
        disk += cost.work_bytes
        seconds += sum(stage_seconds(plan, width).values())
        stages |= {stage: max(size, stages.get(stage, 0)) for stage, size in cost.stages.items()}
    sizes = {"passages, about": f"{passages:,}"}
    return Work(sizes, stages, passages * PASSAGE * model.operations, seconds, disk, workers=True)
