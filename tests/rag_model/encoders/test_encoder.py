import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DPRContextEncoder,
    DPRQuestionEncoder,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MistralConfig,
    MistralModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rag_model.encoders.encoder import Encoder, prefetch
from rag_model.encoders.model import Model
from rag_model.encoders.spec import read_encoder_spec
from rag_model.encoders.tokens import pad_length
from rag_model.errors import InputError, UsageError
from tests.fixtures.tiny import write_json

Build = Callable[..., Path]
Texts = tuple[list[str], list[str]]
SMALL = {"vocab_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}


def test_the_real_minilm_encodes_as_sentence_transformers_does(minilm: Path, sentence_transformers: Any) -> None:
    texts = ["A bookwheel lets one read many books at once.", "Paris", "Rivers " * 300, ""]
    actual = Encoder.load(minilm, "question", dtype="float32")
    peer = sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
    np.testing.assert_allclose(actual.encode_questions(texts), peer.encode(texts), atol=1e-5)
    passages = actual.encode_passages(["Paris"], ["is a city."])
    np.testing.assert_allclose(passages, peer.encode(["Paris is a city."]), atol=1e-5)


def test_bf16_stays_within_a_thousandth_of_fp32(minilm: Path, texts: Texts) -> None:
    half = Encoder.load(minilm, dtype="bfloat16").encode_passages(*texts)
    full = Encoder.load(minilm, dtype="float32").encode_passages(*texts)
    assert half.dtype == np.float32
    cosine = (half * full).sum(1) / np.linalg.norm(half, axis=1) / np.linalg.norm(full, axis=1)
    assert cosine.min() >= 0.999


PROMPTS = {"query": "query: ", "document": "passage: "}


@pytest.mark.parametrize(
    ("pooling", "has_normalize", "similarity"),
    [
        *product(["mean"], [True, False], [None, "cosine", "dot", "maxsim"]),
        *product(["cls", "lasttoken"], [False], [None]),  # a similarity does not affect the pooling
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"prompts": PROMPTS},
        {"prompts": {**PROMPTS, "sts": "who "}, "default_prompt_name": "sts"},
        {"prompts": {"sts": "who "}, "default_prompt_name": "sts"},
        {"prompts": {"query": "", "document": "", "sts": "who "}, "default_prompt_name": "sts", "truncate_dim": None},
        {"prompts": {"query": "query: ", "document": "", "passage": "passage: "}},
        {"prompts": PROMPTS, "truncate_dim": 8},
        {},
    ],
)
def test_vectors_and_scores_are_those_of_sentence_transformers(
    tiny_st: Build,
    texts: Texts,
    pooling: str,
    has_normalize: bool,
    similarity: str | None,
    settings: dict[str, Any],
    sentence_transformers: Any,
) -> None:
    folder = tiny_st(
        pooling={"word_embedding_dimension": 32, "pooling_mode": pooling},
        modules=["Transformer", "Pooling", *(["Normalize"] if has_normalize else [])],
        prompts={**settings, "similarity_fn_name": similarity},
    )
    actual = Encoder.load(folder, dtype="float32")
    peer = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    full_texts = [f"{title} {text}".strip() for title, text in zip(*texts, strict=True)]
    passages, questions = actual.encode_passages(*texts), actual.encode_questions(full_texts)
    assert actual.dim == actual.space().dim == passages.shape[1] == peer.get_embedding_dimension()
    # A cosine model's vectors are normalised, so that the inner product is its similarity. So are
    # truncated vectors of a model with Normalize.
    is_unit = has_normalize or peer.similarity_fn_name == "cosine"
    assert actual.space().normalize == is_unit
    peer_passages = peer.encode_document(full_texts, normalize_embeddings=is_unit)
    peer_questions = peer.encode_query(full_texts, normalize_embeddings=is_unit)
    np.testing.assert_allclose(passages, peer_passages, atol=1e-5)
    np.testing.assert_allclose(questions, peer_questions, atol=1e-5)
    scores = peer.similarity(peer_questions, peer_passages).numpy()
    np.testing.assert_allclose(questions @ passages.T, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("max_seq_length", "max_length"), [(32, 32), (None, 8)])
def test_max_seq_length_replaces_model_max_length(
    tiny_st: Build, max_seq_length: int | None, max_length: int, sentence_transformers: Any
) -> None:
    folder = tiny_st()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()  # a link
    write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": 8})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})
    actual = Encoder.load(folder, dtype="float32")
    assert actual.spec.max_length == max_length
    peer = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    texts = ["who wrote the theory of music", "the king " * 60]
    np.testing.assert_allclose(actual.encode_questions(texts), peer.encode_query(texts), atol=1e-5)


def test_a_cosine_model_without_normalize_ranks_as_semantic_search(
    minilm: Path, tmp_path: Path, sentence_transformers: Any
) -> None:
    folder = shutil.copytree(minilm, tmp_path / "cosine")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([m for m in modules if not m["type"].endswith("Normalize")]))
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "cosine"}')
    question = "What is the tallest building?"
    texts = ["Structural engineering is related to the design of buildings.", "The tower stands 309 feet tall. " * 9]
    peer = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    actual = Encoder.load(folder, dtype="float32")
    (hits,) = sentence_transformers.util.semantic_search(peer.encode_query([question]), peer.encode_document(texts))
    scores = actual.encode_questions([question]) @ actual.encode_passages(["", ""], texts).T
    assert np.argsort(-scores[0]).tolist() == [hit["corpus_id"] for hit in hits]
    np.testing.assert_allclose(np.sort(scores[0])[::-1], [hit["score"] for hit in hits], atol=1e-5)


@pytest.fixture
def end_token_folder(tmp_path: Path) -> Path:
    """Save a folder like e5-mistral's: its config requests an end token that tokenizer.json does not add."""
    folder = tmp_path / "mistral"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the king of the river"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>", "model_max_length": 64}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, **names})
    shape = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    MistralModel(MistralConfig(**shape, **heads, initializer_range=0.3, sliding_window=None)).save_pretrained(folder)
    types = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(zip(types, paths, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64})
    return folder


def test_a_requested_end_token_ends_every_input(
    end_token_folder: Path, tmp_path: Path, sentence_transformers: Any
) -> None:
    actual = Encoder.load(end_token_folder, dtype="float32")
    texts = ["Who wrote it?", "", "the king " * 100]
    assert {actual.tokenizer.encode(text).tokens[-1] for text in texts} == {"</s>"}
    assert actual.tokenizer.encode("the", "king").tokens[-1] == "</s>"
    assert len(actual.tokenizer.encode(texts[2]).ids) == 64
    # sentence-transformers reads a tokenizer.json that adds the token itself.
    corrected_folder = shutil.copytree(end_token_folder, tmp_path / "mended")
    tokenizer = Tokenizer.from_file(str(corrected_folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(corrected_folder / "tokenizer.json"))
    peer = sentence_transformers.SentenceTransformer(str(corrected_folder), device="cpu")
    np.testing.assert_allclose(actual.encode_questions(texts), peer.encode_query(texts), atol=1e-5)
    assert read_encoder_spec(corrected_folder).end_token == ""
    # Without the token the vectors differ, so the space must differ too.
    without_end_token = Encoder.load(end_token_folder, overrides={"pooling": "mean"}, dtype="float32")
    assert without_end_token.spec.end_token == ""
    assert without_end_token.space().tokenizer != actual.space().tokenizer


def test_an_end_token_without_a_name_is_refused(end_token_folder: Path) -> None:
    write_json(end_token_folder / "tokenizer_config.json", {"add_eos_token": True, "eos_token": "<|end|>"})
    with pytest.raises(InputError, match=r"has no end token '<\|end\|>'"):
        Encoder.load(end_token_folder)
    write_json(end_token_folder / "tokenizer_config.json", {"add_eos_token": True})
    with pytest.raises(InputError, match="sets add_eos_token but names no eos_token"):
        Encoder.load(end_token_folder)


def test_dpr_encodes_pairs_as_transformers_does(tiny_dpr: tuple[Path, Path], texts: Texts) -> None:
    passage = Encoder.load(tiny_dpr[0], "passage", {"max_length": 64}, dtype="float32")
    oracle = DPRContextEncoder.from_pretrained(tiny_dpr[0])
    vectors = passage.encode_passages(*texts)
    for vector, title, text in zip(vectors, *texts, strict=True):
        ids = passage.tokenizer.encode(title, text) if title else passage.tokenizer.encode(text)
        assert ids.tokens.count("[SEP]") == (2 if title else 1)
        expected = oracle(torch.tensor([ids.ids])).pooler_output[0].detach().numpy()
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_dpr_encodes_questions_as_transformers_does(tiny_dpr: tuple[Path, Path]) -> None:
    question = Encoder.load(tiny_dpr[1], "question", {"max_length": 64}, dtype="float32")
    ids = question.tokenizer.encode("who was the king?").ids
    expected = DPRQuestionEncoder.from_pretrained(tiny_dpr[1])(torch.tensor([ids])).pooler_output
    vectors = question.encode_questions(["who was the king?"])
    np.testing.assert_allclose(vectors, expected.detach().numpy(), atol=1e-4)


def test_vectors_do_not_depend_on_the_batch(tiny_bert: Path, texts: Texts) -> None:
    encoder = Encoder.load(tiny_bert, dtype="float32")
    together = encoder.encode_passages(*texts)
    apart = np.concatenate([encoder.encode_passages([a], [b]) for a, b in zip(*texts, strict=True)])
    np.testing.assert_allclose(together, apart, atol=1e-5)


def test_the_same_texts_give_the_same_bits(minilm: Path, texts: Texts) -> None:
    encoder = Encoder.load(minilm)
    np.testing.assert_array_equal(encoder.encode_passages(*texts), encoder.encode_passages(*texts))


def test_no_texts_give_no_rows(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert)
    assert encoder.encode_questions([]).shape == (0, 32)
    assert (encoder.dim, encoder.space().dim) == (32, 32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00",
        "日本語" * 100,
        "a" * 10_000,
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ],
)
def test_any_text_has_a_vector(tiny_bert: Path, text: str) -> None:
    assert np.isfinite(Encoder.load(tiny_bert).encode_questions([text])).all()


def test_positions_of_roberta_start_after_the_padding(tmp_path: Path, tiny_bert: Path, texts: Texts) -> None:
    roberta_config = RobertaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=66, pad_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    folder = shutil.copytree(tiny_bert, tmp_path / "roberta")
    RobertaModel(roberta_config, add_pooling_layer=False).save_pretrained(folder)
    encoder = Encoder.load(folder, dtype="float32")
    alone = np.concatenate([encoder.encode_passages([a], [b]) for a, b in zip(*texts, strict=True)])
    np.testing.assert_allclose(encoder.encode_passages(*texts), alone, atol=1e-5)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["model_max_length"]  # so that only the positions of the model limit a text
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_encoder_spec(folder).max_length == 64
    with pytest.raises(UsageError, match="use 64 or less"):
        read_encoder_spec(folder, {"max_length": 65})
    (folder / "bookwheel.json").write_text('{"spec": {"max_length": 66}}')  # older versions recorded this
    assert np.isfinite(Encoder.load(folder).encode_questions(["king " * 100])).all()


def test_last_token_of_a_decoder_gives_the_vector(tmp_path: Path, tiny_bert: Path, texts: Texts) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "gpt2")
    GPT2Model(GPT2Config(**SMALL, initializer_range=0.5)).save_pretrained(folder)
    encoder = Encoder.load(folder, overrides={"pooling": "last", "max_length": 64}, dtype="float32")
    alone = np.concatenate([encoder.encode_passages([a], [b]) for a, b in zip(*texts, strict=True)])
    np.testing.assert_allclose(encoder.encode_passages(*texts), alone, atol=1e-5)


def test_a_vector_that_is_not_finite_names_its_row(tmp_path: Path, tiny_bert: Path) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    encoder = Encoder.load(tiny_bert)
    king = encoder.tokenizer.token_to_id("king")
    tensors["embeddings.word_embeddings.weight"][king] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="that is not finite, of row 2"):
        Encoder.load(folder).encode_questions(["a", "the", "the king", "was"])


def test_models_of_another_kind_are_refused(tmp_path: Path, tiny_bert: Path) -> None:
    shape = {"vocab_size": 128, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    bert = BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    models = {
        "T5ForConditionalGeneration": T5ForConditionalGeneration(T5Config(**shape)),
        "BertForSequenceClassification": BertForSequenceClassification(bert),
        "GPT2LMHeadModel": GPT2LMHeadModel(GPT2Config(**SMALL)),
    }
    for name, model in models.items():
        folder = shutil.copytree(tiny_bert, tmp_path / name)
        model.save_pretrained(folder)
        with pytest.raises(InputError, match=f"is a {name}, which computes no vectors"):
            Encoder.load(folder)


def test_a_folder_that_lacks_tensors_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "short")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.0.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 tensors"):
        Encoder.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_or_corrupt_file_is_refused(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "broken")
    (folder / name).write_bytes((folder / name).read_bytes()[:-7])
    with pytest.raises(InputError, match=r"fetch (it|the model) again"):
        Encoder.load(folder)
    (folder / name).unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError):
        Encoder.load(folder)


def test_missing_device_is_named(tiny_bert: Path) -> None:
    with pytest.raises(UsageError, match="device 'gpu' is unknown"):
        Encoder.load(tiny_bert, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="this machine has no cuda:0"):
            Encoder.load(tiny_bert, device="cuda:0")


def test_number_of_threads_is_set(tiny_bert: Path) -> None:
    thread_count = torch.get_num_threads()
    torch.set_num_threads(2)  # the tests may use one thread
    try:
        Encoder.load(tiny_bert, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(thread_count)


def test_folder_without_tokenizer_json_gives_the_same_vectors(tmp_path: Path, tiny_bert: Path) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "old")
    current = Encoder.load(tiny_bert, dtype="float32")
    vocabulary = current.tokenizer.get_vocab()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=lambda token: vocabulary[token])))
    texts = ["Who wrote the theory of music?", "the king"]
    legacy = Encoder.load(folder, dtype="float32")
    np.testing.assert_array_equal(legacy.encode_questions(texts), current.encode_questions(texts))
    assert legacy.space().tokenizer != current.space().tokenizer


def test_next_window_is_prepared_in_another_thread_and_in_order() -> None:
    calls: list[tuple[int, str]] = []

    def windows() -> Iterator[int]:
        for number in range(5):
            calls.append((number, threading.current_thread().name))
            yield number

    assert list(prefetch(windows())) == [0, 1, 2, 3, 4]
    assert [number for number, _ in calls] == [0, 1, 2, 3, 4]
    assert threading.current_thread().name not in {name for _, name in calls}


def test_error_of_the_next_window_is_raised() -> None:
    def windows() -> Iterator[int]:
        yield 0
        raise InputError("the second window is corrupt")

    prefetched = prefetch(windows())
    assert next(prefetched) == 0
    with pytest.raises(InputError, match="second window"):
        next(prefetched)


def test_batches_for_a_gpu_repeat_few_shapes(tiny_bert: Path) -> None:
    model = Encoder.load(tiny_bert, device="cpu").model
    assert isinstance(model, Model)
    on_gpu = replace(model, device=torch.device("cuda"), batch_tokens=65_536)  # only splits texts into batches
    random = np.random.default_rng(0)
    windows = [random.integers(100, 180, 32_768).tolist() for _ in range(2)]
    shapes = list[set[tuple[int, int]]]()
    for lengths in windows:
        batches = list(on_gpu.split_into_batches(lengths, batch_invariant=True))
        assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
        shapes.append({(len(rows), pad_length(lengths[rows[0]])) for rows in batches})
    assert len(shapes[1] - shapes[0]) <= 1  # the last batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_vectors_of_the_cpu(minilm: Path, texts: Texts) -> None:
    actual = Encoder.load(minilm, device="cuda:0").encode_passages(*texts)
    cpu = Encoder.load(minilm, device="cpu", dtype="float32").encode_passages(*texts)
    assert (actual * cpu).sum(1).min() >= 0.999
