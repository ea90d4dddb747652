"""Static encoders compared with model2vec and sentence-transformers, their spaces, and damaged folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rag_model.encoders.architecture import check_is_encoder, read_architecture
from rag_model.encoders.encoder import Encoder, collect_question_encoder_files, load_any_encoder, read_passage_space
from rag_model.encoders.semantic import SemanticChunker
from rag_model.encoders.space import compute_space
from rag_model.encoders.spec import is_static_encoder, read_encoder_spec
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from tests.fixtures.tiny import VOCABULARY, write_json
from tests.fixtures.tiny_static import DIM, encode_like_model2vec, save_model2vec, save_static_embedding

TEXTS = [
    "the king was born in the city",
    "music",
    "",
    "   ",
    "a war  of theory,\nof rivers — and who 'wrote' [SEP] the music of the king?",
    "漢字 the 漢 river\x00city Ünïcodé 🙂",
    "☃ ☃",
    "who wrote " * 400,
]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"normalize": False},
        {"weights": True},
        {"rows": 20},
        {"rows": 20, "weights": True},
        {"dtype": "int8"},
        {"dtype": "float64"},
    ],
)
def test_vectors_are_those_of_model2vec(shape: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static", **shape)
    vectors = Encoder.load(folder).encode_passages([""] * len(TEXTS), TEXTS)
    assert vectors.dtype == np.float32
    expected = encode_like_model2vec(folder, TEXTS)
    assert np.abs(vectors - expected).max() < 1e-6 * max(1, np.abs(expected).max())
    assert np.abs(expected).max(axis=1).astype(bool).tolist() == [True, True, False, False, True, True, False, True]


def test_half_precision_is_computed_in_single(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static", dtype="float16")
    expected = encode_like_model2vec(folder, TEXTS)
    assert np.abs(Encoder.load(folder).encode_questions(TEXTS) - expected).max() < 1e-6


@pytest.mark.parametrize(
    "shape", [{}, {"normalize": True}, {"inside": "0_StaticEmbedding"}, {"truncate": 9}, {"truncate": 700}]
)
def test_vectors_are_those_of_sentence_transformers(
    shape: dict[str, Any], tmp_path: Path, sentence_transformers: Any
) -> None:
    folder = save_static_embedding(tmp_path / "static", **shape)
    peer, actual = sentence_transformers.SentenceTransformer(str(folder), device="cpu"), Encoder.load(folder)
    passages = peer.encode_document(TEXTS, normalize_embeddings=True)  # its similarity is the cosine
    assert np.abs(actual.encode_passages([""] * len(TEXTS), TEXTS) - passages).max() < 1e-6
    assert np.abs(actual.encode_questions(TEXTS) - peer.encode_query(TEXTS, normalize_embeddings=True)).max() < 1e-6
    peer.save_pretrained(str(tmp_path / "saved"))  # in the layout of its own version
    assert Encoder.load(tmp_path / "saved").space().digest == actual.space().digest
    assert read_passage_space(folder).digest == actual.space().digest


def test_pooling_decides_whether_unknown_tokens_count(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static", normalize=False)
    encoders = {pooling: Encoder.load(folder, overrides={"pooling": pooling}) for pooling in ("static", "static-known")}
    assert encoders["static-known"].spec == Encoder.load(folder).spec
    vectors = {pooling: encoder.encode_questions(["king ☃", "king"]) for pooling, encoder in encoders.items()}
    assert np.array_equal(*vectors["static-known"])
    assert np.abs(vectors["static"][0] - vectors["static"][1]).max() > 0.1
    assert encoders["static"].space().digest != encoders["static-known"].space().digest


def test_a_vector_does_not_depend_on_what_was_encoded_before(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static")
    encoder = Encoder.load(folder)
    together = encoder.encode_passages(TEXTS[::-1], TEXTS)
    for row, (title, text) in enumerate(zip(TEXTS[::-1], TEXTS, strict=True)):
        alone = Encoder.load(folder).encode_passages([title], [text])
        assert np.array_equal(alone[0], together[row])
        assert np.array_equal(encoder.encode_passages([title], [text])[0], together[row])
    assert encoder.encode_passages([], []).shape == (0, DIM)


def test_space_depends_on_numbers_and_not_on_the_layout(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "one", normalize=False)
    space = Encoder.load(folder).space()
    assert (space.dim, space.pooling, space.normalize, space.max_length) == (DIM, "static-known", False, 512)
    short = Encoder.load(folder, overrides={"truncate_dim": 5})
    assert short.dim == short.encode_questions(TEXTS).shape[1] == short.space().dim == 5
    np.testing.assert_array_equal(short.encode_questions(TEXTS), Encoder.load(folder).encode_questions(TEXTS)[:, :5])
    other_layout = save_static_embedding(tmp_path / "other")
    assert Encoder.load(other_layout).space().weights == space.weights
    half = shutil.copytree(folder, tmp_path / "half")
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings"] = tensors["embeddings"].astype(np.float16)
    save_file(tensors, half / "model.safetensors")
    rounded = shutil.copytree(folder, tmp_path / "rounded")
    save_file({"embeddings": tensors["embeddings"].astype(np.float32)}, rounded / "model.safetensors")
    assert Encoder.load(half).space().digest == Encoder.load(rounded).space().digest != space.digest
    for change in ({"normalize": True}, {"max_length": 9}, {"passage_prompt": "p"}, {"layout": "text"}):
        assert compute_space(folder, read_encoder_spec(folder, change)).digest != space.digest
    weighted = save_model2vec(tmp_path / "weighted", normalize=False, weights=True)
    assert Encoder.load(weighted).space().weights != space.weights


@pytest.mark.parametrize("inside", ["", "0_StaticEmbedding"])
def test_stored_files_are_the_same_encoder(inside: str, tmp_path: Path) -> None:
    folder = save_static_embedding(tmp_path / "static", inside=inside, normalize=True)
    spec = read_encoder_spec(folder, {"question_prompt": "query "})
    (tmp_path / "work").mkdir()
    stored_folder = tmp_path / "stored"
    stored_folder.mkdir()
    for name, path in collect_question_encoder_files(
        folder, spec, compute_space(folder, spec), tmp_path / "work"
    ).items():
        shutil.copyfile(path, stored_folder / name)
    stored_encoder = load_any_encoder(stored_folder)
    assert isinstance(stored_encoder, Encoder)
    assert stored_encoder.space().digest == Encoder.load(folder).space().digest
    expected = Encoder.load(folder, overrides={"question_prompt": "query "}).encode_questions(TEXTS)
    assert np.array_equal(stored_encoder.encode_questions(TEXTS), expected)
    assert is_static_encoder(stored_folder)


def test_sizes_of_a_static_encoder_are_known(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static", rows=20)
    check_is_encoder(folder)
    sizes = read_architecture(folder)
    assert (sizes.parameters, sizes.layers, sizes.hidden, sizes.operations_per_token) == (20 * DIM, 0, DIM, 0)


def test_semantic_chunker_accepts_a_static_encoder(tmp_path: Path) -> None:
    assert SemanticChunker(save_model2vec(tmp_path / "static")).open() is not None


def test_static_encoder_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is static and cannot be trained"):
        TrainableEncoder.load(save_model2vec(tmp_path / "static"))


def test_a_pooling_of_another_kind_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pooling 'mean' does not apply to encoder"):
        read_encoder_spec(save_model2vec(tmp_path / "static"), {"pooling": "mean"})
    with pytest.raises(UsageError, match="pooling 'static' does not apply to encoder"):
        read_encoder_spec(tiny_bert, {"pooling": "static"})


ROWS = len(VOCABULARY)
EMBEDDINGS = np.ones((ROWS, DIM), np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"vectors": EMBEDDINGS}, "has no tensor embeddings or embedding.weight"),
        ({"embeddings": EMBEDDINGS[0]}, "have the shape"),
        ({"embeddings": EMBEDDINGS[:, :0]}, "have the shape"),
        ({"embeddings": EMBEDDINGS[:-3]}, "has 110 tokens, and 107 have a vector"),
        ({"embeddings": EMBEDDINGS > 0}, "has BOOL tensors"),
        ({"embeddings": EMBEDDINGS, "weights": np.ones(3, np.float32)}, "has 3 weights for"),
        ({"embeddings": EMBEDDINGS, "weights": np.full(ROWS, np.inf, np.float32)}, "are not finite"),
        ({"embeddings": EMBEDDINGS, "weights": np.ones(ROWS, np.int64)}, "has I64 tensors"),
        ({"embeddings": EMBEDDINGS, "mapping": np.full(ROWS, ROWS)}, "refers to rows that its"),
        ({"embeddings": EMBEDDINGS, "mapping": np.full(ROWS, -1)}, "refers to rows that its"),
        ({"embeddings": EMBEDDINGS, "mapping": np.zeros(0, np.int64)}, "refers to rows that its"),
        ({"embeddings": EMBEDDINGS, "mapping": np.zeros(ROWS, np.float32)}, "instead of whole numbers"),
        ({"embeddings": EMBEDDINGS, "mapping": np.zeros(5, np.int64)}, "tokens, and 5 have a vector"),
    ],
)
def test_damaged_tensors_are_named(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static")
    write_json(folder / "modules.json", [{"type": "StaticEmbedding", "path": ""}])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message):
        Encoder.load(folder)


def test_numbers_that_are_not_finite_are_refused_before_a_build_and_by_row(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static")
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings"][VOCABULARY.index("king")] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="embeddings that are not finite"):
        read_passage_space(folder)
    with pytest.raises(InputError, match="not finite, of row 1"):
        Encoder.load(folder).encode_questions(["music", "king"])


ZEROS = np.zeros((ROWS, DIM), np.float32)
FIRST_ROW_ZERO = np.concatenate([ZEROS[:1], EMBEDDINGS[1:]])


@pytest.mark.parametrize(
    "tensors",
    [
        {"embeddings": ZEROS},
        {"embeddings": ZEROS.astype(np.int8)},
        {"embeddings": EMBEDDINGS, "weights": np.zeros(ROWS, np.float32)},
        {"embeddings": FIRST_ROW_ZERO, "mapping": np.zeros(ROWS, np.int64)},
        {"embeddings": FIRST_ROW_ZERO, "weights": np.eye(ROWS, dtype=np.float32)[0]},
    ],
)
def test_an_encoder_whose_vectors_are_all_zero_is_refused_before_a_build(tensors: Any, tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="has a zero vector for every token"):
        read_passage_space(folder)


def test_one_token_with_a_vector_is_enough(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static")
    save_file({"embeddings": np.eye(ROWS, DIM, dtype=np.float32)}, folder / "model.safetensors")
    assert read_passage_space(folder).dim == DIM


@pytest.mark.parametrize("inside", [None, "", "0_StaticEmbedding"])
def test_folder_without_tensors_is_named(inside: str | None, tmp_path: Path) -> None:
    if inside is None:
        folder = save_model2vec(tmp_path / "static")
    else:
        folder = save_static_embedding(tmp_path / "static", inside=inside)
    (folder / (inside or "") / "model.safetensors").unlink()
    for load in (Encoder.load, read_passage_space):
        with pytest.raises(InputError, match=r"has no model\.safetensors: give the folder"):
            load(folder)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"type": "StaticEmbedding", "path": "../other"}], "refers to a folder outside of the encoder"),
        ([{"type": "StaticEmbedding", "path": "/other"}], "refers to a folder outside of the encoder"),
        ([{"type": "StaticEmbedding", "path": ""}, {"type": "Dense", "path": "1"}], "has a Dense module"),
        ([{"type": "StaticEmbedding"}], "is corrupt"),
        ([{"type": "StaticEmbedding", "path": "absent"}], "has no model.safetensors"),
    ],
)
def test_modules_that_cannot_be_read_are_named(modules: Any, message: str, tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static")
    write_json(folder / "modules.json", modules)
    with pytest.raises(InputError, match=message):
        Encoder.load(folder)


def test_pickled_weights_and_missing_tokenizers_are_refused(tmp_path: Path) -> None:
    pickled = save_static_embedding(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match="only pickled weights"):
        Encoder.load(pickled)
    bare = save_model2vec(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        Encoder.load(bare)
    truncated = save_model2vec(tmp_path / "cut")
    (truncated / "model.safetensors").write_bytes((truncated / "model.safetensors").read_bytes()[:-40])
    with pytest.raises(InputError, match="is truncated"):
        Encoder.load(truncated)


def test_static_encoder_is_recognized_by_its_only_tensor(tmp_path: Path) -> None:
    folder = save_static_embedding(tmp_path / "static")
    space = Encoder.load(folder).space()
    (folder / "modules.json").unlink()
    assert Encoder.load(folder).space().digest == space.digest


def test_a_config_is_not_needed(tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "static", normalize=False)
    expected = Encoder.load(folder).encode_questions(TEXTS)
    config = json.loads((folder / "config.json").read_text())
    assert config["normalize"] is False
    (folder / "config.json").unlink()
    assert np.array_equal(Encoder.load(folder).encode_questions(TEXTS), expected)
