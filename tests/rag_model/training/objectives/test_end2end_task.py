"""End-to-end RAG: the asked snapshot is recorded, a killed run goes on with it, and each part of the model learns."""

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
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.memory import RetrievedBatch
from rag_model.training.loop.checkpoint import list_checkpoints, read_checkpoint, read_metrics
from rag_model.training.loop.loop import TrainingResult
from rag_model.training.objectives.end2end import End2EndRecipe, End2EndTask, Statement, StatementPair
from rag_model.training.objectives.rag import QuestionAnswer, RagBatch
from tests.fixtures.forked_processes import SHARED, check_killed
from tests.fixtures.tiny_end2end import ARTICLES, EVERY, SETTINGS, Under, prepare, task_of, train_until, trained
from tests.fixtures.tiny_snapshot import publish_tiny

pytestmark = SHARED


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("given"))
    store = Store.open(str(folder / "store"))
    tag(store, "latest", "first")
    return folder


@pytest.fixture(scope="module")
def whole(given: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[End2EndTask, TrainingResult, Path]:
    """A run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    return *trained(given, folder), folder


def losses(folder: Path) -> list[dict[str, object]]:
    """Return the rows of a training without its times."""
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in read_metrics(folder)]


def answered(batch: RagBatch) -> RagBatch:
    """Return the questions of a batch, without its statements."""
    return tuple(pair for pair in batch if not isinstance(pair, StatementPair))


def test_the_snapshot_that_is_asked_stands_beside_every_step(
    given: Path, whole: tuple[End2EndTask, TrainingResult, Path]
) -> None:
    task, done, folder = whole
    first, second = (searched_snapshot.snapshot for searched_snapshot in done.searched_snapshots)
    assert first == Store.open(str(given / "store")).snapshots.resolve("first") != second == task.searched_snapshot
    assert [searched_snapshot.step for searched_snapshot in done.searched_snapshots] == [0, EVERY + 1]
    for row in read_metrics(folder):
        assert row["snapshot"] == (first if row["step"] <= EVERY else second)
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    assert [row["snapshot_age"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["rebuild_seconds"] for row in rows] == [0, 0, 0, 3, 3, 3]
    assert [row["swap_seconds"] > 0 for row in rows] == [False] * 3 + [True] * 3
    assert read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).searched_snapshots == done.searched_snapshots


@pytest.mark.parametrize("kill_at", [EVERY + 1, 5])  # the last checkpoint asks the first snapshot, and the second
def test_a_killed_run_goes_on_with_the_snapshot_that_it_asked(
    given: Path, whole: tuple[End2EndTask, TrainingResult, Path], tmp_path: Path, kill_at: int
) -> None:
    check_killed(train_until, kill_at, given, tmp_path / "killed", "synchronous")
    assert len(read_checkpoint(list_checkpoints(tmp_path / "killed" / "checkpoints")[0]).searched_snapshots) == (
        2 if kill_at == 5 else 1
    )
    task, done = trained(given, tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(whole[2])
    assert (done.searched_snapshots, done.best_measures) == (whole[1].searched_snapshots, whole[1].best_measures)
    assert task.searched_snapshot == whole[0].searched_snapshot


def test_an_asynchronous_run_that_is_killed_asks_its_snapshot_until_the_rebuild_that_was_begun_is_there(
    given: Path, tmp_path: Path
) -> None:
    folder, made = tmp_path / "killed", Under(given)
    check_killed(
        train_until, 5, given, folder, "asynchronous"
    )  # the checkpoint is of step 4, where the rebuild of step 3 began
    begun = {path: path.read_bytes() for path in (folder / "refreshes").rglob("*.safetensors")}
    assert {path.relative_to(folder / "refreshes").parts[0] for path in begun} == {"step-00000003"}

    def after(step: int) -> None:
        if step == 5:
            assert {path: path.read_bytes() for path in begun} == begun, "it is made with the weights of its own step"
            made.finish(made.orders[0])

    task, done = trained(given, folder, "asynchronous", after, rebuild=lambda _: made)
    assert [order.step for order in made.orders] == [EVERY]
    first, second = (searched_snapshot.snapshot for searched_snapshot in done.searched_snapshots)
    assert (second, task.searched_snapshot, done.steps) == (made.ended[EVERY].snapshot, second, 6)  # type: ignore[union-attr]
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    assert [(row["step"], row["snapshot"]) for row in rows] == [*((step, first) for step in range(1, 6)), (6, second)]
    assert [row["snapshot_age"] for row in rows] == [0, 1, 2, 3, 4, 2]


def test_both_encoders_learn_and_are_saved_as_a_pair(
    given: Path, whole: tuple[End2EndTask, TrainingResult, Path], tmp_path: Path
) -> None:
    task, done, _ = whole
    assert task.module.passage is not None
    before = task_of(given, tmp_path).module.state_dict()
    for part in ("question.", "passage.", "body."):
        after = {name: value for name, value in task.module.state_dict().items() if name.startswith(part)}
        assert any(not torch.equal(value, before[name]) for name, value in after.items()), part
    question = Encoder.load(done.best_folder / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(done.best_folder / "passage", threads=1, device="cpu")
    assert question.space().digest == passage.space().digest
    assert load_rag(done.best_folder, device="cpu").question.space().digest == passage.space().digest


def test_scores_are_those_of_the_passage_encoder_as_it_is_now_with_gradient(given: Path, tmp_path: Path) -> None:
    task = task_of(given, tmp_path, statements=[])
    task.module.eval()
    passage = task.module.passage
    assert passage is not None
    batch = answered(task.batches(0)[0])
    asked = task.module.embed_questions([pair.example.question for pair in batch])
    recalled = task._retrieve_batch(batch, asked)
    held = np.einsum("bd,bkd->bk", asked.detach().numpy(), recalled.vectors)
    assert np.allclose(task._compute_logits(asked, recalled).detach().numpy(), held, rtol=1e-3, atol=1e-3), (
        "none has learned"
    )
    with torch.no_grad():
        for parameter in passage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    texts = [[(one.title, one.text) for one in passage] for passage in recalled.passages]
    now = np.stack([passage.encode(text) for text in texts])
    scores = task._compute_logits(asked, recalled)
    assert np.allclose(scores.detach().numpy(), np.einsum("bd,bkd->bk", asked.detach().numpy(), now), rtol=1e-4)
    assert not np.allclose(scores.detach().numpy(), held, atol=1e-2)
    loss, _ = task.loss(batch)
    loss.backward()
    assert max(float(p.grad.norm()) for p in passage.parameters() if p.grad is not None) > 1e-6


def test_the_best_of_more_candidates_are_read_by_the_encoder_as_it_is_now(given: Path, tmp_path: Path) -> None:
    task = task_of(given, tmp_path)
    task.module.eval()
    with torch.no_grad():
        for parameter in task._passage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = answered(task.batches(0)[0])
    asked = task.module.embed_questions([pair.example.question for pair in batch])
    wide = task._memory.retrieve(
        [pair.example.question for pair in batch], asked.detach().numpy(), SETTINGS.n_candidates
    )
    now = np.stack([task._passage.encode([(one.title, one.text) for one in passage]) for passage in wide.passages])
    scores = np.einsum("bd,bcd->bc", asked.detach().numpy(), now)
    best = [
        [passage[place] for place in np.argsort(-own)[:3]] for passage, own in zip(wide.passages, scores, strict=True)
    ]
    read = task._retrieve_batch(batch, asked)
    assert read.passages == best != [passage[:3] for passage in wide.passages]
    assert np.allclose([[hit.score for hit in some] for some in read.hits], -np.sort(-scores)[:, :3], rtol=1e-4)


class Watched(End2EndTask):
    """Keeps what the generator is given to read."""

    read: tuple[Sequence[QuestionAnswer], RetrievedBatch]

    def _encode_inputs(self, batch: Sequence[QuestionAnswer], recalled: RetrievedBatch) -> tuple[Contexts, Targets]:
        self.read = batch, recalled
        return super()._encode_inputs(batch, recalled)


def test_a_statement_is_written_from_other_passages_than_its_own(given: Path, tmp_path: Path) -> None:
    task = task_of(given, tmp_path, kind=Watched)
    assert isinstance(task, Watched)
    batches = [batch for epoch in range(6) for batch in task.batches(epoch)]
    stated = [pair for batch in batches for pair in batch if isinstance(pair, StatementPair)]
    for turn in (stated[:6], stated[6:12]):
        assert sorted(pair.example.id for pair in turn) == [f"statement {x}" for x in "abcdef"], "each once a round"
    assert stated[:6] != stated[6:12]
    task._compute_reconstruction_loss(stated[:4]).backward()
    pairs, recalled = task.read
    assert [pair.example.question for pair in pairs] == ["<p>"] * 4
    for pair, passages in zip(stated[:4], recalled.passages, strict=True):
        assert len(passages) == 3
        assert pair.answer not in [passage.text for passage in passages]
    for part in (task._question, task._passage, task.module.body):
        assert max(float(p.grad.norm()) for p in part.parameters() if p.grad is not None) > 1e-6


def test_a_corpus_of_one_passage_has_nothing_to_write_a_statement_from(given: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, end2end=End2EndRecipe("sequence"))
    task = task_of(given, tmp_path, settings)
    (tmp_path / "work").mkdir()
    one = dict(list(ARTICLES.items())[:1])
    task.switch_to(publish_tiny(Store.open(str(given / "store")), given / "encoder", one, tmp_path / "work"))
    batch = task.batches(0)[0]
    actual = StatementPair.from_statement(Statement("a", ARTICLES["City a"]))
    loss, measures = task.loss((*answered(batch), actual))
    loss.backward()
    assert loss.isfinite()
    assert measures["reconstruction_loss"] == 0
    assert np.isfinite(task.evaluate()["nll"])


def test_a_generator_that_gives_each_passage_the_same_score_leaves_the_prior(given: Path, tmp_path: Path) -> None:
    settings = replace(
        SETTINGS, rag=replace(SETTINGS.rag, label_smoothing=0.0), end2end=End2EndRecipe("sequence")
    )  # smoothing prefers what is probable
    task = task_of(given, tmp_path, settings, statements=[])
    with torch.no_grad():
        for parameter in task.module.body.parameters():
            parameter.zero_()
    loss, _ = task.loss(answered(task.batches(0)[0]))
    loss.backward()
    assert loss.isfinite()
    norms = [float(p.grad.norm()) for p in task._passage.parameters() if p.grad is not None]
    assert max(norms) < 1e-4, "equal likelihoods teach the encoders nothing"


def test_a_disk_without_room_for_the_encoders_fails_the_rebuild_and_not_the_training(
    given: Path, tmp_path: Path
) -> None:
    task = task_of(given, tmp_path)
    before, (soft, hard) = task.searched_snapshot, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes; a write beyond fails, as on a full disk
    try:
        said = task.move_index(EVERY + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (said["refreshes_failed"], task.searched_snapshot) == (1, before)
    assert task.loss(task.batches(0)[0])[0].isfinite()
    assert not [*(tmp_path / "refreshes").rglob("*.safetensors")]
    assert task.move_index(2 * EVERY + 1)["refreshes_failed"] == 1
    assert task.searched_snapshot != before, "the next one finds room"


def test_a_snapshot_that_is_gone_or_of_another_space_is_refused(
    given: Path, whole: tuple[End2EndTask, TrainingResult, Path], tmp_path: Path
) -> None:
    task = task_of(given, tmp_path)
    task.module.passage = None  # passages stay: those of the second snapshot were made by another encoder
    second = Snapshot.open(str(given / "store"), whole[1].searched_snapshots[-1].snapshot)
    with pytest.raises(RefusedError, match="weights differ"):
        task.switch_to(second)
    with pytest.raises(StoreError, match="is missing"):
        task.search_snapshot("0" * 64)
    assert task.searched_snapshot == whole[1].searched_snapshots[0].snapshot
