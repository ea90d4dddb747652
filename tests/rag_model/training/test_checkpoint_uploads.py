"""A training that resumes on another machine, which has only the store."""

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
from tests.fixtures.toy_task import LineTask, make_settings, train_line_task

KEY = "ab" * 32


class MachineLostError(Exception):
    """Raised in place of the loss of a machine."""


@pytest.fixture
def messages() -> list[str]:
    return []


def build_identity(store: Store, folder: Path) -> TrainingIdentity:
    folder.mkdir(exist_ok=True)
    return TrainingIdentity(store, KEY, "line", "0" * 64, folder)


def resume(store: Store, folder: Path, messages: list[str], stop: int = 0, stage: str = "") -> TrainingResult:
    """Restore the newest checkpoint and train; raise an error after step `stop`."""
    restore_checkpoint(build_identity(store, folder), messages.append)

    def report(kind: str, step: int, *_: object) -> None:
        if (kind, step) == ("train", stop):
            raise MachineLostError

    with CheckpointUploader(build_identity(store, folder), messages.append) as uploader:
        task, upload = LineTask(), lambda step, steps: uploader.enqueue(stage, step, steps)
        return train(task, make_settings(accumulation=2), folder / stage, report, upload)


def lose_machine(store: Store, folder: Path, messages: list[str], stop: int, stage: str = "") -> None:
    with pytest.raises(MachineLostError):
        resume(store, folder, messages, stop, stage)


def test_another_machine_resumes_to_the_same_losses(store: Store, tmp_path: Path, messages: list[str]) -> None:
    uninterrupted = train(LineTask(), make_settings(accumulation=2), tmp_path / "whole")
    for number, stop in enumerate((7, 19)):
        lose_machine(store, tmp_path / f"machine-{number}", messages, stop)
        shutil.rmtree(tmp_path / f"machine-{number}")
    result = resume(store, tmp_path / "last", messages)
    assert messages == [f"goes on after step {step}, whose checkpoint is in the store" for step in (4, 16)]
    assert read_metrics(tmp_path / "last") == read_metrics(tmp_path / "whole")
    best_weights = [(each.best_folder / "model.safetensors").read_bytes() for each in (result, uninterrupted)]
    assert best_weights[0] == best_weights[1]
    board = EventAccumulator(str(tmp_path / "last" / "tensorboard"))  # type: ignore[no-untyped-call]
    board.Reload()  # type: ignore[no-untyped-call]
    steps = [event.step for event in board.Scalars("train/loss")]  # type: ignore[no-untyped-call]
    assert steps == list(range(1, 31)), "the curves of the lost machines were restored"
    assert not list(tmp_path.glob("last/.*")), "the temporary folder of the restore is removed"


def test_checkpoint_of_the_store_is_used_if_newer(store: Store, tmp_path: Path, messages: list[str]) -> None:
    lose_machine(store, tmp_path / "one", messages, 7)
    shutil.copytree(tmp_path / "one", tmp_path / "behind")
    lose_machine(store, tmp_path / "one", messages, 19)
    assert messages == [], "the local checkpoint is as new as the store's"
    lose_machine(store, tmp_path / "behind", messages, 21)
    assert messages == ["goes on after step 16, whose checkpoint is in the store"]
    (newest, *_) = list_checkpoints(tmp_path / "behind" / "checkpoints")
    weights = (newest / "weights.safetensors").read_bytes()
    (newest / "weights.safetensors").unlink()  # a hard link to the file in the store
    (newest / "weights.safetensors").write_bytes(weights[:-9])
    uninterrupted = train(LineTask(), make_settings(accumulation=2), tmp_path / "whole")
    assert resume(store, tmp_path / "behind", messages).best_measures == uninterrupted.best_measures
    assert messages[1:] == ["goes on after step 20, whose checkpoint is in the store"], "the local one is damaged"
    assert read_metrics(tmp_path / "behind") == read_metrics(tmp_path / "whole")


def test_earlier_stage_is_restored_with_the_checkpoint(store: Store, tmp_path: Path, messages: list[str]) -> None:
    resume(store, tmp_path / "one", messages, stage="first")
    lose_machine(store, tmp_path / "one", messages, 13, "second")
    newest = store.trainings.find_newest(KEY)
    assert newest is not None
    assert (newest.progress.stage, newest.progress.step, newest.progress.steps) == ("second", 12, 30)
    shutil.rmtree(tmp_path / "one")
    restore_checkpoint(build_identity(store, tmp_path / "two"), messages.append)
    task = LineTask()
    train(task, make_settings(accumulation=2), tmp_path / "two" / "first")
    assert task.batch_ids == [], "the first stage is complete"
    train(task, make_settings(accumulation=2), tmp_path / "two" / "second")
    assert len(task.batch_ids) == 2 * (30 - 12)
    assert messages == ["goes on after step 12 of second, whose checkpoint is in the store"]


def test_failing_upload_does_not_stop_the_training(store: Store, tmp_path: Path, messages: list[str]) -> None:
    (tmp_path / "store" / "trainings").write_text("in the way")
    result = resume(store, tmp_path / "one", messages)
    assert result.steps == 30
    (line,) = messages
    assert line.startswith("the checkpoint of step ")
    assert line.endswith("; the training goes on, and this machine can resume it")


def test_damaged_record_in_the_store_is_refused_unless_the_local_checkpoint_is_newer(
    store: Store, tmp_path: Path, messages: list[str]
) -> None:
    lose_machine(store, tmp_path / "one", messages, 7)
    (record,) = (tmp_path / "store").glob("trainings/*/*.json")
    for blob in (tmp_path / "store").glob("trainings/*/blobs/*/*"):
        blob.unlink()
    with pytest.raises(StoreError, match=r"is missing or damaged, .*: delete .*\.json, and the training starts again"):
        resume(store, tmp_path / "two", messages)
    assert not list((tmp_path / "two").iterdir()), "a failed restore leaves no files"
    record.write_text("{")
    with pytest.raises(StoreError, match=r"cannot be used: .*; delete this file, and the training starts again"):
        resume(store, tmp_path / "two", messages)
    (tmp_path / "three").mkdir()
    shutil.copyfile(tmp_path / "one" / "training.json", tmp_path / "three" / "training.json")
    with pytest.raises(StoreError, match="cannot be used"):  # a training without a checkpoint cannot resume
        resume(store, tmp_path / "three", messages)
    lose_machine(store, tmp_path / "one", messages, 9)
    (line,) = messages
    assert line.endswith("; the training resumes from this machine's checkpoint")
    shutil.rmtree(tmp_path / "one")
    resume(store, tmp_path / "two", messages)  # the next checkpoint replaced the damaged record
    assert messages[1:] == ["goes on after step 8, whose checkpoint is in the store"]


def rewrite(store: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the stored checkpoint and its digest, as a broken or hostile writer would."""
    root = store / "trainings" / KEY
    (record,) = root.glob("*.json")
    manifest = json.loads(record.read_text())
    content = change((root / BlobRef.from_json(manifest["files"][name]).path).read_bytes())
    ref = BlobRef(digest_bytes(content), len(content))
    (root / ref.path).parent.mkdir(exist_ok=True)
    (root / ref.path).write_bytes(content)
    manifest["files"][name] = ref.to_json()
    record.unlink()
    record.write_text(json.dumps(manifest))


STATE, CURVES = "checkpoints/step-00000004/state.json", "metrics.jsonl"
BEST = re.compile(rb'"folder": "[^"]*"')


@pytest.mark.parametrize(
    ("name", "change", "message"),
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
def test_forged_checkpoint_is_refused_and_changes_no_file(
    name: str, change: Callable[[bytes], bytes], message: str, store: Store, tmp_path: Path, messages: list[str]
) -> None:
    lose_machine(store, tmp_path / "one", messages, 7)
    rewrite(tmp_path / "store", name, change)
    paths_before = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file())
    with pytest.raises(BookwheelError, match=message):
        resume(store, tmp_path / "two", messages)
    assert sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file()) == paths_before


def test_full_disk_during_an_upload_keeps_the_previous_checkpoint(
    store: Store, tmp_path: Path, messages: list[str]
) -> None:
    lose_machine(store, tmp_path / "one", messages, 7)
    previous = store.trainings.find_newest(KEY)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointUploader(build_identity(store, tmp_path / "one"), messages.append) as uploader:
        (tmp_path / "one" / CURVES).write_bytes(b"\n" * 5_000)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))
            uploader.enqueue("", 4, 30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (line,) = messages
    assert line.startswith("the checkpoint of step 4 is not in the store: ")
    assert "File too large" in line
    assert store.trainings.find_newest(KEY) == previous
    restore_checkpoint(build_identity(store, tmp_path / "two"), messages.append)
    assert messages[1:] == ["goes on after step 4, whose checkpoint is in the store"]


@SHARED
def test_killed_process_leaves_a_complete_checkpoint(store: Store, tmp_path: Path, messages: list[str]) -> None:
    """SIGKILL at any moment of an upload leaves this checkpoint or the previous one in the store."""
    train(LineTask(), make_settings(accumulation=2), tmp_path / "whole")
    check_killed(train_line_task, 29, tmp_path / "one", torch.get_num_threads(), store.url)
    shutil.rmtree(tmp_path / "one")
    resume(store, tmp_path / "two", messages)
    assert read_metrics(tmp_path / "two") == read_metrics(tmp_path / "whole")
    assert json.loads((tmp_path / "two" / "training.json").read_text())["recipe"] == {"size": 4, "points": 48}
