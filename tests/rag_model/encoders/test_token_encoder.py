"""The ColBERT encoder: marks, masks, punctuation, unit length, layouts of folders, and invalid models."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rag_model.encoders.encoder import Encoder
from rag_model.encoders.spec import TokenSpec, is_token_encoder, read_token_spec
from rag_model.encoders.token_encoder import TokenEncoder, collect_token_encoder_files
from rag_model.encoders.token_model import TokenModel
from rag_model.errors import InputError, UsageError
from rag_model.store.objects.cache import build_link_tree
from tests.fixtures.tiny import SHAPE, save_bert, write_json
from tests.fixtures.tiny_colbert import DIM, SPEC, save_colbert, save_marked_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a ColBERT in Stanford's layout."""
    return save_colbert(tmp_path_factory.mktemp("colbert") / "stanford")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TokenEncoder:
    return TokenEncoder.load(folder, device="cpu", dtype="float32")


def save_like_pylate(folder: Path, out: Path, **settings: Any) -> Path:
    """Save the model of a folder in PyLate's layout."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, out / name)
    body = {name.removeprefix("bert."): value for name, value in tensors.items() if name != "linear.weight"}
    save_file(body, out / "model.safetensors", {"format": "pt"})
    write_json(
        out / "config.json", {**json.loads((folder / "config.json").read_text()), "architectures": ["BertModel"]}
    )
    types = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    paths = ["", "1_Dense"]
    modules = zip("01", paths, types, strict=True)
    write_json(out / "modules.json", [{"name": name, "path": path, "type": kind} for name, path, kind in modules])
    activation = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": SHAPE["hidden_size"], "out_features": DIM}
    write_json(out / "1_Dense" / "config.json", {**sizes, "bias": False, "activation_function": activation})
    save_file({"linear.weight": tensors["linear.weight"]}, out / "1_Dense" / "model.safetensors")
    settings |= {"query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 16, "document_length": 48}
    write_json(out / "config_sentence_transformers.json", {"model_type": "ColBERT", **settings})
    return out


def encode_singly(encoder: TokenEncoder, text: str, mark: str, length: int | None) -> tuple[list[int], np.ndarray]:
    """Return ids and vectors of one text, without batches: [CLS] mark text [SEP], padded with [MASK] to `length`."""
    tokenizer = encoder.tokenizer.question_tokenizer if length else encoder.tokenizer.passage_tokenizer
    ids = tokenizer.encode(text).ids
    ids = [ids[0], tokenizer.token_to_id(mark), *ids[1:]]
    n_tokens = len(ids)
    ids += [tokenizer.token_to_id("[MASK]")] * ((length or n_tokens) - n_tokens)
    mask = torch.arange(len(ids))[None] < n_tokens
    with torch.no_grad():
        hidden = encoder.model.body(input_ids=torch.tensor([ids]), attention_mask=mask.long())[0]
        vectors = hidden[0] @ encoder.model.linear.weight.T
    return ids, (vectors / vectors.norm(dim=1, keepdim=True)).numpy()


def test_a_question_is_marked_and_padded_with_masks_that_count(encoder: TokenEncoder) -> None:
    questions = ["who wrote the music?", "a", "the king of the city was born in the river " * 9]
    encoded = encoder.encode_questions(questions)
    assert encoded.shape == (3, SPEC.question_length, DIM)
    for text, vectors in zip(questions[:2], encoded, strict=False):
        assert np.abs(vectors - encode_singly(encoder, text, "[unused0]", SPEC.question_length)[1]).max() < 1e-5
    assert np.linalg.norm(encoded, axis=2) == pytest.approx(np.ones(encoded.shape[:2]), abs=1e-5)


def test_a_passage_is_marked_and_its_punctuation_dropped(encoder: TokenEncoder) -> None:
    titles, texts = ["The king", ""], ["was born, in a city. The end!", "war - music"]
    encoded = encoder.encode_passages(titles, texts)
    dots = {encoder.tokenizer.question_tokenizer.token_to_id(sign) for sign in ",.!-"}
    for row, text in enumerate(["The king was born, in a city. The end!", "war - music"]):
        ids, vectors = encode_singly(encoder, text, "[unused1]", None)
        positions = [position for position, number in enumerate(ids) if number not in dots]
        assert len(positions) < len(ids)
        passage_vectors = encoded.vectors[encoded.offsets[row] : encoded.offsets[row + 1]]
        assert np.abs(passage_vectors - vectors[positions]).max() < 1e-5


def test_a_passage_does_not_depend_on_its_neighbours(encoder: TokenEncoder) -> None:
    texts = ["the river " * (1 + n % 17) for n in range(40)]
    together, alone = encoder.encode_passages([""] * 40, texts), encoder.encode_passages([""], texts[11:12])
    assert (together.take(np.array([11])).vectors == alone.vectors).all()
    assert len(encoder.encode_passages([], [])) == 0


def test_pylates_layout_and_the_stored_files_are_the_same_encoder(
    folder: Path, encoder: TokenEncoder, tmp_path: Path
) -> None:
    pylate_encoder = TokenEncoder.load(save_like_pylate(folder, tmp_path / "pylate"), device="cpu", dtype="float32")
    assert pylate_encoder.spec == encoder.spec == SPEC
    assert pylate_encoder.space().digest == encoder.space().digest
    assert (pylate_encoder.encode_questions(["who?"]) == encoder.encode_questions(["who?"])).all()
    for number, model_folder in enumerate((folder, tmp_path / "pylate")):
        work = tmp_path / f"work{number}"
        work.mkdir()
        spec = TokenSpec().with_fields({**SPEC.to_json(), "question_length": 9})
        files = collect_token_encoder_files(model_folder, spec, encoder.space(), work)
        stored = TokenEncoder.load(build_link_tree(files), device="cpu", dtype="float32")
        assert stored.spec.question_length == 9
        assert stored.space().digest == encoder.space().digest
        assert stored.encode_questions(["who?"]).shape == (1, 9, DIM)


@pytest.mark.parametrize("mark", ["", "[unused0]"])
def test_prompts_follow_the_marks_as_in_sentence_transformers(
    folder: Path, encoder: TokenEncoder, mark: str, tmp_path: Path, sentence_transformers: Any
) -> None:
    prompts = {"query": f"{mark}query: ", "document": "passage: "}
    skipped = list(TokenSpec().skipped)
    pylate_folder = save_like_pylate(folder, tmp_path / "pylate", prompts=prompts, skiplist_words=skipped)
    actual = TokenEncoder.load(pylate_folder, device="cpu", dtype="float32")
    peer = sentence_transformers.MultiVectorEncoder(str(pylate_folder), device="cpu")
    texts = ["who wrote the music?", "", "the king of the city was born in the river " * 9]
    np.testing.assert_allclose(actual.encode_questions(texts), np.stack(peer.encode_query(texts)), atol=1e-5)
    passages = actual.encode_passages([""] * len(texts), texts)
    peer_vectors = peer.encode_document(texts)
    assert np.diff(passages.offsets).tolist() == [len(vectors) for vectors in peer_vectors]
    np.testing.assert_allclose(passages.vectors, np.concatenate(peer_vectors), atol=1e-5)
    assert actual.space().digest != encoder.space().digest
    actual.model.save(tmp_path / "saved", pylate_folder, actual.spec)
    assert read_token_spec(tmp_path / "saved") == actual.spec


def test_space_depends_on_settings_of_passages(folder: Path, encoder: TokenEncoder, tmp_path: Path) -> None:
    def digest(**settings: Any) -> str:
        return TokenEncoder.load(folder, settings, device="cpu").space().digest

    assert digest(question_length=20) == encoder.space().digest
    digests = {digest(passage_length=20), digest(skipped=[]), digest(passage_mark="[MASK]"), encoder.space().digest}
    assert len(digests) == 4
    edited = shutil.copytree(folder, tmp_path / "edited")
    settings = json.loads((folder / "config.json").read_text())
    write_json(edited / "config.json", {**settings, "num_attention_heads": 4})
    assert TokenEncoder.load(edited, device="cpu").space().digest not in digests


def test_saving_keeps_the_vectors(encoder: TokenEncoder, tmp_path: Path) -> None:
    encoder.model.save(tmp_path / "again", encoder.folder, encoder.spec)
    saved = TokenEncoder.load(tmp_path / "again", device="cpu", dtype="float32")
    assert (saved.encode_questions(["who?"]) == encoder.encode_questions(["who?"])).all()
    assert saved.space().digest == encoder.space().digest


def test_a_new_projection_is_orthonormal(tmp_path: Path) -> None:
    model = TokenModel.from_encoder(save_marked_bert(tmp_path / "plain"), 8, seed=1, device="cpu")
    weight = model.linear.weight.detach()
    assert torch.allclose(weight @ weight.T, torch.eye(8), atol=1e-5)


def test_other_models_and_invalid_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    plain, bare = save_bert(tmp_path / "plain"), tmp_path / "bare"
    assert not is_token_encoder(plain)
    with pytest.raises(InputError, match="is not a ColBERT"):
        TokenEncoder.load(plain)
    with pytest.raises(InputError, match="is a ColBERT"):
        Encoder.load(folder)
    shutil.copytree(folder, bare)
    tensors = load_file(bare / "model.safetensors")
    del tensors["linear.weight"]
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="lacks its projection"):
        TokenEncoder.load(bare)
    TokenModel.from_encoder(plain, 8, device="cpu").save(tmp_path / "unmarked", plain, SPEC)
    with pytest.raises(InputError, match="has no token"):
        TokenEncoder.load(tmp_path / "unmarked")
    for settings in ({"words": 1}, {"question_length": 2}, {"passage_length": "long"}, {"passage_length": 1000}):
        with pytest.raises(UsageError):
            read_token_spec(folder, settings)
