"""The result of a stage survives JSON."""

import json
from dataclasses import asdict, replace

from rag_model.corpus.chunk import ChunkStats, QuarantinedPage
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.toml import from_table

BLOBS = [BlobRef(f"sha256:{digit * 64}", 7) for digit in "ab"]
STATS = ChunkStats(
    rows=3,
    digest="sha256:0",
    articles=2,
    dropped={"redirect": 5},
    quarantined=(QuarantinedPage("4", "Page 4", "too deep"),),
    newest_revision="2026-01-03T00:00:00Z",
    words=40,
    lengths={"10": 3},
    inherited=1,
)


def test_a_chunk_result_survives_json() -> None:
    full = ChunkResult(BLOBS[0], STATS, BLOBS[1], is_new=True)
    for result in (full, replace(full, article_log=None, is_new=False), ChunkResult(BLOBS[0], ChunkStats(3))):
        assert from_table(ChunkResult, json.loads(json.dumps(asdict(result))), "a report") == result
