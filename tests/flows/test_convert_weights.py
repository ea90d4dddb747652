"""`bookwheel convert-weights`: prints one reply or one error sentence, and never leaves a partial folder."""

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
def pickled_encoder(tmp_path: Path) -> Path:
    """A tiny encoder with pickled weights; an unused tensor makes the file larger than a megabyte."""
    folder = save_bert(tmp_path / "pickled")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**state, "pooler.dense.weight": torch.zeros(1 << 18)}, folder / "pytorch_model.bin")
    return folder


class MaliciousPickle:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_model_is_converted_and_a_malicious_one_rejected(pickled_encoder: Path, bookwheel: Any, tmp_path: Path) -> None:
    result = bookwheel("convert-weights", pickled_encoder, tmp_path / "new", "--json")
    assert result.code == 0, result.err
    assert result.json["files"] == ["model.safetensors"]
    assert result.json["tensors"] == len(read_tensor_headers(tmp_path / "new"))
    assert digest_weights(tmp_path / "new") == digest_weights(save_bert(tmp_path / "again"))
    second = bookwheel("convert-weights", pickled_encoder, tmp_path / "new")
    assert (second.code, "exists already: give a new folder" in second.complaint) == (2, True)
    converted = bookwheel("convert-weights", tmp_path / "new", tmp_path / "newer")
    assert (converted.code, "has safetensors, which need no conversion" in converted.complaint) == (2, True)
    torch.save({"a": MaliciousPickle(tmp_path / "attacked")}, pickled_encoder / "pytorch_model.bin")
    failure = bookwheel("convert-weights", pickled_encoder, tmp_path / "hostile")
    assert (failure.code, "mkdir, but only a table of tensors is accepted" in failure.complaint) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "new", "pickled"]


def test_full_disk_leaves_no_files(
    pickled_encoder: Path, executable: Path, tmp_path: Path, build_disk_prefix: Callable[[str, Path], list[str]]
) -> None:
    disk = tmp_path / "small"
    script = ["sh", "-c", '"$@"; code=$?; ls -A "$0"; exit $code', disk]
    command = [*build_disk_prefix("200k", disk), *script, executable, "convert-weights", pickled_encoder, disk / "new"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert "the disk of the new folder is full: model.safetensors cannot be written; free some space" in result.stderr
    assert ".landing" not in result.stderr


def test_next_conversion_removes_files_of_a_killed_one(
    pickled_encoder: Path, executable: Path, tmp_path: Path, bookwheel: Any
) -> None:
    process = subprocess.Popen([executable, "convert-weights", pickled_encoder, tmp_path / "new"])
    while process.poll() is None and not list(tmp_path.glob(".landing-*")):
        pass
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "new").exists()
    (remnant,) = tmp_path.glob(".landing-*")
    os.utime(remnant, (0, 0))  # Recent folders are kept, because another process may be about to lock them.
    (tmp_path / ".landing-new-of-another").mkdir()
    os.utime(tmp_path / ".landing-new-of-another", (0, 0))
    with lock_folder(tmp_path / ".landing-new-of-another"):
        assert bookwheel("convert-weights", pickled_encoder, tmp_path / "new").code == 0
    assert [path.name for path in tmp_path.glob(".landing-*")] == [".landing-new-of-another"]


def test_links_out_of_the_folder_are_rejected_and_file_modes_are_usual(
    pickled_encoder: Path, bookwheel: Any, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (pickled_encoder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    failure = bookwheel("convert-weights", pickled_encoder, tmp_path / "new")
    assert failure.code == 1
    assert f"notes.txt is a link to {tmp_path / 'secret.txt'}, outside of the folder: replace it" in failure.complaint
    (pickled_encoder / "notes.txt").unlink()
    (pickled_encoder / "inside.txt").symlink_to(pickled_encoder / "config.json")
    assert bookwheel("convert-weights", pickled_encoder, tmp_path / "new").code == 0
    modes = {path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert modes == {(tmp_path / "secret.txt").stat().st_mode}


def test_error_for_a_pickled_model_of_the_hub_names_the_command(
    pickled_encoder: Path, hub: Hub, bookwheel: Any, tmp_path: Path
) -> None:
    hub.add_folder("models/me/tiny", pickled_encoder)
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "1", "title": "A", "text": "b c"}) + "\n")
    arguments = ("reindex", "--dump", tmp_path / "d.jsonl", "--store", tmp_path / "store", "--encoder", "me/tiny")
    result = bookwheel(*arguments)
    assert result.code == 1
    advice = "such as me/tiny@refs/pr/3, or convert its weights with `bookwheel convert-weights me/tiny"
    assert advice in result.complaint
