"""RAG models as folders: saved, loaded, and opened by transformers, with equal losses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DPRConfig,
    DPRQuestionEncoder,
    RagConfig,
    RagSequenceForGeneration,
    RagTokenForGeneration,
)

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import compute_space, read_declared_space
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import InputError, UsageError
from rag_model.generate.generator import Contexts, Targets
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate
from rag_model.generate.rag import Rag, RagSettings, Variant
from rag_model.generate.rag_folder import load_rag, save_rag
from tests.fixtures.tiny import SHAPE, add_tokenizer, save_bert
from tests.fixtures.tiny_generators import save_bart, save_t5
from tests.fixtures.tiny_generators import save_llama as save_llama_

CLS = EncoderSpec(pooling="cls", normalize=False, max_length=64)
QUESTIONS = ["who wrote the book", "日本 ?"]
PASSAGES = [[Passage("1", "1", 0, title, "", text, 0, 2, "") for title, text in (("A", "bc"), ("D", "e f"))]] * 2
ANSWERS = ["the answer is 42", "no"]
ORACLES: dict[Variant, Any] = {"sequence": RagSequenceForGeneration, "token": RagTokenForGeneration}
SAVE: dict[str, Callable[[Path], Path]] = {"bart": save_bart, "t5": save_t5, "llama": save_llama_}


def save_dpr(folder: Path) -> Path:
    torch.manual_seed(5)
    DPRQuestionEncoder(DPRConfig(**SHAPE, projection_dim=16)).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("parts")
    generators = {name: save(base / name) for name, save in SAVE.items()}
    return {**generators, "dpr": save_dpr(base / "dpr"), "bert": save_bert(base / "bert")}


def load(parts: dict[str, Path], question: str, family: str, settings: RagSettings, spec: EncoderSpec | None) -> Rag:
    encoder = TrainableEncoder.load(parts[question], "question", spec, device="cpu")
    paper = PaperTemplate(prefix="answer: ", title_sep=" | ", doc_sep=" ? ", max_length=90)
    template = None if family == "llama" else paper
    return Rag(encoder, load_generator(parts[family], template, device="cpu"), settings).eval()


def compute_example_loss(rag: Rag) -> torch.Tensor:
    vectors = torch.linspace(-1, 1, 2 * 2 * rag.question.dim).view(2, 2, -1).cos()
    contexts, targets = rag.generator.encode_contexts(QUESTIONS, PASSAGES), rag.generator.encode_targets(ANSWERS)
    return compute_loss(rag, vectors, contexts, targets)


def compute_loss(rag: Rag, vectors: torch.Tensor, contexts: Contexts, targets: Targets) -> torch.Tensor:
    return rag.loss((vectors * rag.embed_questions(QUESTIONS)[:, None]).sum(-1), contexts, targets)


CASES = [
    ("dpr", "bart", None, True),
    ("dpr", "t5", None, True),
    ("bert", "bart", CLS, True),  # a DPR encoder without a projection
    ("bert", "t5", None, False),  # mean pooling has no place in transformers' layout
    ("dpr", "llama", None, False),
]


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize(("question", "family", "spec", "standard"), CASES)
def test_saved_model_is_loaded_with_equal_losses(
    parts: dict[str, Path],
    tmp_path: Path,
    kind: Variant,
    question: str,
    family: str,
    spec: EncoderSpec | None,
    standard: bool,
) -> None:
    rag = load(parts, question, family, RagSettings(kind, k=2, label_smoothing=0.1, exclude_bos=True), spec)
    initial = {name: tensor.clone() for name, tensor in rag.state_dict().items()}
    passage_space = compute_space(parts["bert"], CLS)
    save_rag(rag, tmp_path / "rag", passage_space)
    assert all(torch.equal(tensor, initial[name]) for name, tensor in rag.state_dict().items())
    assert (tmp_path / "rag" / "config.json").is_file() == standard
    loaded = load_rag(tmp_path / "rag", device="cpu")
    assert (loaded.settings, loaded.generator.prompt_template) == (rag.settings, rag.generator.prompt_template)
    assert loaded.question.spec == rag.question.spec
    assert read_declared_space(loaded.question.folder) == passage_space
    assert torch.equal(compute_example_loss(loaded), compute_example_loss(rag))
    save_rag(loaded, tmp_path / "twice", passage_space)
    saved_twice = load_rag(tmp_path / "twice", device="cpu")
    assert torch.equal(compute_example_loss(saved_twice), compute_example_loss(rag))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".bin", ".pt", ".pkl"}]


@pytest.mark.parametrize(("question", "family", "spec", "standard"), [case for case in CASES if case[3]])
@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_transformers_opens_the_folder_with_an_equal_loss(
    parts: dict[str, Path],
    tmp_path: Path,
    kind: Variant,
    question: str,
    family: str,
    spec: EncoderSpec | None,
    standard: bool,
) -> None:
    rag = load(parts, question, family, RagSettings(kind, k=2), spec)
    save_rag(rag, tmp_path)
    for model_class in ORACLES.values():
        model, loading = model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(loading.values())
        assert model.config.n_docs == 2
    oracle = ORACLES[kind].from_pretrained(tmp_path).eval()
    oracle.config.generator.bos_token_id = None  # RagSequenceForGeneration reads it, and T5 has none
    oracle.generator.config.bos_token_id = None
    vectors = torch.randn(2, 2, rag.question.dim, generator=torch.Generator().manual_seed(1))
    contexts, targets = rag.generator.encode_contexts(QUESTIONS, PASSAGES), rag.generator.encode_targets(["42", "no"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "question_encoder_tokenizer")
    inputs = tokenizer(QUESTIONS, padding=True, return_tensors="pt")
    query_vectors = oracle.question_encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
    torch.testing.assert_close(query_vectors, rag.embed_questions(QUESTIONS), rtol=1e-5, atol=1e-5)
    start = torch.full((2, 1), oracle.generator.config.decoder_start_token_id)
    expected = oracle(
        context_input_ids=contexts.tokens,
        context_attention_mask=contexts.mask.long(),
        doc_scores=(vectors @ query_vectors[..., None])[..., 0],
        labels=torch.cat([start, targets.tokens], 1),
    ).loss
    torch.testing.assert_close(compute_loss(rag, vectors, contexts, targets), expected, rtol=1e-5, atol=1e-4)


def test_folder_saved_by_transformers_is_loaded(parts: dict[str, Path], tmp_path: Path) -> None:
    """Like facebook/rag-token-nq, it has no bookwheel.json, and older tokenizer files."""
    encoder = DPRQuestionEncoder.from_pretrained(parts["dpr"])
    generator = AutoModelForSeq2SeqLM.from_pretrained(parts["bart"])
    config = RagConfig.from_question_encoder_generator_configs(
        encoder.config, generator.config, n_docs=3, title_sep=" ~ ", doc_sep=" @ ", max_combined_length=80
    )
    RagTokenForGeneration(config=config, question_encoder=encoder, generator=generator).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(parts["dpr"]).save_pretrained(tmp_path / "question_encoder_tokenizer")
    AutoTokenizer.from_pretrained(parts["bart"]).save_pretrained(tmp_path / "generator_tokenizer")
    rag = load_rag(tmp_path, device="cpu")
    assert rag.settings == RagSettings("token", k=3)
    assert rag.generator.prompt_template == PaperTemplate(title_sep=" ~ ", doc_sep=" @ ", max_length=80)
    assert (rag.question.spec.pooling, rag.question.spec.normalize) == ("cls", False)
    with pytest.raises(InputError, match="does not declare its passage encoder"):
        rag.question.space()
    expected = Rag(
        TrainableEncoder.load(parts["dpr"], device="cpu"),
        load_generator(parts["bart"], rag.generator.prompt_template, device="cpu"),
        rag.settings,
    )
    torch.testing.assert_close(compute_example_loss(rag), compute_example_loss(expected.eval()), rtol=0, atol=0)


def test_encoder_and_generator_of_a_folder_open_separately(parts: dict[str, Path], tmp_path: Path) -> None:
    rag = load(parts, "bert", "t5", RagSettings("token", temperature=0.1), None)
    passage_space = compute_space(parts["bert"], rag.question.spec)
    save_rag(rag, tmp_path, passage_space)
    encoder = Encoder.load(tmp_path / "question", "question", device="cpu", dtype="float32")
    assert encoder.space() == passage_space
    with torch.no_grad():
        query_vectors = torch.from_numpy(encoder.encode_questions(QUESTIONS))
        torch.testing.assert_close(query_vectors, rag.embed_questions(QUESTIONS))
    AutoModel.from_pretrained(tmp_path / "question")
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "generator")
    assert AutoTokenizer.from_pretrained(tmp_path / "generator")("the")["input_ids"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "only pickled weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{"), "corrupt"),
        (lambda folder: (folder / "bookwheel.json").write_text("{"), "corrupt"),
        (lambda folder: (folder / "bookwheel.json").write_text('{"settings": {}}'), "corrupt"),
        (lambda folder: (folder / "bookwheel.json").write_text('{"settings": {"x": 1}, "form": 1}'), "corrupt"),
        (lambda folder: (folder / "generator_tokenizer").rename(folder / "elsewhere"), "is not a complete RAG model"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'),
            "contains a bert model.* --reader concat",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("*.json")], "contains no RAG model"),
    ],
)
def test_damaged_folder_is_refused(
    parts: dict[str, Path], tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    save_rag(load(parts, "dpr", "bart", RagSettings(), None), tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message):
        load_rag(tmp_path, device="cpu")


def test_model_with_another_encoder_is_not_saved(parts: dict[str, Path], tmp_path: Path) -> None:
    generator = load_generator(parts["bart"], device="cpu")
    with pytest.raises(UsageError, match="of type Linear"):
        save_rag(Rag(torch.nn.Linear(1, 1), generator), tmp_path)


def test_record_is_json(parts: dict[str, Path], tmp_path: Path) -> None:
    save_rag(load(parts, "dpr", "bart", RagSettings("token", k=7), None), tmp_path)
    record = json.loads((tmp_path / "bookwheel.json").read_text())
    assert (record["settings"]["kind"], record["settings"]["k"]) == ("token", 7)
    assert (record["form"]["form"], record["form"]["doc_sep"]) == ("paper", " ? ")
