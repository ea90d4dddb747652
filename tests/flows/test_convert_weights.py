"""`bookwheel convert-weights`: one reply, one sentence for a failure, and nothing half-written."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rag_model.encoders.weights import digest_weights, read_tensor_headers
from rag_model.process import lock_folder
from tests.fixtures.hub import Hub
from tests.fixtures.tiny import save_bert

pytestmark = pytest.mark.xdist_group("convert")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A tiny encoder with pickled weights, of a megabyte with an unused tensor."""
    folder = save_bert(tmp_path / "pickled")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**state, "pooler.dense.weight": torch.zeros(1 << 18)}, folder / "pytorch_model.bin")
    return folder


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_model_is_converted_and_a_hostile_one_refused(pickled: Path, bookwheel: Any, tmp_path: Path) -> None:
    result = bookwheel("convert-weights", pickled, tmp_path / "new", "--json")
    assert result.code == 0, result.err
    assert result.json["files"] == ["model.safetensors"]
    assert result.json["tensors"] == len(read_tensor_headers(tmp_path / "new"))
    assert digest_weights(tmp_path / "new") == digest_weights(save_bert(tmp_path / "again"))
    again = bookwheel("convert-weights", pickled, tmp_path / "new")
    assert (again.code, "exists already: give a new folder" in again.complaint) == (2, True)
    whole = bookwheel("convert-weights", tmp_path / "new", tmp_path / "newer")
    assert (whole.code, "has safetensors, which need no conversion" in whole.complaint) == (2, True)
    torch.save({"a": _Attack(tmp_path / "attacked")}, pickled / "pytorch_model.bin")
    hostile = bookwheel("convert-weights", pickled, tmp_path / "hostile")
    assert (hostile.code, "mkdir, but only a table of tensors is accepted" in hostile.complaint) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "new", "pickled"]


def test_a_full_disk_leaves_nothing(
    pickled: Path, executable: Path, tmp_path: Path, on_a_disk_of: Callable[[str, Path], list[str]]
) -> None:
    words = [*on_a_disk_of("200k", tmp_path / "small"), "sh", "-c", '"$@"; code=$?; ls -A "$0"; exit $code']
    words += [
        str(tmp_path / "small"),
        str(executable),
        "convert-weights",
        str(pickled),
        str(tmp_path / "small" / "new"),
    ]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert "the disk of the new folder is full: model.safetensors cannot be written; free some space" in result.stderr
    assert ".landing" not in result.stderr


def test_files_of_a_killed_conversion_are_removed_later(
    pickled: Path, executable: Path, tmp_path: Path, bookwheel: Any
) -> None:
    process = subprocess.Popen([executable, "convert-weights", pickled, tmp_path / "new"])
    while process.poll() is None and not list(tmp_path.glob(".landing-*")):
        pass
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "new").exists()
    (left,) = tmp_path.glob(".landing-*")
    os.utime(left, (0, 0))  # an older one, since a new folder of another process may not be locked yet
    (tmp_path / ".landing-new-of-another").mkdir()
    os.utime(tmp_path / ".landing-new-of-another", (0, 0))
    with lock_folder(tmp_path / ".landing-new-of-another"):
        assert bookwheel("convert-weights", pickled, tmp_path / "new").code == 0
    assert [path.name for path in tmp_path.glob(".landing-*")] == [".landing-new-of-another"]


def test_files_are_those_of_the_folder_and_as_readable_as_others(pickled: Path, bookwheel: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (pickled / "notes.txt").symlink_to(tmp_path / "secret.txt")
    refused = bookwheel("convert-weights", pickled, tmp_path / "new")
    assert refused.code == 1
    assert f"notes.txt is a link to {tmp_path / 'secret.txt'}, outside of the folder: replace it" in refused.complaint
    (pickled / "notes.txt").unlink()
    (pickled / "inside.txt").symlink_to(pickled / "config.json")
    assert bookwheel("convert-weights", pickled, tmp_path / "new").code == 0
    modes = {path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert modes == {(tmp_path / "secret.txt").stat().st_mode}


def test_a_pickled_model_of_the_hub_names_the_way(pickled: Path, hub: Hub, bookwheel: Any, tmp_path: Path) -> None:
    hub.add_folder("models/me/tiny", pickled)
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "1", "title": "A", "text": "b c"}) + "\n")
    given = ("reindex", "--dump", tmp_path / "d.jsonl", "--store", tmp_path / "store", "--encoder", "me/tiny")
    result = bookwheel(*given)
    assert result.code == 1
    assert (
        "such as me/tiny@refs/pr/3, or convert its weights with `bookwheel convert-weights me/tiny" in result.complaint
    )
