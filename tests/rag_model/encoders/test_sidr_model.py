"""SiDR compared with its equation in numpy: weights, terms of passages, folder and space."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rag_model.corpus.ragged_file import QUERY_UNITS
from rag_model.encoders.architecture import check_is_encoder
from rag_model.encoders.bag import compute_term_mask
from rag_model.encoders.encoder import load_question_encoder
from rag_model.encoders.sparse_encoder import SIDR, SparseEncoder, SparseSpec, compute_sparse_space, read_sparse_spec
from rag_model.encoders.sparse_model import SidrModel
from rag_model.encoders.tokens import load_tokenizer
from rag_model.errors import InputError, UsageError
from tests.fixtures.tiny_sidr import SPEC, save_sidr
from tests.fixtures.tiny_splade import compute_weights

TEXTS = ["the king was born in the city", "music", "a war of theory, of rivers and who wrote the music of the king"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sidr(tmp_path_factory.mktemp("sidr") / "sidr")


def load(folder: Path, **overrides: Any) -> SparseEncoder:
    return SparseEncoder.load(folder, overrides, device="cpu", dtype="float32")


def test_weights_are_those_of_the_equation(folder: Path) -> None:
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    body = transformers.AutoModel.from_pretrained(str(folder)).eval()
    words, tokenizer = tensors["bert.embeddings.word_embeddings.weight"], load_tokenizer(folder, 48)
    for text, weights in zip(TEXTS, compute_weights(load(folder), TEXTS), strict=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        hidden = body(input_ids=ids)[0][0].detach().numpy()  # (t, h)
        centred = hidden - hidden.mean(1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        products = (normal * tensors["sidr_norm.weight"] + tensors["sidr_norm.bias"]) @ words.T  # (t, V)
        expected = np.where(products > 0, products + 1, np.exp(np.minimum(products, 0))).max(0)
        expected[~compute_term_mask(tokenizer, 128)] = 0
        assert np.abs(weights - expected).max() < 1e-4


def test_unused_special_and_unknown_ids_are_no_terms(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 48)
    tokenizer.add_tokens(["[unused7]", "plain"])
    terms = compute_term_mask(tokenizer, 128)
    words = tokenizer.get_vocab()
    assert not terms[[words[word] for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused7]")]].any()
    assert terms[words["plain"]]
    assert terms[words["king"]]
    assert not terms[len(words) :].any()


def test_texts_keep_the_heaviest_terms_and_their_own_tokens(folder: Path) -> None:
    encoder = load(folder)
    rows, dense = encoder.encode_passages(["", "", ""], TEXTS), compute_weights(encoder, TEXTS)
    units = np.minimum(255, np.rint(dense * 16)).astype(int)
    tokenizer, terms = load_tokenizer(folder, 48), compute_term_mask(load_tokenizer(folder, 48), 128)
    for number, (first, last) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
        best = np.lexsort((np.arange(128), -units[number]))[:12]
        own_tokens = {number for number in tokenizer.encode(TEXTS[number]).ids if terms[number]}
        expected_terms = sorted(term for term in own_tokens | {*best.tolist()} if units[number][term] > 0)
        assert own_tokens - {*best.tolist()} or number == 1, "a token of the text is among the light terms"
        assert rows.terms[first:last].tolist() == expected_terms
        assert rows.weights[first:last].tolist() == units[number][expected_terms].tolist()
    query_vectors = encoder.encode_questions(TEXTS)
    for query_terms, weights in zip(query_vectors, np.rint(dense * QUERY_UNITS), strict=True):
        nonzero = query_terms[query_terms[:, 1] > 0]
        assert len(nonzero) >= 12
        assert (weights[nonzero[:, 0].astype(int)] == nonzero[:, 1] * QUERY_UNITS).all()
        assert (np.diff(nonzero[:, 1]) <= 0).all()


def test_other_texts_in_a_batch_change_no_weight(folder: Path) -> None:
    encoder = load(folder)
    together, alone = encoder.encode_passages([""] * 3, TEXTS), encoder.encode_passages([""], TEXTS[1:2])
    assert np.array_equal(alone.weights, together.take(np.array([1])).weights)
    assert np.array_equal(alone.terms, together.take(np.array([1])).terms)


def test_saved_folder_is_the_same_encoder_and_its_space_includes_the_norm(folder: Path, tmp_path: Path) -> None:
    spec = read_sparse_spec(folder)
    assert spec == SPEC
    model = SidrModel.load(folder, device="cpu")
    model.save(tmp_path / "again", folder, spec)
    assert isinstance(load_question_encoder(str(tmp_path / "again")), SparseEncoder)
    assert compute_sparse_space(tmp_path / "again", spec).digest == compute_sparse_space(folder, spec).digest
    assert compute_sparse_space(folder, spec).pooling == "max elu1p, 12 terms and its own, 16 units"
    with torch.no_grad():
        model.norm.bias += 1
    model.save(tmp_path / "other", folder, spec)
    assert compute_sparse_space(tmp_path / "other", spec).digest != compute_sparse_space(folder, spec).digest


def test_invalid_sidr_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a sparse encoder"):
        check_is_encoder(folder)
    with pytest.raises(UsageError, match="pooling sum of a sparse encoder does not fit activation elu1p"):
        SparseSpec(pooling="sum", activation=SIDR)
    SidrModel.load(folder, device="cpu").save(tmp_path / "bare", folder, SPEC)
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    del tensors["sidr_norm.bias"]
    save_file(tensors, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks sidr_norm\.weight or \.bias"):
        load(tmp_path / "bare")
    assert json.loads((folder / "bookwheel.json").read_text())["sparse"]["activation"] == SIDR
