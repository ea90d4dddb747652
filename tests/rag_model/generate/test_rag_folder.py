"""RAG models as folders: written, read back, and opened by transformers, with the same losses and gradients."""

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
    made = {name: save(base / name) for name, save in SAVE.items()}
    return {**made, "dpr": save_dpr(base / "dpr"), "bert": save_bert(base / "bert")}


def rag_of(parts: dict[str, Path], question: str, family: str, settings: RagSettings, spec: EncoderSpec | None) -> Rag:
    encoder = TrainableEncoder.load(parts[question], "question", spec, device="cpu")
    form = (
        PaperTemplate(prefix="answer: ", title_sep=" | ", doc_sep=" ? ", max_length=90) if family != "llama" else None
    )
    return Rag(encoder, load_generator(parts[family], form, device="cpu"), settings).eval()


def losses(rag: Rag) -> torch.Tensor:
    vectors = torch.linspace(-1, 1, 2 * 2 * rag.question.dim).view(2, 2, -1).cos()
    contexts, targets = rag.generator.encode_contexts(QUESTIONS, PASSAGES), rag.generator.encode_targets(ANSWERS)
    return loss_of(rag, vectors, contexts, targets)


def loss_of(rag: Rag, vectors: torch.Tensor, contexts: Contexts, targets: Targets) -> torch.Tensor:
    return rag.loss((vectors * rag.embed_questions(QUESTIONS)[:, None]).sum(-1), contexts, targets)


CASES = [
    ("dpr", "bart", None, True),
    ("dpr", "t5", None, True),
    ("bert", "bart", CLS, True),  # a DPR encoder without a projection
    ("bert", "t5", None, False),  # the mean of all tokens: transformers' layout cannot say it
    ("dpr", "llama", None, False),
]


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize(("question", "family", "spec", "whole"), CASES)
def test_what_is_saved_is_loaded(
    parts: dict[str, Path],
    tmp_path: Path,
    kind: Variant,
    question: str,
    family: str,
    spec: EncoderSpec | None,
    whole: bool,
) -> None:
    rag = rag_of(parts, question, family, RagSettings(kind, k=2, label_smoothing=0.1, exclude_bos=True), spec)
    before = {name: tensor.clone() for name, tensor in rag.state_dict().items()}
    asks = compute_space(parts["bert"], CLS)
    save_rag(rag, tmp_path / "rag", asks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rag.state_dict().items()), "saving changes nothing"
    assert (tmp_path / "rag" / "config.json").is_file() == whole
    again = load_rag(tmp_path / "rag", device="cpu")
    assert (again.settings, again.generator.prompt_template) == (rag.settings, rag.generator.prompt_template)
    assert again.question.spec == rag.question.spec
    assert read_declared_space(again.question.folder) == asks
    torch.testing.assert_close(losses(again), losses(rag), rtol=0, atol=0)
    save_rag(again, tmp_path / "twice", asks)
    torch.testing.assert_close(losses(load_rag(tmp_path / "twice", device="cpu")), losses(rag), rtol=0, atol=0)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".bin", ".pt", ".pkl"}]


@pytest.mark.parametrize(("question", "family", "spec", "whole"), [case for case in CASES if case[3]])
@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_transformers_opens_it_and_finds_the_same_loss(
    parts: dict[str, Path],
    tmp_path: Path,
    kind: Variant,
    question: str,
    family: str,
    spec: EncoderSpec | None,
    whole: bool,
) -> None:
    rag = rag_of(parts, question, family, RagSettings(kind, k=2), spec)
    save_rag(rag, tmp_path)
    for opened in ORACLES.values():
        model, loading = opened.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(loading.values())
        assert model.config.n_docs == 2
    oracle = ORACLES[kind].from_pretrained(tmp_path).eval()
    oracle.config.generator.bos_token_id = None  # RagSequenceForGeneration asks for it; T5 has none
    oracle.generator.config.bos_token_id = None
    vectors = torch.randn(2, 2, rag.question.dim, generator=torch.Generator().manual_seed(1))
    contexts, targets = rag.generator.encode_contexts(QUESTIONS, PASSAGES), rag.generator.encode_targets(["42", "no"])
    inputs = AutoTokenizer.from_pretrained(tmp_path / "question_encoder_tokenizer")(
        QUESTIONS, padding=True, return_tensors="pt"
    )
    asked = oracle.question_encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
    torch.testing.assert_close(asked, rag.embed_questions(QUESTIONS), rtol=1e-5, atol=1e-5)
    start = torch.full((2, 1), oracle.generator.config.decoder_start_token_id)
    found = oracle(
        context_input_ids=contexts.tokens,
        context_attention_mask=contexts.mask.long(),
        doc_scores=(vectors @ asked[..., None])[..., 0],
        labels=torch.cat([start, targets.tokens], 1),
    ).loss
    torch.testing.assert_close(loss_of(rag, vectors, contexts, targets), found, rtol=1e-5, atol=1e-4)


def test_a_folder_of_transformers_alone_is_read(parts: dict[str, Path], tmp_path: Path) -> None:
    """As facebook/rag-token-nq: no record of ours, old tokenizer files."""
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
    actual = Rag(
        TrainableEncoder.load(parts["dpr"], device="cpu"),
        load_generator(parts["bart"], rag.generator.prompt_template, device="cpu"),
        rag.settings,
    )
    torch.testing.assert_close(losses(rag), losses(actual.eval()), rtol=0, atol=0)


def test_each_half_of_a_plain_folder_opens_by_itself(parts: dict[str, Path], tmp_path: Path) -> None:
    rag = rag_of(parts, "bert", "t5", RagSettings("token", temperature=0.1), None)
    asks = compute_space(parts["bert"], rag.question.spec)
    save_rag(rag, tmp_path, asks)
    encoder = Encoder.load(tmp_path / "question", "question", device="cpu", dtype="float32")
    assert encoder.space() == asks
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(encoder.encode_questions(QUESTIONS)), rag.embed_questions(QUESTIONS)
        )
    AutoModel.from_pretrained(tmp_path / "question")
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "generator")
    assert AutoTokenizer.from_pretrained(tmp_path / "generator")("the")["input_ids"]


@pytest.mark.parametrize(
    ("harm", "why"),
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
def test_what_is_broken_is_one_sentence(
    parts: dict[str, Path], tmp_path: Path, harm: Callable[[Path], Any], why: str
) -> None:
    save_rag(rag_of(parts, "dpr", "bart", RagSettings(), None), tmp_path)
    harm(tmp_path)
    with pytest.raises(InputError, match=why):
        load_rag(tmp_path, device="cpu")


def test_only_a_trainable_encoder_is_saved(parts: dict[str, Path], tmp_path: Path) -> None:
    generator = load_generator(parts["bart"], device="cpu")
    with pytest.raises(UsageError, match="of type Linear"):
        save_rag(Rag(torch.nn.Linear(1, 1), generator), tmp_path)


def test_the_record_is_json_that_people_read(parts: dict[str, Path], tmp_path: Path) -> None:
    save_rag(rag_of(parts, "dpr", "bart", RagSettings("token", k=7), None), tmp_path)
    record = json.loads((tmp_path / "bookwheel.json").read_text())
    assert (record["settings"]["kind"], record["settings"]["k"]) == ("token", 7)
    assert (record["form"]["form"], record["form"]["doc_sep"]) == ("paper", " ? ")
