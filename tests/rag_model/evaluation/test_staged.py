"""A retriever measured stage by stage over a small real snapshot, beside what each stage gives alone."""

from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.evaluation.judging import Judge
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval import ask
from rag_model.evaluation.staged import Timing, measure_stages
from rag_model.retrieve.factory import open_retriever
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny import save_cross_encoder

ASKED = (
    Question("a", "who wrote animal farm?", ("Orwell",), passages=("1-0",), source="one"),
    Question("b", "what does the aardvark eat", ("ants",), passages=("2-0",), source="two"),
    Question("c", "which unit measures electric current", ("ampere",), passages=("3-0",), source="one"),
    Question("d", "which city is the capital", ("Montgomery",), passages=("4-0", "10-0"), source="two"),
)


def test_each_stage_has_the_figures_that_it_has_alone(snapshot: Snapshot, encoder: Encoder, tmp_path: Path) -> None:
    fused = "rrf(hnsw, ivfpq:3)"
    whole = f"rerank({fused}, {save_cross_encoder(tmp_path / 'cross')}, 5)"
    told: list[tuple[int, int]] = []
    for by in ("answers", "passages"):
        judge = Judge.of(QuestionSet(ASKED), by)
        retriever = open_retriever(snapshot, whole, encoder=encoder)
        seen = measure_stages(retriever, whole, ASKED, judge, 3, tell=lambda *far: told.append(far))
        alone = [
            list(ask(open_retriever(snapshot, one, encoder=encoder), ASKED, 3))
            for one in ("hnsw", "ivfpq", fused, whole)
        ]
        assert [stage.name for stage in seen.stages[:3]] == ["hnsw", "ivfpq", "rrf(hnsw, ivfpq)"]
        for stage, outcomes in zip(seen.stages, alone, strict=True):
            assert stage.values == judge.values(outcomes, [*judge.measures(3), *judge.ranks(3)])
        assert list(seen.outcomes) == alone[-1]
    assert told == [(4, 4)] * 2


def test_time_and_bytes_add_up(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "rrf(hnsw, exact, ivfpq)", encoder=encoder)
    seen = measure_stages(retriever, "x", ASKED, Judge("answers"), 3, Timing(3))
    files = snapshot.manifest.content.files
    *legs, whole = seen.stages
    assert seen.timed == 3
    own = sum(stage.milliseconds for stage in seen.stages)
    assert whole.total_milliseconds == pytest.approx(own + seen.encoder_milliseconds)
    assert all(
        stage.total_milliseconds == pytest.approx(stage.milliseconds + seen.encoder_milliseconds) for stage in legs
    )
    sizes = [files["index/hnsw.faiss"].size, *(sum(files[f"embeddings/part-0000{n}.npy"].size for n in (0, 1)),)]
    sizes.append(files["index/ivfpq.faiss"].size)
    assert [stage.bytes for stage in legs] == sizes
    assert whole.bytes == 0
    encoders = sum(blob.size for path, blob in files.items() if path.startswith("encoder/question/"))
    assert (seen.encoder_bytes, whole.total_bytes) == (encoders, sum(sizes) + encoders)


def test_one_question_is_timed_however_little_time_there_is(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "hnsw", encoder=encoder)
    assert measure_stages(retriever, "hnsw", ASKED, Judge("answers"), 3, Timing(50, 0.0)).timed == 1
    assert measure_stages(retriever, "hnsw", ASKED, Judge("answers"), 3).timed == 4


@pytest.mark.parametrize(("k", "text"), [(0, "who?"), (13, "who?"), (3, " ")])
def test_what_no_search_takes_is_refused(k: int, text: str, snapshot: Snapshot, encoder: Encoder) -> None:
    with pytest.raises(UsageError):
        measure_stages(
            open_retriever(snapshot, "hnsw", encoder=encoder), "hnsw", [Question("q", text)], Judge("answers"), k
        )


def test_a_timing_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 question"):
        Timing(0)
