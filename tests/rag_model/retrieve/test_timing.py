"""What a watch sees of an expression: every stage once, with its rows, and nothing changed by being watched."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rag_model.encoders.encoder import Encoder
from rag_model.retrieve.factory import open_retriever, open_retrievers
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever, StageTimer
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny import save_cross_encoder

ASKED = ["who wrote animal farm?", "which unit measures electric current"]


def test_every_stage_is_seen_once_parts_before_the_whole(snapshot: Snapshot, encoder: Encoder, tmp_path: Path) -> None:
    cross = save_cross_encoder(tmp_path / "cross")
    expression = f"rerank(rrf(hnsw:5, exact), {cross}, 6):3"
    retriever, watch = open_retriever(snapshot, expression, encoder=encoder), StageTimer()
    asked = Queries(ASKED, watch)
    found = watch.time_batch(retriever, asked, 2)
    unwatched = retriever.find(Queries(ASKED), 2)
    assert np.array_equal(found.rows, unwatched.rows)
    assert [stage.name for stage in watch.stages] == [
        "hnsw",
        "exact",
        "rrf(hnsw, exact)",
        f"rerank(rrf(hnsw, exact), {cross})",
    ]
    hnsw, exact, fused, whole = watch.stages
    assert (whole.legs, fused.legs, hnsw.legs) == ((fused,), (hnsw, exact), ())
    assert hnsw.ranked.rows.shape == (2, 5)
    for stage, step in zip(watch.stages, [*found.iter_lists()], strict=False):
        assert np.array_equal(stage.ranked.rows, step.rows)
    assert all(stage.encoders == (encoder,) for stage in watch.stages)
    assert asked.get_encoding_seconds(encoder) == asked.encoding_seconds
    assert list(whole.files) == sorted(str(path) for path in cross.iterdir())
    assert all(stage.seconds > 0 for stage in watch.stages)
    assert asked.encoding_seconds > 0


def test_the_second_batch_forgets_the_first(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever, watch = open_retriever(snapshot, "hnsw", encoder=encoder), StageTimer()
    for texts in (ASKED, ASKED[:1]):
        watch.time_batch(retriever, Queries(texts, watch), 2)
        assert [len(stage.ranked.rows) for stage in watch.stages] == [len(texts)]


def test_a_part_of_a_batch_is_watched_too(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever, watch = open_retriever(snapshot, "rrf(hnsw, exact)", encoder=encoder), StageTimer()
    part = Queries(ASKED, watch).subset([1])
    watch.time_batch(retriever, part, 2)
    assert [stage.name for stage in watch.stages] == ["hnsw", "exact", "rrf(hnsw, exact)"]
    assert part.encoding_seconds > 0


def test_a_stage_reads_the_files_of_its_index(snapshot: Snapshot, encoder: Encoder) -> None:
    files = snapshot.manifest.content.files
    hnsw, exact, fused = open_retrievers(snapshot, ["hnsw", "exact", "rrf(hnsw, exact)"], encoder=encoder)
    assert hnsw.files == {"index/hnsw.faiss": files["index/hnsw.faiss"].size}
    vectors = [f"embeddings/part-0000{part}.npy" for part in (0, 1)]
    assert exact.files == {path: files[path].size for path in vectors}
    assert fused.files == {}


class Neighbours(SnapshotRetriever):
    """Adds a list of its own making to what a leg found."""

    def __init__(self, leg: ChildRetriever) -> None:
        super().__init__(leg.retriever.snapshot, f"near({leg.name})")
        self._leg = leg

    def find(self, asked: Queries, k: int) -> RankedRows:
        below = self._leg.find(asked, k)
        return replace(
            below, name=self.name, legs=(below, RankedRows("neighbours", below.rows[:, 1:], below.scores[:, 1:]))
        )


def test_a_list_that_a_retriever_made_on_the_way_is_a_stage(snapshot: Snapshot, encoder: Encoder) -> None:
    watch = StageTimer()
    retriever = Neighbours(ChildRetriever(open_retriever(snapshot, "hnsw", encoder=encoder)))
    watch.time_batch(retriever, Queries(ASKED, watch), 3)
    assert [(stage.name, stage.ranked.rows.shape[1]) for stage in watch.stages] == [
        ("hnsw", 3),
        ("neighbours", 2),
        ("near(hnsw)", 3),
    ]
    assert watch.stages[1].files == {}
