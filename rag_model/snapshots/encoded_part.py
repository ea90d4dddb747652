"""What the embed job reports of one part: a record, written as JSON at the store's border and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Record


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part's vectors in the store, row for row with its passages."""

    vectors: BlobRef
    rows: int
    encoded: int = 0  # rows that went through the encoder; the others kept an earlier snapshot's vectors
    made: bool = False  # by this run, and not by an earlier one

    @classmethod
    def of(cls, record: Record, *, made: bool = False) -> Self:
        """Return what the memo has of a part."""
        return cls(record.outputs["embeddings"], record.facts["rows"], record.facts["encoded"], made)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"vectors": self.vectors.to_json(), "rows": self.rows, "encoded": self.encoded, "made": self.made}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote."""
        return cls(BlobRef.from_json(value["vectors"]), value["rows"], value["encoded"], value["made"])
