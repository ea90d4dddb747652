"""A service whose question encoder runs behind an endpoint: a real llama.cpp server, up and down."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.encoders.encoder import collect_question_encoder_files
from rag_model.encoders.endpoint_encoder import write_endpoint_folder
from rag_model.encoders.spec import read_encoder_spec
from rag_model.serving.following.trials import try_encoders
from rag_model.snapshots.encoding import compute_space
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from tests.fixtures.llama_server import run_llama_server
from tests.fixtures.serving import QUICK, run_service
from tests.fixtures.tiny_generators import ASCII, save_gguf
from tests.fixtures.tiny_snapshot import publish_tiny


def declare_endpoint_encoder(folder: Path) -> Path:
    """Write the encoder folder of `openai:tiny` as in a snapshot, with its vector space."""
    (folder / "named").mkdir(parents=True)
    (folder / "declared").mkdir()
    write_endpoint_folder("openai:tiny", folder / "named")
    spec = read_encoder_spec(folder / "named")
    space = compute_space(folder / "named", spec)
    for name, path in collect_question_encoder_files(folder / "named", spec, space, folder).items():
        shutil.copyfile(path, folder / "declared" / name)
    return folder / "declared"


def test_service_encodes_at_the_endpoint_and_stays_ready_while_it_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKWHEEL_EMBED_TRIES", "1")
    store = Store.open(str(tmp_path / "store"), create=True)
    articles = {f"River {number}": f"River {number} flows past {number * 7} towns." for number in range(20)}
    model = save_gguf(tmp_path, letters=ASCII) / "tiny.gguf"
    settings = replace(QUICK, retrievers=("hnsw", "bm25"))
    with run_llama_server(model, pooling="mean") as url:
        monkeypatch.setenv("BOOKWHEEL_EMBED_BASE_URL", url)
        encoder = declare_endpoint_encoder(tmp_path / "encoder")
        (tmp_path / "work").mkdir()
        snapshot = publish_tiny(store, encoder, articles, tmp_path / "work", bm25=True)
        pulled = pull(store, snapshot.id, tmp_path / "tried").path
        try_encoders(pulled, snapshot.manifest.content, ["hnsw"])
        with run_service(store.url, tmp_path / "dest", settings) as service:
            assert service.search("Where does river 7 flow?", k=1)["results"][0]["hits"]
            too_long = service.client.post("/search", json={"questions": ["river " * 300]})
            assert (too_long.status_code, "shorter question" in too_long.text) == (400, True)
    with run_service(store.url, tmp_path / "dest", settings) as service:  # the endpoint is down from the start
        refused = service.client.post("/search", json={"questions": ["Where does river 7 flow?"]})
        assert (refused.status_code, list(refused.json())) == (502, ["detail"])
        by_words = service.client.post("/search", json={"questions": ["river 7"], "retriever": "bm25"})
        assert by_words.status_code == 200
        assert service.client.get("/readyz").status_code == 200
