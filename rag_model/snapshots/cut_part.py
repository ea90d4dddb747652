"""The chunk job's report of one part: a record, written as JSON only where it enters the store."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from rag_model.corpus.chunk import ChunkFacts, Quarantined
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Record


@dataclass(frozen=True, slots=True)
class CutPart:
    """A part's passages in the store, and the counts of its pages."""

    passages: BlobRef
    facts: ChunkFacts
    article_log: BlobRef | None = None  # of a wiki's part; None: later builds do not inherit from it
    made: bool = False  # by this run, not by an earlier one
    spans: BlobRef | None = None  # salient spans, where the recipe keeps them

    @property
    def rows(self) -> int:
        """The number of passages."""
        return self.facts.rows

    @classmethod
    def of(cls, record: Record, *, made: bool = False) -> Self:
        """Return the report of a part from its memo record."""
        found = record.outputs
        return cls(found["passages"], _facts(record.facts), found.get("article_log"), made, found.get("spans"))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        log = BlobRef.from_json(value["article_log"]) if value["article_log"] else None
        spans = BlobRef.from_json(value["spans"]) if value["spans"] else None
        return cls(BlobRef.from_json(value["passages"]), _facts(value["facts"]), log, value["made"], spans)


def _facts(value: Mapping[str, Any]) -> ChunkFacts:
    pages = tuple(Quarantined(**page) for page in value["quarantined"])
    return replace(ChunkFacts(**value), quarantined=pages)
