"""The results of the jobs for one part or one index shard, read from memo records and JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rag_model.corpus.chunk import ChunkStats
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Record
from rag_model.toml import from_table

_SHARD_FIELDS = ("slices", "generation", "replaced")


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A part's passages in the store, and the counts of its pages."""

    passages: BlobRef
    stats: ChunkStats
    article_log: BlobRef | None = None  # if None, later builds cannot reuse the part's articles
    is_new: bool = False  # whether this run, and no earlier one, chunked the part
    spans: BlobRef | None = None  # salient spans, if the recipe keeps them

    @property
    def rows(self) -> int:
        """The number of passages."""
        return self.stats.rows

    @classmethod
    def from_record(cls, record: Record, *, is_new: bool = False) -> Self:
        """Return the result of a part from its memo record."""
        outputs, stats = record.outputs, from_table(ChunkStats, record.stats, "the record of a chunked part")
        return cls(outputs["passages"], stats, outputs.get("article_log"), is_new, outputs.get("spans"))


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """A part's vectors in the store: row i belongs to the part's passage i."""

    vectors: BlobRef
    rows: int
    encoded: int = 0  # number of rows that were encoded and not copied from the parent snapshot
    is_new: bool = False  # whether this run, and no earlier one, encoded the part
    truncated: int = 0  # number of encoded rows whose passage is longer than the encoder's limit
    arithmetic: str = ""  # device type and dtype of the encoded rows, such as `cuda bfloat16`

    @classmethod
    def from_record(cls, record: Record, *, is_new: bool = False) -> Self:
        """Return the result of a part from its memo record."""
        stats = record.stats
        arithmetic = f"{str(stats.get('device', '')).partition(':')[0]} {stats.get('arithmetic', '')}".strip()
        counts_and_flags = stats["rows"], stats["encoded"], is_new, int(stats.get("truncated", 0))
        return cls(record.outputs["embeddings"], *counts_and_flags, arithmetic)


@dataclass(frozen=True, slots=True)
class BuiltShard:
    """A shard of an index in the store, and what a later build needs to update it."""

    blob: BlobRef
    slices: str  # digest of the slices that it was built from
    generation: int = 0  # number of updates since it was built
    replaced: float = 0.0  # share of its vectors that was replaced since it was built

    @classmethod
    def create(cls, blob: BlobRef, slices: str, stats: Mapping[str, Any]) -> Self:
        """Return a shard with the statistics of its stage."""
        return cls(blob, slices, stats.get("generation", 0), stats.get("replaced", 0.0))

    def to_json(self) -> dict[str, Any]:
        """Return the shard as JSON values: the fields of its blob and its statistics."""
        return {**self.blob.to_json(), **{name: getattr(self, name) for name in _SHARD_FIELDS}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read a shard from the JSON values of `to_json`."""
        return cls(BlobRef(value["id"], value["size"]), *(value[name] for name in _SHARD_FIELDS))
