"""End-to-end RAG: the searched snapshot is recorded and kept after a restart, and each part of the model learns."""

import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_model.encoders.encoder import Encoder
from rag_model.errors import RefusedError, StoreError
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.rag_folder import load_rag
from rag_model.index.files.engine import Vectors
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.memory import RetrievedBatch
from rag_model.training.loop.checkpoint import list_checkpoints, read_checkpoint, read_metrics
from rag_model.training.loop.loop import TrainingResult
from rag_model.training.objectives.end2end import End2EndRecipe, End2EndTask, Statement, StatementPair
from rag_model.training.objectives.rag import QuestionAnswer, RagBatch
from tests.fixtures.forked_processes import SHARED, check_killed
from tests.fixtures.tiny_end2end import (
    ARTICLES,
    INTERVAL,
    SETTINGS,
    DelayedRebuilder,
    make_task,
    prepare,
    train_and_kill,
    train_in,
)
from tests.fixtures.tiny_snapshot import publish_tiny

pytestmark = SHARED


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("given"))
    store = Store.open(str(folder / "store"))
    tag(store, "latest", "first")
    return folder


@pytest.fixture(scope="module")
def uninterrupted_run(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[End2EndTask, TrainingResult, Path]:
    """Return the task, result and folder of a run that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    return *train_in(inputs, folder), folder


def read_rows(folder: Path) -> list[dict[str, object]]:
    """Return the metrics of a training without the times."""
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in read_metrics(folder)]


def keep_questions(batch: RagBatch) -> RagBatch:
    """Return the questions of a batch, without its statements."""
    return tuple(pair for pair in batch if not isinstance(pair, StatementPair))


def encode_lists(task: End2EndTask, retrieved: RetrievedBatch) -> Vectors:
    """Encode the passages of each question with the current passage encoder: (questions, passages, dim)."""
    texts = [[(passage.title, passage.text) for passage in passages] for passages in retrieved.passages]
    return np.stack([task._passage.encode(each) for each in texts])


def test_metrics_name_the_searched_snapshot_of_every_step(
    inputs: Path, uninterrupted_run: tuple[End2EndTask, TrainingResult, Path]
) -> None:
    task, result, folder = uninterrupted_run
    first, second = (searched.snapshot for searched in result.searched_snapshots)
    assert first == Store.open(str(inputs / "store")).snapshots.resolve("first") != second == task.searched_snapshot
    assert [searched.step for searched in result.searched_snapshots] == [0, INTERVAL + 1]
    for row in read_metrics(folder):
        assert row["snapshot"] == (first if row["step"] <= INTERVAL else second)
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    assert [row["snapshot_age"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["rebuild_seconds"] for row in rows] == [0, 0, 0, 3, 3, 3]
    assert [row["swap_seconds"] > 0 for row in rows] == [False] * 3 + [True] * 3
    assert read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).searched_snapshots == result.searched_snapshots


@pytest.mark.parametrize("kill_at", [INTERVAL + 1, 5])  # the last checkpoint has one or two searched snapshots
def test_killed_run_resumes_with_the_searched_snapshot(
    inputs: Path, uninterrupted_run: tuple[End2EndTask, TrainingResult, Path], tmp_path: Path, kill_at: int
) -> None:
    check_killed(train_and_kill, kill_at, inputs, tmp_path / "killed", "synchronous")
    newest = read_checkpoint(list_checkpoints(tmp_path / "killed" / "checkpoints")[0])
    assert len(newest.searched_snapshots) == (2 if kill_at == 5 else 1)
    task, result = train_in(inputs, tmp_path / "killed")
    assert read_rows(tmp_path / "killed") == read_rows(uninterrupted_run[2])
    assert result.searched_snapshots == uninterrupted_run[1].searched_snapshots
    assert result.best_measures == uninterrupted_run[1].best_measures
    assert task.searched_snapshot == uninterrupted_run[0].searched_snapshot


def test_killed_asynchronous_run_searches_its_snapshot_until_the_started_rebuild_ends(
    inputs: Path, tmp_path: Path
) -> None:
    folder, rebuild = tmp_path / "killed", DelayedRebuilder(inputs)
    check_killed(train_and_kill, 5, inputs, folder, "asynchronous")  # the last checkpoint follows the rebuild of step 3
    saved_encoders = {path: path.read_bytes() for path in (folder / "refreshes").rglob("*.safetensors")}
    assert {path.relative_to(folder / "refreshes").parts[0] for path in saved_encoders} == {"step-00000003"}

    def finish_rebuild(step: int) -> None:
        if step == 5:
            assert {path: path.read_bytes() for path in saved_encoders} == saved_encoders, "weights of step 3"
            rebuild.finish(rebuild.orders[0])

    task, result = train_in(inputs, folder, "asynchronous", finish_rebuild, rebuild=lambda _: rebuild)
    assert [order.step for order in rebuild.orders] == [INTERVAL]
    first, second = (searched.snapshot for searched in result.searched_snapshots)
    assert (second, task.searched_snapshot, result.steps) == (rebuild.results[INTERVAL].snapshot, second, 6)  # type: ignore[union-attr]
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    assert [(row["step"], row["snapshot"]) for row in rows] == [*((step, first) for step in range(1, 6)), (6, second)]
    assert [row["snapshot_age"] for row in rows] == [0, 1, 2, 3, 4, 2]


def test_all_parts_learn_and_the_encoders_are_saved_as_a_pair(
    inputs: Path, uninterrupted_run: tuple[End2EndTask, TrainingResult, Path], tmp_path: Path
) -> None:
    task, result, _ = uninterrupted_run
    assert task.module.passage is not None
    initial_state = make_task(inputs, tmp_path).module.state_dict()
    for part in ("question.", "passage.", "body."):
        final_state = {name: value for name, value in task.module.state_dict().items() if name.startswith(part)}
        assert any(not torch.equal(value, initial_state[name]) for name, value in final_state.items()), part
    question = Encoder.load(result.best_folder / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(result.best_folder / "passage", threads=1, device="cpu")
    assert question.space().digest == passage.space().digest
    assert load_rag(result.best_folder, device="cpu").question.space().digest == passage.space().digest


def test_scores_use_the_current_passage_encoder_and_its_gradient(inputs: Path, tmp_path: Path) -> None:
    task = make_task(inputs, tmp_path, statements=[])
    task.module.eval()
    passage = task.module.passage
    assert passage is not None
    batch = keep_questions(task.batches(0)[0])
    query_vectors = task.module.embed_questions([pair.example.question for pair in batch])
    retrieved = task._retrieve_batch(batch, query_vectors)
    index_scores = np.einsum("bd,bkd->bk", query_vectors.detach().numpy(), retrieved.vectors)
    assert np.allclose(
        task._compute_logits(query_vectors, retrieved).detach().numpy(), index_scores, rtol=1e-3, atol=1e-3
    ), "the passage encoder is still that of the index"
    with torch.no_grad():
        for parameter in passage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    current_vectors = encode_lists(task, retrieved)
    scores = task._compute_logits(query_vectors, retrieved)
    current_scores = np.einsum("bd,bkd->bk", query_vectors.detach().numpy(), current_vectors)
    assert np.allclose(scores.detach().numpy(), current_scores, rtol=1e-4)
    assert not np.allclose(scores.detach().numpy(), index_scores, atol=1e-2)
    loss, _ = task.loss(batch)
    loss.backward()
    assert max(float(p.grad.norm()) for p in passage.parameters() if p.grad is not None) > 1e-6


def test_candidates_are_reranked_by_the_current_passage_encoder(inputs: Path, tmp_path: Path) -> None:
    task = make_task(inputs, tmp_path)
    task.module.eval()
    with torch.no_grad():
        for parameter in task._passage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = keep_questions(task.batches(0)[0])
    query_vectors = task.module.embed_questions([pair.example.question for pair in batch])
    questions = [pair.example.question for pair in batch]
    candidates = task._memory.retrieve(questions, query_vectors.detach().numpy(), SETTINGS.n_candidates)
    scores = np.einsum("bd,bcd->bc", query_vectors.detach().numpy(), encode_lists(task, candidates))
    reranked = [
        [passages[row] for row in np.argsort(-passage_scores)[:3]]
        for passages, passage_scores in zip(candidates.passages, scores, strict=True)
    ]
    retrieved = task._retrieve_batch(batch, query_vectors)
    assert retrieved.passages == reranked != [passages[:3] for passages in candidates.passages]
    assert np.allclose([[hit.score for hit in hits] for hits in retrieved.hits], -np.sort(-scores)[:, :3], rtol=1e-4)


class RecordingTask(End2EndTask):
    """Records the last inputs of the generator."""

    generator_inputs: tuple[Sequence[QuestionAnswer], RetrievedBatch]

    def _encode_inputs(self, batch: Sequence[QuestionAnswer], retrieved: RetrievedBatch) -> tuple[Contexts, Targets]:
        self.generator_inputs = batch, retrieved
        return super()._encode_inputs(batch, retrieved)


def test_statement_is_reconstructed_from_other_passages(inputs: Path, tmp_path: Path) -> None:
    task = make_task(inputs, tmp_path, kind=RecordingTask)
    assert isinstance(task, RecordingTask)
    batches = [batch for epoch in range(6) for batch in task.batches(epoch)]
    statements = [pair for batch in batches for pair in batch if isinstance(pair, StatementPair)]
    for round_ in (statements[:6], statements[6:12]):
        assert sorted(pair.example.id for pair in round_) == [f"statement {x}" for x in "abcdef"]
    assert statements[:6] != statements[6:12]
    task._compute_reconstruction_loss(statements[:4]).backward()
    pairs, retrieved = task.generator_inputs
    assert [pair.example.question for pair in pairs] == ["<p>"] * 4
    for pair, passages in zip(statements[:4], retrieved.passages, strict=True):
        assert len(passages) == 3
        assert pair.answer not in [passage.text for passage in passages]
    for part in (task._question, task._passage, task.module.body):
        assert max(float(p.grad.norm()) for p in part.parameters() if p.grad is not None) > 1e-6


def test_corpus_of_one_passage_has_no_reconstruction_loss(inputs: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, end2end=End2EndRecipe("sequence"))
    task = make_task(inputs, tmp_path, settings)
    (tmp_path / "work").mkdir()
    articles = dict(list(ARTICLES.items())[:1])
    task.switch_to(publish_tiny(Store.open(str(inputs / "store")), inputs / "encoder", articles, tmp_path / "work"))
    batch = task.batches(0)[0]
    actual = StatementPair.from_statement(Statement("a", ARTICLES["City a"]))
    loss, measures = task.loss((*keep_questions(batch), actual))
    loss.backward()
    assert loss.isfinite()
    assert measures["reconstruction_loss"] == 0
    assert np.isfinite(task.evaluate()["nll"])


def test_equal_likelihoods_give_the_encoders_no_gradient(inputs: Path, tmp_path: Path) -> None:
    settings = replace(
        SETTINGS, rag=replace(SETTINGS.rag, label_smoothing=0.0), end2end=End2EndRecipe("sequence")
    )  # label smoothing would prefer probable tokens
    task = make_task(inputs, tmp_path, settings, statements=[])
    with torch.no_grad():
        for parameter in task.module.body.parameters():
            parameter.zero_()
    loss, _ = task.loss(keep_questions(task.batches(0)[0]))
    loss.backward()
    assert loss.isfinite()
    norms = [float(p.grad.norm()) for p in task._passage.parameters() if p.grad is not None]
    assert max(norms) < 1e-4


def test_full_disk_fails_the_rebuild_and_not_the_training(inputs: Path, tmp_path: Path) -> None:
    task = make_task(inputs, tmp_path)
    first, (soft, hard) = task.searched_snapshot, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes; a write beyond fails, as on a full disk
    try:
        metrics = task.move_index(INTERVAL + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (metrics["refreshes_failed"], task.searched_snapshot) == (1, first)
    assert task.loss(task.batches(0)[0])[0].isfinite()
    assert not [*(tmp_path / "refreshes").rglob("*.safetensors")]
    assert task.move_index(2 * INTERVAL + 1)["refreshes_failed"] == 1
    assert task.searched_snapshot != first, "the next rebuild succeeds"


def test_missing_snapshot_and_another_encoder_space_are_refused(
    inputs: Path, uninterrupted_run: tuple[End2EndTask, TrainingResult, Path], tmp_path: Path
) -> None:
    task = make_task(inputs, tmp_path)
    task.module.passage = None  # Passages are then not encoded again; the second snapshot has another encoder.
    second = Snapshot.open(str(inputs / "store"), uninterrupted_run[1].searched_snapshots[-1].snapshot)
    with pytest.raises(RefusedError, match="weights differ"):
        task.switch_to(second)
    with pytest.raises(StoreError, match="is missing"):
        task.search_snapshot("0" * 64)
    assert task.searched_snapshot == uninterrupted_run[1].searched_snapshots[0].snapshot
