"""A training beside a moving index: which snapshot is asked is recorded, and a killed run goes on with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_model.encoders.encoder import Encoder
from rag_model.errors import RefusedError, StoreError
from rag_model.generate.folder import load_rag
from rag_model.store.store import Store
from rag_model.store.versions.moves import tag
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.loop.checkpoint import checkpoints, read_checkpoint
from rag_model.training.loop.journal import read_metrics
from rag_model.training.loop.loop import Trained
from tests.fixtures import moving
from tests.fixtures.moving import MOVES_AT, MovingTask, prepare, trained

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("given"))
    store = Store.open(str(folder / "store"))
    tag(store, "latest", "first")
    return folder


@pytest.fixture(scope="module")
def whole(given: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MovingTask, Trained, Path]:
    """A run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    return *trained(given, folder), folder


def test_the_snapshot_that_is_asked_stands_beside_every_step(
    given: Path, whole: tuple[MovingTask, Trained, Path]
) -> None:
    task, done, folder = whole
    first, second = (one.snapshot for one in done.asked)
    assert first == Store.open(str(given / "store")).snapshots.resolve("first") != second == task.asked
    assert [one.step for one in done.asked] == [0, MOVES_AT]
    for row in read_metrics(folder):
        assert row["snapshot"] == (first if row["step"] < MOVES_AT else second)
    ages = [row["age"] for row in read_metrics(folder) if row["kind"] == "train"]
    assert ages == [1, 2, 0, 1, 2, 3]
    assert read_checkpoint(checkpoints(folder / "checkpoints")[0]).asked == done.asked


@pytest.mark.parametrize("kill_at", [MOVES_AT, 5])  # the last checkpoint asks the first snapshot, and the second
def test_a_killed_run_goes_on_with_the_snapshot_that_it_asked(
    given: Path, whole: tuple[MovingTask, Trained, Path], tmp_path: Path, kill_at: int
) -> None:
    words = [sys.executable, moving.__file__, str(given), str(tmp_path / "killed"), str(kill_at)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(read_checkpoint(checkpoints(tmp_path / "killed" / "checkpoints")[0]).asked) == (2 if kill_at == 5 else 1)
    task, done = trained(given, tmp_path / "killed")
    assert read_metrics(tmp_path / "killed") == read_metrics(whole[2])
    assert (done.asked, done.after) == (whole[1].asked, whole[1].after)
    assert task.asked == whole[0].asked


def test_both_encoders_learn_and_are_saved_as_a_pair(given: Path, whole: tuple[MovingTask, Trained, Path]) -> None:
    task, done, _ = whole
    assert task.module.passage is not None
    before = MovingTask(given).module.state_dict()
    for part in ("question.", "passage.", "body."):
        after = {name: value for name, value in task.module.state_dict().items() if name.startswith(part)}
        assert any(not torch.equal(value, before[name]) for name, value in after.items()), part
    question = Encoder.load(done.best / "question", "question", threads=1, device="cpu")
    passage = Encoder.load(done.best / "passage", threads=1, device="cpu")
    assert question.space().digest == passage.space().digest
    assert load_rag(done.best, device="cpu").question.space().digest == passage.space().digest


def test_scores_are_those_of_the_passage_encoder_as_it_is_now_with_gradient(given: Path) -> None:
    task = MovingTask(given)
    task.module.eval()
    passage = task.module.passage
    assert passage is not None
    batch = task.batches(0)[0]
    asked = task.module.ask([pair.example.question for pair in batch])
    recalled = task._recall(batch, asked)
    held = np.einsum("bd,bkd->bk", asked.detach().numpy(), recalled.vectors)
    assert np.allclose(task._scores(asked, recalled).detach().numpy(), held, rtol=1e-3, atol=1e-3), "none has learned"
    with torch.no_grad():
        for parameter in passage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    texts = [[(one.title, one.text) for one in some] for some in recalled.passages]
    now = np.stack([passage.encode(some) for some in texts])
    scores = task._scores(asked, recalled)
    assert np.allclose(scores.detach().numpy(), np.einsum("bd,bkd->bk", asked.detach().numpy(), now), rtol=1e-4)
    assert not np.allclose(scores.detach().numpy(), held, atol=1e-2)
    loss, _ = task.loss(batch)
    loss.backward()
    assert max(float(p.grad.norm()) for p in passage.parameters() if p.grad is not None) > 1e-6


def test_a_snapshot_that_is_gone_or_of_another_space_is_refused(
    given: Path, whole: tuple[MovingTask, Trained, Path], tmp_path: Path
) -> None:
    task = MovingTask(given)
    task.module.passage = None  # passages stay: those of the second snapshot were made by another encoder
    second = Snapshot.open(str(given / "store"), whole[1].asked[-1].snapshot)
    with pytest.raises(RefusedError, match="weights differ"):
        task.turn_to(second)
    with pytest.raises(StoreError, match="no snapshot"):
        task.ask("0" * 64)
    assert task.asked == whole[1].asked[0].snapshot
