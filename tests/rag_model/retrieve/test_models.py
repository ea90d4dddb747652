"""The name of an encoder is a folder, a model of the hub, or a model of the store."""

from pathlib import Path

import pytest

from rag_model.encoders.encoder import Encoder
from rag_model.errors import StoreError, UsageError
from rag_model.retrieve.models import EncoderNames, resolve_encoders, resolve_part_folder
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import CROSS_ENCODER
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.tiny import save_bert, save_cross_encoder


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    return Store.open(str(tmp_path / "store"), create=True)


def test_names_of_folders_and_hubs_are_not_changed(store: Store) -> None:
    assert resolve_encoders(store, "intfloat/e5-small-v2") == EncoderNames(
        "intfloat/e5-small-v2", "intfloat/e5-small-v2"
    )
    pair = resolve_encoders(store, "facebook/dpr-ctx_encoder-single-nq-base")
    assert pair.question == "facebook/dpr-question_encoder-single-nq-base"


def test_a_model_is_a_pair_or_a_question_encoder_alone(store: Store, tmp_path: Path) -> None:
    save_bert(tmp_path / "pair" / "question")
    save_bert(tmp_path / "pair" / "passage", seed=2)
    put_model(store, tmp_path / "pair", ModelMetadata("dpr", None, {}), "pair")
    names = resolve_encoders(store, "model:pair")
    assert names.passage is not None
    question, passage = (Encoder.load(name, threads=1, device="cpu") for name in (names.question, names.passage))
    assert question.space().digest != passage.space().digest
    save_bert(tmp_path / "reader" / "question")
    put_model(store, tmp_path / "reader", ModelMetadata("rag-token", None, {}), "reader")
    assert resolve_encoders(store, "model:reader@1").passage is None


def test_model_without_an_encoder_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no model or ref 'unknown'"):
        resolve_encoders(store, "model:unknown")
    save_bert(tmp_path / "whole")
    put_model(store, tmp_path / "whole", ModelMetadata("rag-token", None, {}), "whole")
    with pytest.raises(UsageError, match="has no encoder in a folder question/"):
        resolve_encoders(store, "model:whole")


def test_a_cross_encoder_is_a_folder_or_a_part_of_a_model(store: Store, tmp_path: Path) -> None:
    folder = save_cross_encoder(tmp_path / "model" / "cross-encoder")
    assert resolve_part_folder(None, str(folder), CROSS_ENCODER) == folder.resolve()
    put_model(store, tmp_path / "model", ModelMetadata("cross-encoder", None, {}), "judge")
    part_folder = resolve_part_folder(store, "model:judge", CROSS_ENCODER)
    assert (part_folder / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="model:judge is a model of a store, but no store is given"):
        resolve_part_folder(None, "model:judge", CROSS_ENCODER)
    save_bert(tmp_path / "reader" / "question")
    put_model(store, tmp_path / "reader", ModelMetadata("rag-token", None, {}), "reader")
    with pytest.raises(
        UsageError, match="model:reader is not a cross-encoder: name a model that `finetune cross-encoder`"
    ):
        resolve_part_folder(store, "model:reader", CROSS_ENCODER)
