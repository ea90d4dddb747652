"""Models are loaded and asked in a child process before the service loads them; what became of it is remembered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.errors import RefusedError
from rag_model.serving.following.model_trial import try_model
from rag_model.store.pulling.pulled import CURRENT
from rag_model.store.versions.manifest import Manifest
from tests.fixtures.serving import Library, serving
from tests.fixtures.tiny import save_cross_encoder
from tests.rag_model.serving.following.test_trial import TRIED, moved

TRIAL = "rag_model.serving.following.model_trial"


def too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{TRIAL}._SECONDS", 0.001)  # too little for any process
    monkeypatch.setattr(f"{TRIAL}._RATE", 1e12)


def test_a_model_is_tried_once_and_again_where_a_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dest = save_cross_encoder(tmp_path / "model"), tmp_path / "dest"
    try_model("pairs", model, dest)
    (passed,) = (dest / ".trials").iterdir()
    assert json.loads(passed.read_bytes()) == {"died": ""}
    too_short(monkeypatch)
    try_model("pairs", model, dest)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"model .* took more than 0 s: give another model, or") as refused:
            try_model("pairs", model, dest)
    (died,) = (one for one in (dest / ".trials").iterdir() if one != passed)
    assert str(died) in str(refused.value)


def test_an_encoder_that_cannot_ask_never_becomes_current(library: Library, dest: Path, tmp_path: Path) -> None:
    store = library.store
    content = store.snapshots.get(library.blue).content
    config = json.loads(store.blobs.local(content.files["encoder/question/config.json"]).read_bytes())
    hostile = tmp_path / "config.json"
    hostile.write_text(json.dumps({**config, "num_attention_heads": 0}))
    files = {**content.files, "encoder/question/config.json": store.blobs.put_file(hostile)}
    bad = store.snapshots.put(Manifest(replace(content, files=files)))
    with serving(library.url, dest, TRIED) as found:
        moved(library, bad)
        assert found.until_refused("by zero")["final"]
        assert found.snapshot()["snapshot"] == library.red
        assert (dest / CURRENT).resolve().name == library.red
