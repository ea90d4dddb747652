"""Indexes are searched in a child process before `current` points to their version; failures are recorded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rag_model.errors import RefusedError
from rag_model.serving.following.trials import try_indexes
from rag_model.store.pulling.folder import CURRENT
from rag_model.store.pulling.pull import pull
from rag_model.store.versions.manifest import Manifest
from tests.fixtures.serving import QUICK, Library, run_service

WITH_TRIALS = replace(QUICK, run_trials=True)


def publish_with_index(library: Library, path: Path, **changed: Any) -> str:
    """Publish the blue snapshot with another file, and other fields, of its graph."""
    store = library.store
    content = store.snapshots.get(library.blue).content
    entry = {**content.indexes["hnsw"], **changed}
    files = {**content.files, "index/hnsw.faiss": store.blobs.put_file(path)}
    return store.snapshots.publish(Manifest(replace(content, files=files, indexes={**content.indexes, "hnsw": entry})))


@pytest.fixture
def graph(library: Library) -> Path:
    """The file of the blue snapshot's graph."""
    return library.store.blobs.get_local_path(
        library.store.snapshots.get(library.blue).content.files["index/hnsw.faiss"]
    )


def move_ref(library: Library, snapshot: str) -> None:
    current = library.store.refs.find_current("latest")
    library.store.refs.move("latest", snapshot, current.number if current else 0)


def test_sound_version_passes_its_trial_and_is_served(library: Library, dest: Path, trial_record: Path) -> None:
    shutil.copytree(trial_record, dest / ".trials")
    with run_service(library.url, dest, WITH_TRIALS) as service:
        library.move(library.blue)
        service.wait_until_served(library.blue)
    assert len(list((dest / ".trials").iterdir())) == 1  # the record of the encoder that both versions have


def test_index_with_lists_in_another_file_never_becomes_current(
    library: Library, dest: Path, graph: Path, tmp_path: Path, trial_record: Path
) -> None:
    """A process that mapped the truncated lists would die of SIGBUS, and again after every restart."""
    shutil.copytree(trial_record, dest / ".trials")
    d = faiss.read_index(str(graph)).d
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, 4, faiss.METRIC_INNER_PRODUCT)
    vectors = np.random.default_rng(0).standard_normal((200, d)).astype(np.float32)
    index.train(vectors)
    lists = faiss.OnDiskInvertedLists(4, index.code_size, str(tmp_path / "elsewhere"))
    index.replace_invlists(lists)
    index.add(vectors[:40])
    faiss.write_index(index, str(tmp_path / "hostile.faiss"))
    (tmp_path / "elsewhere").write_bytes(b"")
    hostile = publish_with_index(library, tmp_path / "hostile.faiss")
    with run_service(library.url, dest, WITH_TRIALS) as service:
        move_ref(library, hostile)
        refusal = service.wait_until_refused("holds faiss's lists 'ilod', which bookwheel cannot search")
        assert refusal["final"]
        assert service.snapshot()["snapshot"] == library.red
        assert (dest / CURRENT).resolve().name == library.red


def test_record_of_a_failed_trial_is_final_until_it_is_deleted(
    library: Library, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = pull(library.store, library.red, dest)
    content = library.store.snapshots.get(library.red).content
    monkeypatch.setattr("rag_model.serving.following.trials._INDEX_SECONDS", 0.001)  # too short for any process
    with pytest.raises(RefusedError, match=r"hnsw\.faiss did not end within 0 s"):
        try_indexes(report.path, content, ["hnsw"])
    monkeypatch.undo()
    (record,) = (dest / ".trials").iterdir()
    assert json.loads(record.read_bytes()) == {"died": "did not end within 0 s"}
    with pytest.raises(RefusedError, match=f"or delete {record} to try again"):
        try_indexes(report.path, content, ["hnsw"])
    record.write_bytes(b"[]")  # A damaged record is ignored.
    try_indexes(report.path, content, ["hnsw"])
