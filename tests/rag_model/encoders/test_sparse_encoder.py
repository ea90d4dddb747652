"""The sparse encoder compared with sentence-transformers, its integer weights, its space, and invalid folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rag_model.corpus.ragged_file import QUERY_UNITS
from rag_model.encoders.architecture import check_is_encoder
from rag_model.encoders.encoder import Encoder, load_any_encoder, load_question_encoder
from rag_model.encoders.sparse_encoder import (
    SparseEncoder,
    SparseSpec,
    collect_sparse_encoder_files,
    compute_sparse_space,
    read_sparse_spec,
)
from rag_model.encoders.sparse_model import find_top_terms
from rag_model.encoders.spec import is_sparse_encoder
from rag_model.errors import InputError, UsageError
from rag_model.snapshots.encoding import RepresentRecipe, store_sparse_encoder
from rag_model.store.store import Store
from tests.fixtures.tiny import save_bert, write_json
from tests.fixtures.tiny_splade import compute_weights, save_mlm, save_splade

TEXTS = ["the king was born in the city", "music", "a war of theory, of rivers and who wrote the music of the king"]
POOLINGS = [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu"), ("sum", "log1p_relu")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mlm(tmp_path_factory.mktemp("mlm"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SparseEncoder:
    return load(folder)


def load(folder: Path, **overrides: Any) -> SparseEncoder:
    return SparseEncoder.load(folder, overrides, device="cpu", dtype="float32")


@pytest.mark.parametrize(("pooling", "activation"), POOLINGS)
def test_weights_are_those_of_sentence_transformers(
    pooling: str, activation: str, tmp_path: Path, sentence_transformers: Any
) -> None:
    model_folder = save_splade(tmp_path / "model", pooling_strategy=pooling, activation_function=activation)
    peer = sentence_transformers.SparseEncoder(str(model_folder), device="cpu")
    expected = peer.encode(TEXTS, convert_to_tensor=True).to_dense().numpy()
    actual = load(model_folder)
    assert (actual.spec.pooling, actual.spec.activation, actual.spec.max_length) == (pooling, activation, 32)
    assert np.abs(compute_weights(actual, TEXTS) - expected).max() < 1e-5
    assert 0.05 < (expected > 0).mean() < 0.95
    peer.save(str(tmp_path / "saved"))  # in the layout of its own version
    assert load(tmp_path / "saved").spec.space_pooling == actual.spec.space_pooling
    old = save_splade(tmp_path / "old", legacy=True, pooling_strategy=pooling, activation_function=activation)
    assert np.array_equal(compute_weights(load(old), TEXTS), compute_weights(actual, TEXTS))


def test_passages_keep_their_heaviest_terms_in_units(folder: Path) -> None:
    actual = load(folder, passage_terms=9, scale=50)
    rows = actual.encode_passages(["king", "", "city"], TEXTS)
    dense = compute_weights(actual, [f"king {TEXTS[0]}", TEXTS[1], f"city {TEXTS[2]}"])
    units = np.minimum(255, np.rint(dense * 50)).astype(int)
    for number, (first, last) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
        best = np.lexsort((np.arange(128), -units[number]))[:9]
        assert rows.terms[first:last].tolist() == sorted(best[units[number][best] > 0].tolist())
        assert rows.weights[first:last].tolist() == units[number][rows.terms[first:last]].tolist()


def test_questions_are_terms_from_the_heaviest_on(encoder: SparseEncoder) -> None:
    query_vectors = encoder.encode_questions([*TEXTS, "."])
    dense = compute_weights(encoder, [*TEXTS, "."])
    assert query_vectors.shape[2] == 2
    for query_terms, weights in zip(query_vectors, dense, strict=True):
        nonzero = query_terms[query_terms[:, 1] > 0]
        units = np.rint(weights * QUERY_UNITS)
        assert len(nonzero) == (units > 0).sum()
        assert (units[nonzero[:, 0].astype(int)] == nonzero[:, 1] * QUERY_UNITS).all()
        assert (np.diff(nonzero[:, 1]) <= 0).all()
    assert encoder.encode_questions([]).shape == (0, 1, 2)


def test_other_passages_in_a_batch_change_no_weight(encoder: SparseEncoder) -> None:
    texts = [" ".join(TEXTS[: 1 + number % 3]) for number in range(70)]
    together = encoder.encode_passages([""] * 70, texts)
    for row in (0, 1, 69):
        alone = encoder.encode_passages([""], texts[row : row + 1])
        assert np.array_equal(alone.terms, together.take(np.array([row])).terms)
        assert np.array_equal(alone.weights, together.take(np.array([row])).weights)


def test_equal_weights_are_cut_by_term_and_the_largest_are_clipped() -> None:
    weights = torch.tensor([[0.5, 9.0, 0.5, 0.0, 0.5]])
    terms, units = find_top_terms(weights, 3, 64, 255)
    assert (terms.tolist(), units.tolist()) == ([[1, 0, 2]], [[255, 32, 32]])
    assert find_top_terms(weights, 9, 64, 255)[0].shape == (1, 5)


def test_space_depends_on_all_that_decides_a_passage(folder: Path, tmp_path: Path) -> None:
    spec = read_sparse_spec(folder)
    space = compute_sparse_space(folder, spec)
    assert (space.dim, space.pooling) == (128, "max relu, 256 terms, 64 units")
    question_settings = spec.with_fields({"question_terms": 5, "question_prompt": "q: "})
    assert compute_sparse_space(folder, question_settings).digest == space.digest
    for change in ({"scale": 32}, {"passage_terms": 5}, {"pooling": "sum"}, {"passage_prompt": "p"}, {"max_length": 9}):
        assert compute_sparse_space(folder, spec.with_fields(change)).digest != space.digest
    headed = shutil.copytree(folder, tmp_path / "headed")
    tensors = load_file(headed / "model.safetensors")
    tensors["cls.predictions.bias"] += 1
    save_file(tensors, headed / "model.safetensors", {"format": "pt"})
    assert compute_sparse_space(headed, spec).digest != space.digest, "the head decides weights too"
    edited = update_json(shutil.copytree(folder, tmp_path / "edited"), "config.json", num_attention_heads=4)
    assert compute_sparse_space(edited, spec).digest != space.digest
    tied = shutil.copytree(folder, tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(tensors, tied / "model.safetensors", {"format": "pt"})
    assert compute_sparse_space(tied, spec).digest == space.digest, "tied tensors may be stored twice"


def test_stored_files_are_the_same_encoder(folder: Path, tmp_path: Path) -> None:
    spec = read_sparse_spec(folder, {"scale": 20})
    space = compute_sparse_space(folder, spec)
    (tmp_path / "work").mkdir()
    for name, path in collect_sparse_encoder_files(folder, spec, space, tmp_path / "work").items():
        shutil.copyfile(path, tmp_path / name)
    stored_encoder = load_any_encoder(tmp_path)
    assert isinstance(stored_encoder, SparseEncoder)
    assert (stored_encoder.spec, stored_encoder.space()) == (spec, space)
    assert isinstance(load_question_encoder(str(folder)), Encoder), "a plain folder has no setting of a sparse encoder"
    assert not is_sparse_encoder(folder)


def test_recipe_settings_apply_to_separate_question_encoder(folder: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    other_folder = shutil.copytree(folder, tmp_path / "questions")
    settings = {"question_terms": 3, "question_prompt": "query: ", "max_length": 9, "pooling": "sum"}
    for question_folder in ("", str(other_folder)):
        recipe = RepresentRecipe(question_encoder=question_folder, spec=settings)
        stored_encoder = store_sparse_encoder(store, str(folder), recipe)
        record = json.loads(store.blobs.read(dict(stored_encoder.question)["bookwheel.json"]))
        assert record["sparse"].items() >= settings.items()


def update_json(folder: Path, file: str, **values: Any) -> Path:
    path = folder / file
    write_json(path, {**json.loads(path.read_text()), **values})
    return folder


def test_invalid_sparse_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a BertModel, which has no weights over its vocabulary: give"):
        load(save_bert(tmp_path / "dense"))
    with pytest.raises(InputError, match="pooling 'mean' of a sparse encoder is unknown: use one of max, sum"):
        load(save_splade(tmp_path / "mean", pooling_strategy="mean"))
    small = save_mlm(tmp_path / "small", vocab_size=90)
    with pytest.raises(InputError, match=r"has 110 tokens, and its model computes weights for 90: use"):
        load(small)
    routed = save_splade(tmp_path / "routed")
    modules = json.loads((routed / "modules.json").read_text())
    write_json(routed / "modules.json", [*modules, {"idx": 2, "name": "2", "path": "2", "type": "x.Router"}])
    with pytest.raises(InputError, match="has a Router module, which is not supported: use a model of Transformer"):
        load(routed)
    with pytest.raises(InputError, match=r"is a sparse encoder, which computes weighted terms: name it in \[represent"):
        check_is_encoder(save_splade(tmp_path / "splade"))
    with pytest.raises(InputError, match="has no vocab_size"):
        load(update_json(save_mlm(tmp_path / "unsized"), "config.json", vocab_size=None))
    headless = save_mlm(tmp_path / "headless")
    tensors = load_file(headless / "model.safetensors")
    remaining = {name: tensor for name, tensor in tensors.items() if "transform" not in name}
    save_file(remaining, headless / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks 4 tensors, the first is cls\.predictions\.transform"):
        load(headless)
    damaged = save_mlm(tmp_path / "broken")
    tensors["bert.embeddings.word_embeddings.weight"][9] = float("nan")
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="computed a weight that is not finite: fetch the model again"):
        load(damaged).encode_questions(TEXTS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scale": 0}, "scale of a sparse encoder is 0: give 1 to 65,536"),
        ({"passage_terms": 20_000}, "passage_terms of a sparse encoder is 20000: give 1 to 10,000"),
        ({"max_length": 2}, "max_length of a sparse encoder is 2: give 3 or more"),
        ({"max_length": 65}, "max_length 65 is more than the limit of encoder .*: use 64 or less"),
        ({"scale": "big"}, "scale of a sparse encoder is 'big': give a value of type int"),
        ({"activation": "gelu"}, "activation 'gelu' of a sparse encoder is unknown: use one of relu, log1p_relu"),
        ({"dim": 3}, "'dim' is not a setting of a sparse encoder: use one of pooling"),
    ],
)
def test_wrong_settings_are_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_sparse_spec(folder, values)


def test_spec_formats_texts_with_prompts() -> None:
    spec = SparseSpec(passage_prompt="p: ", question_prompt="q: ")
    assert (spec.format_passage("T", "x"), spec.format_passage("", "x")) == ("p: T x", "p: x")
    assert spec.format_question("x") == "q: x"
