"""A training on one machine that goes on on another one, which has only the store."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rag_model.digest import digest_bytes
from rag_model.errors import BookwheelError, StoreError
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.training.checkpoint_uploads import CheckpointUploader, TrainingIdentity, restore_checkpoint
from rag_model.training.loop.checkpoint import list_checkpoints, read_metrics
from rag_model.training.loop.loop import TrainingResult, train
from tests.fixtures.forked_processes import SHARED, check_killed
from tests.fixtures.toy_task import LineTask, learn_until, settings

KEY = "ab" * 32


class LostError(Exception):
    """The machine is gone."""


@pytest.fixture
def told() -> list[str]:
    return []


def origin(store: Store, folder: Path) -> TrainingIdentity:
    folder.mkdir(exist_ok=True)
    return TrainingIdentity(store, KEY, "line", "0" * 64, folder)


def run(store: Store, folder: Path, told: list[str], stop: int = 0, stage: str = "") -> TrainingResult:
    """Restore and train; stop after a step by an error."""
    restore_checkpoint(origin(store, folder), told.append)

    def report(kind: str, step: int, *_: object) -> None:
        if (kind, step) == ("train", stop):
            raise LostError

    with CheckpointUploader(origin(store, folder), told.append) as keeper:
        task, kept = LineTask(), lambda step, steps: keeper.enqueue(stage, step, steps)
        return train(task, settings(accumulation=2), folder / stage, report, kept)


def test_another_machine_goes_on_to_the_same_losses(store: Store, tmp_path: Path, told: list[str]) -> None:
    whole = train(LineTask(), settings(accumulation=2), tmp_path / "whole")
    for number, stop in enumerate((7, 19)):
        with pytest.raises(LostError):
            run(store, tmp_path / f"machine-{number}", told, stop)
        shutil.rmtree(tmp_path / f"machine-{number}")
    done = run(store, tmp_path / "last", told)
    assert told == [f"goes on after step {step}, whose checkpoint is in the store" for step in (4, 16)]
    assert read_metrics(tmp_path / "last") == read_metrics(tmp_path / "whole")
    assert (done.best_folder / "model.safetensors").read_bytes() == (
        whole.best_folder / "model.safetensors"
    ).read_bytes()
    board = EventAccumulator(str(tmp_path / "last" / "tensorboard"))  # type: ignore[no-untyped-call]
    board.Reload()  # type: ignore[no-untyped-call]
    steps = [event.step for event in board.Scalars("train/loss")]  # type: ignore[no-untyped-call]
    assert steps == list(range(1, 31)), "the curves of the other machines too"
    assert not list(tmp_path.glob("last/.*")), "nothing is left of what was moved"


def test_this_machine_comes_first_as_long_as_it_is_as_far(store: Store, tmp_path: Path, told: list[str]) -> None:
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 7)
    shutil.copytree(tmp_path / "one", tmp_path / "behind")
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 19)
    assert told == [], "the folder has what the store has"
    with pytest.raises(LostError):
        run(store, tmp_path / "behind", told, 21)
    assert told == ["goes on after step 16, whose checkpoint is in the store"]
    (newest, *_) = list_checkpoints(tmp_path / "behind" / "checkpoints")
    data = (newest / "weights.safetensors").read_bytes()
    (newest / "weights.safetensors").unlink()  # another name of the file in the store, which stays sound
    (newest / "weights.safetensors").write_bytes(data[:-9])
    whole = train(LineTask(), settings(accumulation=2), tmp_path / "whole")
    assert run(store, tmp_path / "behind", told).best_measures == whole.best_measures
    assert told[1:] == ["goes on after step 20, whose checkpoint is in the store"], "its own was damaged"
    assert read_metrics(tmp_path / "behind") == read_metrics(tmp_path / "whole")


def test_a_checkpoint_of_an_earlier_stage_is_brought_along(store: Store, tmp_path: Path, told: list[str]) -> None:
    run(store, tmp_path / "one", told, stage="first")
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 13, stage="second")
    found = store.trainings.find_newest(KEY)
    assert found is not None
    assert (found.progress.stage, found.progress.step, found.progress.steps) == ("second", 12, 30)
    shutil.rmtree(tmp_path / "one")
    restore_checkpoint(origin(store, tmp_path / "two"), told.append)
    task = LineTask()
    train(task, settings(accumulation=2), tmp_path / "two" / "first")
    assert task.seen == [], "the first stage was done"
    train(task, settings(accumulation=2), tmp_path / "two" / "second")
    assert len(task.seen) == 2 * (30 - 12)
    assert told == ["goes on after step 12 of second, whose checkpoint is in the store"]


def test_a_store_that_refuses_does_not_stop_the_training(store: Store, tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "store" / "trainings").write_text("in the way")
    done = run(store, tmp_path / "one", told)
    assert done.steps == 30
    (said,) = told
    assert said.startswith("the checkpoint of step ")
    assert said.endswith("; the training goes on, and this machine can resume it")


def test_what_is_damaged_in_the_store_is_one_sentence_and_no_matter_to_who_is_further(
    store: Store, tmp_path: Path, told: list[str]
) -> None:
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 7)
    (record,) = (tmp_path / "store").glob("trainings/*/*.json")
    for blob in (tmp_path / "store").glob("trainings/*/blobs/*/*"):
        blob.unlink()
    with pytest.raises(StoreError, match=r"is missing or damaged, .*: delete .*\.json, and the training starts again"):
        run(store, tmp_path / "two", told)
    assert not list((tmp_path / "two").iterdir()), "nothing half restored"
    record.write_text("{")
    with pytest.raises(StoreError, match=r"cannot be used: .*; delete this file, and the training starts again"):
        run(store, tmp_path / "two", told)
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 9)
    (said,) = told
    assert said.endswith("; the training resumes from this machine's checkpoint")
    shutil.rmtree(tmp_path / "one")
    run(store, tmp_path / "two", told)  # the record was replaced by the next checkpoint
    assert told[1:] == ["goes on after step 8, whose checkpoint is in the store"]


def rewritten(store: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the stored checkpoint, with the digest that fits: as a broken or hostile writer would."""
    root = store / "trainings" / KEY
    (record,) = root.glob("*.json")
    told = json.loads(record.read_text())
    data = change((root / BlobRef.from_json(told["files"][name]).path).read_bytes())
    ref = BlobRef(digest_bytes(data), len(data))
    (root / ref.path).parent.mkdir(exist_ok=True)
    (root / ref.path).write_bytes(data)
    told["files"][name] = ref.to_json()
    record.unlink()
    record.write_text(json.dumps(told))


STATE, CURVES = "checkpoints/step-00000004/state.json", "metrics.jsonl"
BEST = re.compile(rb'"folder": "[^"]*"')


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (STATE, lambda data: BEST.sub(b'"folder": "../../../etc"', data), "every checkpoint in .* is damaged"),
        (STATE, lambda data: re.sub(rb'^    "step": 4', b'    "step": -1', data, flags=re.MULTILINE), "is damaged"),
        (STATE, lambda data: re.sub(rb'^    "step": 4', b'    "step": 9', data, flags=re.MULTILINE), "is damaged"),
        (STATE, lambda data: b"[" * 100_000, "every checkpoint in .* is damaged"),
        (CURVES, lambda data: data[:9] + b"\xff" + data[9:], "is corrupt in line 1: delete it"),
        (CURVES, lambda data: b"[]\n" + data, "is corrupt in line 1: delete it"),
        ("training.json", lambda data: b"null", "holds another training"),
    ],
)
def test_a_checkpoint_that_no_training_wrote_is_one_sentence_and_opens_nothing_elsewhere(
    name: str, change: Callable[[bytes], bytes], says: str, store: Store, tmp_path: Path, told: list[str]
) -> None:
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 7)
    rewritten(tmp_path / "store", name, change)
    before = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file())
    with pytest.raises(BookwheelError, match=says):
        run(store, tmp_path / "two", told)
    assert sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file()) == before


def test_a_disk_that_is_full_while_a_checkpoint_is_put_leaves_the_one_before(
    store: Store, tmp_path: Path, told: list[str]
) -> None:
    with pytest.raises(LostError):
        run(store, tmp_path / "one", told, 7)
    found = store.trainings.find_newest(KEY)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointUploader(origin(store, tmp_path / "one"), told.append) as keeper:
        (tmp_path / "one" / CURVES).write_bytes(b"\n" * 5_000)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))
            keeper.enqueue("", 4, 30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (said,) = told
    assert said.startswith("the checkpoint of step 4 is not in the store: ")
    assert "File too large" in said
    assert store.trainings.find_newest(KEY) == found
    restore_checkpoint(origin(store, tmp_path / "two"), told.append)
    assert told[1:] == ["goes on after step 4, whose checkpoint is in the store"]


@SHARED
def test_a_killed_process_leaves_a_whole_checkpoint_in_the_store(store: Store, tmp_path: Path, told: list[str]) -> None:
    """SIGKILL at any moment of the thread's work: what is in the store is one checkpoint or the one before."""
    train(LineTask(), settings(accumulation=2), tmp_path / "whole")
    check_killed(learn_until, 29, tmp_path / "one", torch.get_num_threads(), store.url)
    shutil.rmtree(tmp_path / "one")
    run(store, tmp_path / "two", told)
    assert read_metrics(tmp_path / "two") == read_metrics(tmp_path / "whole")
    assert json.loads((tmp_path / "two" / "training.json").read_text())["recipe"] == {"size": 4, "points": 48}
