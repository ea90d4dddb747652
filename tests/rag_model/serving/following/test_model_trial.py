"""Question encoders and RAG models are tried once in a child process before the service loads them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import RefusedError
from rag_model.reading.reader import ReaderName
from rag_model.serving.following import trials
from rag_model.serving.following.trials import try_encoders, try_model
from rag_model.store.pulling.folder import CURRENT
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import Manifest
from tests.fixtures.serving import QUICK, Library, run_service
from tests.fixtures.tiny_generators import save_llama
from tests.fixtures.tiny_spans import save_span_model

TRIAL = "rag_model.serving.following.trials"
CONFIG = "encoder/question/config.json"


def publish_with_config(library: Library, folder: Path, **changed: Any) -> str:
    """Publish the blue snapshot with other values in the config of its question encoder, and return its id."""
    store = library.store
    content = store.snapshots.get(library.blue).content
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(store.blobs.get_local_path(content.files[CONFIG]).read_bytes()), **changed})
    )
    files = {**content.files, CONFIG: store.blobs.put_file(path)}
    return store.snapshots.publish(Manifest(replace(content, files=files)))


@pytest.mark.slow
def test_encoder_that_cannot_encode_never_becomes_current(
    library: Library, dest: Path, trial_record: Path, tmp_path: Path
) -> None:
    """The encoder can be loaded, and fails at the first question."""
    shutil.copytree(trial_record, dest / ".trials")
    hostile = publish_with_config(library, tmp_path, chunk_size_feed_forward=3)
    with run_service(library.url, dest, replace(QUICK, run_trials=True)) as service:
        library.move(hostile)
        service.wait_until_refused("/encoder/question cannot read a question (The dimension to be chunked")
        assert service.snapshot()["snapshot"] == library.red
        assert (dest / CURRENT).resolve().name == library.red


def test_model_is_tried_only_once(
    library: Library, dest: Path, trial_record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = library.store.snapshots.get(library.red).content
    folder = pull(library.store, library.red, dest).path
    monkeypatch.setattr(f"{TRIAL}._MODEL_SECONDS", 0.001)  # too short for any process
    monkeypatch.setattr(f"{TRIAL}._MODEL_BYTES_PER_SECOND", 1e12)
    try_encoders(folder, content, [])  # An inverted index needs no encoder.
    with pytest.raises(RefusedError, match=r"loaded the encoder .*/encoder/question and ran it did not end within"):
        try_encoders(folder, content, ["hnsw"])
    monkeypatch.undo()
    (record,) = (dest / ".trials").iterdir()
    with pytest.raises(RefusedError, match=f"or delete {record} to try again"):
        try_encoders(folder, content, ["hnsw"])
    record.unlink()
    shutil.copytree(trial_record, dest / ".trials", dirs_exist_ok=True)
    monkeypatch.setattr(f"{TRIAL}._MODEL_SECONDS", 0.001)
    try_encoders(folder, content, ["hnsw"])


def test_rag_model_answers_in_a_child_process(model: Path, dest: Path) -> None:
    try_model(dest, model, "marginal")
    (record,) = (dest / ".trials").iterdir()
    assert json.loads(record.read_bytes()) == {"died": ""}


@pytest.mark.parametrize(
    ("save_model", "reader"),
    [(partial(save_llama, chat=True), "concat"), (partial(save_span_model, kind="bert"), "extractive")],
    ids=["generator", "span model"],
)
def test_model_without_a_question_encoder_is_tried(
    save_model: Callable[[Path], Path], reader: ReaderName, dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial runs in this process, because starting a child takes seconds."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(trials, "run_in_child", lambda module, value, **limits: trials._run_in_this_child(value))
    try_model(dest, save_model(tmp_path / "model"), reader)
    (record,) = (dest / ".trials").iterdir()
    assert json.loads(record.read_bytes()) == {"died": ""}
