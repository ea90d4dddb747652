"""A timer records every stage of an expression once, with its rows, and does not change the result."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rag_model.encoders.encoder import Encoder
from rag_model.retrieve.factory import open_retriever, open_retrievers
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever, StageTimer
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny import save_cross_encoder

QUESTIONS = ["who wrote animal farm?", "which unit measures electric current"]


def test_every_stage_is_timed_once_after_its_legs(snapshot: Snapshot, encoder: Encoder, tmp_path: Path) -> None:
    cross = save_cross_encoder(tmp_path / "cross")
    expression = f"rerank(rrf(hnsw:5, exact), {cross}, 6):3"
    retriever, timer = open_retriever(snapshot, expression, encoder=encoder), StageTimer()
    queries = Queries(QUESTIONS, timer)
    ranking = timer.time_batch(retriever, queries, 2)
    expected = retriever.find(Queries(QUESTIONS), 2)
    assert np.array_equal(ranking.rows, expected.rows)
    assert [stage.name for stage in timer.stages] == [
        "hnsw",
        "exact",
        "rrf(hnsw:5, exact)",
        f"rerank(rrf(hnsw:5, exact), {cross}, 6)",
    ]
    hnsw, exact, fused, reranked = timer.stages
    assert (reranked.legs, fused.legs, hnsw.legs) == ((fused,), (hnsw, exact), ())
    assert hnsw.ranked_rows.rows.shape == (2, 5)
    for stage, step in zip(timer.stages, [*ranking.iter_lists()], strict=False):
        assert np.array_equal(stage.ranked_rows.rows, step.rows)
    assert all(stage.encoders == (encoder,) for stage in timer.stages)
    assert queries.get_encoding_seconds(encoder) == queries.encoding_seconds
    assert list(reranked.files) == sorted(str(path) for path in cross.iterdir())
    assert all(stage.seconds > 0 for stage in timer.stages)
    assert queries.encoding_seconds > 0


def test_timer_keeps_only_the_last_batch(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever, timer = open_retriever(snapshot, "hnsw", encoder=encoder), StageTimer()
    for texts in (QUESTIONS, QUESTIONS[:1]):
        timer.time_batch(retriever, Queries(texts, timer), 2)
        assert [len(stage.ranked_rows.rows) for stage in timer.stages] == [len(texts)]


def test_part_of_a_batch_is_timed(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever, timer = open_retriever(snapshot, "rrf(hnsw, exact)", encoder=encoder), StageTimer()
    part = Queries(QUESTIONS, timer).subset([1])
    timer.time_batch(retriever, part, 2)
    assert [stage.name for stage in timer.stages] == ["hnsw", "exact", "rrf(hnsw, exact)"]
    assert part.encoding_seconds > 0


def test_a_stage_reads_the_files_of_its_index(snapshot: Snapshot, encoder: Encoder) -> None:
    files = snapshot.manifest.content.files
    hnsw, exact, fused = open_retrievers(snapshot, ["hnsw", "exact", "rrf(hnsw, exact)"], encoder=encoder)
    assert hnsw.files == {"index/hnsw.faiss": files["index/hnsw.faiss"].size}
    vectors = [f"embeddings/part-0000{part}.npy" for part in (0, 1)]
    assert exact.files == {path: files[path].size for path in vectors}
    assert fused.files == {}


class NeighborsRetriever(SnapshotRetriever):
    """A retriever that adds a list of its own to that of its leg."""

    def __init__(self, leg: ChildRetriever) -> None:
        super().__init__(leg.retriever.snapshot, f"near({leg.name})")
        self._leg = leg

    def find(self, queries: Queries, k: int) -> RankedRows:
        ranking = self._leg.find(queries, k)
        neighbors = RankedRows("neighbours", ranking.rows[:, 1:], ranking.scores[:, 1:])
        return replace(ranking, name=self.name, legs=(ranking, neighbors))


def test_intermediate_list_of_a_retriever_is_a_stage(snapshot: Snapshot, encoder: Encoder) -> None:
    timer = StageTimer()
    retriever = NeighborsRetriever(ChildRetriever(open_retriever(snapshot, "hnsw", encoder=encoder)))
    timer.time_batch(retriever, Queries(QUESTIONS, timer), 3)
    assert [(stage.name, stage.ranked_rows.rows.shape[1]) for stage in timer.stages] == [
        ("hnsw", 3),
        ("neighbours", 2),
        ("near(hnsw)", 3),
    ]
    assert timer.stages[1].files == {}
