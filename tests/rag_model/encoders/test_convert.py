"""Pickled weights, in the layouts of the hub, become safetensors bit for bit, and load like the originals."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import ByteLevelBPETokenizer
from transformers import BertConfig, BertForMaskedLM, BertModel, DPRConfig

from rag_model.corpus.records import Passage
from rag_model.encoders.convert import ConvertedWeights, convert_weights, fetch_pickles, read_pickle
from rag_model.encoders.encoder import Encoder, Role
from rag_model.encoders.files import find_hub_name
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.spec import read_encoder_spec
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.weights import digest_weights
from rag_model.errors import InputError, UsageError
from rag_model.generate.load import load_generator
from rag_model.generate.rag_folder import load_rag
from tests.fixtures.hub import Hub
from tests.fixtures.tiny import SHAPE, VOCABULARY, add_tokenizer, write_json
from tests.fixtures.tiny_colbert import save_colbert, save_marked_bert
from tests.fixtures.tiny_generators import BART_SHAPE, save_bart, save_t5
from tests.fixtures.tiny_splade import save_splade

pytestmark = pytest.mark.xdist_group("convert")

TITLES, TEXTS = ["the king", "", "a river"], ["was born in the city of music", "who wrote the theory", "the war"]
QUESTIONS = ["who wrote the theory?", "where is the river"]
State = dict[str, torch.Tensor]
Save = Callable[[Path], State]


def pickle_weights(folder: Path, state: State, name: str = "pytorch_model.bin", *, legacy: bool = True) -> State:
    """Write weights in the format of torch before 1.6, or in today's; remove safetensors."""
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    torch.save(state, folder / name, _use_new_zipfile_serialization=not legacy)
    return state


def add_old_tensors(state: State, prefix: str = "") -> State:
    """Add the tensors of BERT's old checkpoints: a buffer of positions, and a pooler."""
    width = SHAPE["hidden_size"]
    return {
        f"{prefix}embeddings.position_ids": torch.arange(SHAPE["max_position_embeddings"]).expand((1, -1)),
        **state,
        f"{prefix}pooler.dense.weight": torch.randn(width, width),
        f"{prefix}pooler.dense.bias": torch.randn(width),
    }


def add_old_tokenizer(folder: Path) -> None:
    """Write the tokenizer as repositories of 2020 have it: a list of words, without tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": True, "model_max_length": 64})


def save_dpr(folder: Path, name: str, projection: int = 0) -> State:
    torch.manual_seed(2)
    module = getattr(transformers, name)(DPRConfig(**SHAPE, projection_dim=projection))
    module.save_pretrained(folder)
    add_old_tokenizer(folder)
    inner = "ctx_encoder" if name == "DPRContextEncoder" else "question_encoder"
    return pickle_weights(folder, add_old_tensors(module.state_dict(), f"{inner}.bert_model."))


def save_rag(folder: Path, name: str) -> State:
    torch.manual_seed(3)
    question = transformers.DPRQuestionEncoder(DPRConfig(**SHAPE, projection_dim=0))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    generator = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=tokenizer.get_vocab_size(), **BART_SHAPE, init_std=0.3)
    )
    config = transformers.RagConfig.from_question_encoder_generator_configs(question.config, generator.config, n_docs=2)
    module = getattr(transformers, name)(config=config, question_encoder=question, generator=generator)
    module.save_pretrained(folder)
    add_old_tokenizer(folder / "question_encoder_tokenizer")
    tokenizer_folder = folder / "generator_tokenizer"
    tokenizer_folder.mkdir()
    tokenizer.save_model(str(tokenizer_folder))
    write_json(tokenizer_folder / "tokenizer_config.json", {"model_max_length": 256})
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_json(tokenizer_folder / "special_tokens_map.json", tokens)
    # In 2020, checkpoints of BART had no tensor for the head.
    state = {key: value for key, value in module.state_dict().items() if not key.endswith("lm_head.weight")}
    return pickle_weights(folder, add_old_tensors(state, "rag.question_encoder.question_encoder.bert_model."))


def save_bare_bart(folder: Path) -> State:
    """Write facebook/bart-base's layout: names without `model.`, and no head."""
    save_bart(folder)
    module = transformers.BartForConditionalGeneration.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "architectures": ["BartModel"]})
    return pickle_weights(folder, module.model.state_dict())


def save_old_t5(folder: Path) -> State:
    save_t5(folder)
    return pickle_weights(folder, transformers.T5ForConditionalGeneration.from_pretrained(folder).state_dict())


def save_stanford_colbert(folder: Path) -> State:
    save_colbert(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return pickle_weights(folder, add_old_tensors(state, "bert."), legacy=False)


def save_pylate(folder: Path) -> State:
    """Write a ColBERT with its projection in `1_Dense/pytorch_model.bin`."""
    save_marked_bert(folder)
    modules = [("", "models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    write_json(
        folder / "modules.json", [{"idx": i, "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    )
    write_json(folder / "config_sentence_transformers.json", {"query_length": 16, "document_length": 48})
    write_json(folder / "1_Dense" / "config.json", {"in_features": 32, "out_features": 16, "bias": False})
    pickle_weights(folder / "1_Dense", {"linear.weight": torch.randn(16, 32)}, legacy=False)
    return pickle_weights(folder, BertModel.from_pretrained(folder, add_pooling_layer=False).state_dict())


def save_contriever(folder: Path) -> State:
    torch.manual_seed(4)
    module = BertModel(BertConfig(**SHAPE))
    module.save_pretrained(folder)
    add_old_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "architectures": ["Contriever"]})
    return pickle_weights(folder, module.state_dict())


def save_sentence_transformer(folder: Path, pooling: str) -> State:
    torch.manual_seed(5)
    module = BertModel(BertConfig(**SHAPE), add_pooling_layer=False)
    module.save_pretrained(folder)
    add_tokenizer(folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", entries)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, pooling: True})
    return pickle_weights(folder, add_old_tensors(module.state_dict()), legacy=False)


def save_old_splade(folder: Path) -> State:
    """Write weights like those of naver/splade, whose output matrix is the embedding matrix."""
    save_splade(folder)
    return pickle_weights(folder, add_old_tensors(BertForMaskedLM.from_pretrained(folder).state_dict(), "bert."))


def save_sharded(folder: Path) -> State:
    state = save_sentence_transformer(folder, "pooling_mode_mean_tokens")
    (folder / "pytorch_model.bin").unlink()
    names, weight_map = [*state], dict[str, str]()
    for number, part in enumerate((names[:5], names[5:]), start=1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "pytorch_model.bin.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return state


LAYOUTS: dict[str, tuple[Save, Callable[[Path], Any]]] = {
    "facebook/dpr-ctx_encoder": (lambda folder: save_dpr(folder, "DPRContextEncoder"), Encoder.load),
    "facebook/dpr-question_encoder": (
        lambda folder: save_dpr(folder, "DPRQuestionEncoder", 16),
        lambda folder: Encoder.load(folder, "question"),
    ),
    "facebook/rag-sequence-nq": (lambda folder: save_rag(folder, "RagSequenceForGeneration"), load_rag),
    "facebook/rag-token-nq": (lambda folder: save_rag(folder, "RagTokenForGeneration"), load_rag),
    "facebook/bart-base": (save_bare_bart, load_generator),
    "t5": (save_old_t5, load_generator),
    "colbert-ir/colbertv2.0": (save_stanford_colbert, TokenEncoder.load),
    "pylate": (save_pylate, TokenEncoder.load),
    "facebook/contriever": (save_contriever, Encoder.load),
    "intfloat/e5": (lambda folder: save_sentence_transformer(folder, "pooling_mode_mean_tokens"), Encoder.load),
    "BAAI/bge": (lambda folder: save_sentence_transformer(folder, "pooling_mode_cls_token"), Encoder.load),
    "naver/splade": (save_old_splade, SparseEncoder.load),
    "sharded": (save_sharded, Encoder.load),
}


TIED = {"facebook/rag-sequence-nq", "facebook/rag-token-nq", "facebook/bart-base", "t5", "naver/splade"}


def convert(folder: Path, destination: Path) -> ConvertedWeights:
    destination.mkdir()
    return convert_weights(fetch_pickles(str(folder)), destination)


@dataclass(frozen=True)
class Conversion:
    """The tensors of all layouts, and the folders and the report of one conversion."""

    states: dict[str, State]
    pickled: Path
    output: Path
    report: ConvertedWeights


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    base, states = tmp_path_factory.mktemp("convert"), dict[str, State]()
    for name, (save, _) in LAYOUTS.items():
        (base / "pickled" / name).mkdir(parents=True)
        states[name] = save(base / "pickled" / name)
    return Conversion(states, base / "pickled", base / "output", convert(base / "pickled", base / "output"))


def read_bytes(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_converted_bit_for_bit_and_loads(layout: str, conversion: Conversion) -> None:
    state, folder = conversion.states[layout], conversion.output / layout
    tensors, tied_names = dict[str, torch.Tensor](), dict[str, str]()
    for path in folder.glob("model*.safetensors"):
        assert path.relative_to(conversion.output).as_posix() in conversion.report.files
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            tied_names |= file.metadata()
    del tied_names["format"]
    assert not [value for value in tied_names.values() if str(conversion.output.parent) in value]  # no local path
    assert state.keys() == tensors.keys() | tied_names.keys()
    for name, tensor in state.items():
        assert read_bytes(tensors[tied_names.get(name, name)]) == read_bytes(tensor), name
    assert bool(tied_names) == (layout in TIED)
    assert not [path for path in folder.rglob("*") if ".bin" in path.name]
    LAYOUTS[layout][1](folder)


@pytest.mark.parametrize("part", ["ctx_encoder", "question_encoder"])
def test_dpr_makes_the_vectors_of_transformers(part: str, conversion: Conversion) -> None:
    layout, is_question = f"facebook/dpr-{part}", part == "question_encoder"
    module = getattr(transformers, "DPRQuestionEncoder" if is_question else "DPRContextEncoder")
    oracle = module(DPRConfig(**SHAPE, projection_dim=16 if is_question else 0)).eval()
    assert not oracle.load_state_dict(conversion.states[layout], strict=False).missing_keys
    tokenizer = transformers.BertTokenizer(str(conversion.output / layout / "vocab.txt"), do_lower_case=True)
    role: Role = "question" if is_question else "passage"
    encoder = Encoder.load(conversion.output / layout, role, dtype="float32", device="cpu")
    inputs = [[question] for question in QUESTIONS]
    if not is_question:
        inputs = [[title, text] if title else [text] for title, text in zip(TITLES, TEXTS, strict=True)]
    with torch.no_grad():
        # Like DPR itself, which gives title and text the same token type.
        rows = [tokenizer(*texts, return_tensors="pt")["input_ids"] for texts in inputs]
        expected = torch.cat([oracle(input_ids=ids).pooler_output for ids in rows])
    vectors = encoder.encode_questions(QUESTIONS) if is_question else encoder.encode_passages(TITLES, TEXTS)
    np.testing.assert_allclose(vectors, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_rag_scores_answers_like_transformers(kind: str, conversion: Conversion) -> None:
    layout = f"facebook/rag-{kind}-nq"
    rag = load_rag(conversion.output / layout, device="cpu", dtype="float32")
    assert rag.settings.kind == kind
    oracle_class = transformers.RagSequenceForGeneration if kind == "sequence" else transformers.RagTokenForGeneration
    oracle = oracle_class(transformers.RagConfig.from_pretrained(conversion.pickled / layout)).eval()
    loading = oracle.load_state_dict(conversion.states[layout], strict=False)
    assert all(key.endswith("lm_head.weight") for key in loading.missing_keys)
    oracle.generator.tie_weights()
    texts = ["was born in the city", "who wrote"]
    passages = [[Passage("1", "1", 0, "king", "", text, 0, 2, "") for text in texts]] * 2
    contexts = rag.generator.encode_contexts(QUESTIONS, passages)
    targets = rag.generator.encode_targets(["the city", "music"])
    tokenizer = transformers.BertTokenizer(str(conversion.output / layout / "question_encoder_tokenizer" / "vocab.txt"))
    inputs = tokenizer(QUESTIONS, padding=True, return_tensors="pt")
    vectors = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        query_vectors = oracle.question_encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
        torch.testing.assert_close(rag.embed_questions(QUESTIONS), query_vectors, rtol=1e-4, atol=1e-5)
        scores = (vectors @ query_vectors[..., None])[..., 0]
        start = torch.full((2, 1), oracle.generator.config.decoder_start_token_id)
        expected = oracle(
            context_input_ids=contexts.tokens,
            context_attention_mask=contexts.mask.long(),
            doc_scores=scores,
            labels=torch.cat([start, targets.tokens], 1),
        ).loss
        torch.testing.assert_close(rag.loss(scores, contexts, targets), expected, rtol=1e-4, atol=1e-4)


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (lambda path: {"a": torch.zeros(2), "b": _Attack(path)}, r"contain posix\.mkdir|contain os\.mkdir"),
        (_Attack, "mkdir"),
        (lambda path: {"model": {"a": torch.zeros(2)}}, r"contain 'model', a dict that is not a plain tensor"),
        (lambda path: [torch.zeros(2)], "contain a list"),
        (lambda path: {}, "contain an empty table"),
        (lambda path: {"a": torch.zeros(1).expand(1 << 30)}, r"contain tensors of 4,294,967,296 bytes in a file of"),
        (lambda path: {"a": torch.zeros(2).to_sparse()}, r"contain 'a', a Tensor that is not a plain tensor"),
        (lambda path: {"__metadata__": torch.zeros(2)}, r"contain the key '__metadata__'"),
        (lambda path: {3: torch.zeros(2)}, "contain the key 3"),
    ],
)
@pytest.mark.parametrize("legacy", [True, False])
def test_pickle_with_anything_but_tensors_is_refused(
    contents: Callable[[Path], Any], message: str, legacy: bool, tmp_path: Path
) -> None:
    pickle_weights(tmp_path, contents(tmp_path / "attacked"), legacy=legacy)
    with pytest.raises(InputError, match=message):
        read_pickle(tmp_path / "pytorch_model.bin")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_truncated_pickle_is_refused(legacy: bool, size: int, tmp_path: Path) -> None:
    pickle_weights(tmp_path, {"a": torch.arange(5000.0)}, legacy=legacy)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"^pickled weights .*pytorch_model\.bin "):
        read_pickle(path)


def test_shards_that_do_not_match_their_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pickled").mkdir()
    save_sharded(tmp_path / "pickled")
    index = tmp_path / "pickled" / "pytorch_model.bin.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["another.weight"] = "pytorch_model-00001-of-00002.bin"
    index.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"the first tensor that differs is 'another\.weight'"):
        convert(tmp_path / "pickled", tmp_path / "new")
    (tmp_path / "pickled" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(InputError, match=r"pytorch_model-00002-of-00002\.bin cannot be read"):
        convert(tmp_path / "pickled", tmp_path / "again")


def test_a_model_with_safetensors_needs_no_conversion(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has safetensors, which need no conversion"):
        fetch_pickles(str(tiny_bert))
    shutil.copy(tiny_bert / "config.json", tmp_path)
    with pytest.raises(InputError, match=r"has no pytorch_model\.bin"):
        fetch_pickles(str(tmp_path))
    with pytest.raises(UsageError, match="the source is empty"):  # not the working directory
        fetch_pickles("")


def test_model_of_the_hub_keeps_the_settings_of_its_family(hub: Hub, conversion: Conversion, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(conversion.pickled / "intfloat" / "e5", tmp_path / "pickled"))
    torch.save({"optimizer": 1}, folder / "training_args.bin")
    commit = hub.add_folder("models/intfloat/e5-small", folder).branches["main"]
    fetched = fetch_pickles("intfloat/e5-small")
    assert find_hub_name(fetched) == f"intfloat/e5-small@{commit}"
    assert not (fetched / "training_args.bin").exists()
    (tmp_path / "new").mkdir()
    report = convert_weights(fetched, tmp_path / "new", "intfloat/e5-small")
    assert (report.source, report.tensors) == (f"intfloat/e5-small@{commit}", len(conversion.states["intfloat/e5"]))
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert file.metadata()["source"] == report.source
    spec = read_encoder_spec(tmp_path / "new")
    assert (spec.passage_prompt, spec.question_prompt, spec.max_length) == ("passage: ", "query: ", 24)
    assert digest_weights(conversion.output / "intfloat" / "e5") == digest_weights(tmp_path / "new")
