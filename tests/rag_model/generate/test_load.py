"""Loading generators: families, prompt templates, and what is refused."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rag_model.corpus.records import Passage
from rag_model.encoders.architecture import read_architecture
from rag_model.encoders.spec import RECORD_FILE
from rag_model.errors import InputError, UsageError
from rag_model.generate.load import apply_chat_template, load_generator, load_generator_tokenizer
from rag_model.generate.prompts import InstructionTemplate, PaperTemplate, template_to_json
from rag_model.generate.transformer import CausalGenerator, Seq2SeqGenerator
from tests.fixtures.tiny import save_bert, write_json
from tests.fixtures.tiny_generators import save_bart, save_gguf, save_llama, save_t5

PASSAGES = [[Passage("1", "1", 1, "T", "", "text", 0, 1, "")]]


def change_settings(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    settings = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in settings.items() if value is not None})


def test_config_determines_the_family(tmp_path: Path) -> None:
    bart = load_generator(save_bart(tmp_path / "bart"), device="cpu")
    llama = load_generator(str(save_llama(tmp_path / "llama")), device="cpu")
    assert isinstance(bart, Seq2SeqGenerator)
    assert bart.prompt_template == PaperTemplate()
    assert bart.max_tokens == 256
    assert isinstance(llama, CausalGenerator)
    assert llama.prompt_template == InstructionTemplate()
    assert not llama.module.training
    assert next(llama.module.parameters()).dtype == torch.float32


def test_t5_reads_prompts_longer_than_its_config(tmp_path: Path) -> None:
    t5 = load_generator(save_t5(tmp_path), PaperTemplate(max_length=600), device="cpu")
    contexts = t5.encode_contexts(["q" * 590], PASSAGES)
    assert contexts.tokens.shape == (1, 600)
    assert torch.isfinite(t5.prefill(contexts)[0]).all()


def test_generator_without_a_pad_token_pads_with_its_end_token(tmp_path: Path) -> None:
    llama = load_generator(save_llama(tmp_path), device="cpu")
    assert llama.tokenizer.pad_token_id is None  # type: ignore[attr-defined]
    assert llama.pad_token == llama.end_token
    targets = llama.encode_targets(["a", "the answer is"])
    assert targets.tokens[0, -2:].tolist() == [llama.end_token] * 2  # the first ends the answer, the second is padding
    assert targets.mask.tolist() == [[True, True, True, False], [True] * 4]


def test_prompt_template_of_the_folder_is_the_default(tmp_path: Path) -> None:
    template = InstructionTemplate("{text} {question}", max_answer=7)
    write_json(save_llama(tmp_path, chat=True) / RECORD_FILE, {"form": template_to_json(template)})
    assert load_generator(tmp_path, device="cpu").prompt_template == template  # type: ignore[attr-defined]
    assert load_generator(tmp_path, InstructionTemplate(), device="cpu").prompt_template == InstructionTemplate()  # type: ignore[attr-defined]


def test_chat_template_without_the_message_is_refused(tmp_path: Path) -> None:
    change_settings(save_llama(tmp_path, chat=True), "tokenizer_config.json", chat_template="hello")
    with pytest.raises(UsageError, match="does not contain the message: give a template"):
        load_generator(tmp_path, device="cpu")
    assert load_generator(tmp_path, InstructionTemplate(), device="cpu").decode([]) == ""


def test_chat_template_keeps_the_text_of_a_prompt_template(tmp_path: Path) -> None:
    llama = load_generator(save_llama(tmp_path, chat=True), device="cpu")
    template = apply_chat_template(llama.tokenizer, InstructionTemplate("{question}!", max_length=99))  # type: ignore[attr-defined]
    assert template.template == "{question}!"
    assert template.max_length == 99
    assert template.after.endswith("<|im_start|>assistant\n")


def test_decoder_only_model_needs_an_instruction_template_with_room(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(UsageError, match="give an InstructionTemplate"):
        load_generator(tmp_path, PaperTemplate(), device="cpu")
    with pytest.raises(UsageError, match="no room for a prompt"):
        load_generator(tmp_path, InstructionTemplate(max_answer=256), device="cpu")


def test_folder_without_a_generator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a BertModel, which cannot generate"):
        load_generator(save_bert(tmp_path / "bert"), device="cpu")
    with pytest.raises(InputError, match="there is no model folder"):
        load_generator(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_generator(tmp_path / "empty")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = save_llama(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 tensors, the first is model\.norm\.weight"):
        load_generator(tmp_path, device="cpu")


def test_truncated_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    weights = save_bart(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="is truncated"):
        load_generator(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights, which can execute code"):
        load_generator(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_corrupt_file_is_refused_with_its_folder(tmp_path: Path, name: str) -> None:
    (save_bart(tmp_path) / name).write_text('{"model_type": ')
    with pytest.raises(InputError, match=str(tmp_path)):
        load_generator(tmp_path, device="cpu")


def test_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    change_settings(save_llama(tmp_path), "tokenizer_config.json", eos_token=None)
    with pytest.raises(InputError, match="has no eos_token"):
        load_generator(tmp_path, device="cpu")


def test_dtype_is_applied_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path)
    assert next(load_generator(tmp_path, device="cpu", dtype="bfloat16").module.parameters()).dtype == torch.bfloat16
    with pytest.raises(UsageError, match="dtype 'float17' is unknown"):
        load_generator(tmp_path, device="cpu", dtype="float17")
    with pytest.raises(UsageError, match="device 'gpu' is unknown"):
        load_generator(tmp_path, device="gpu")


def test_gguf_file_alone_is_a_generator(tmp_path: Path) -> None:
    generator = load_generator(save_gguf(tmp_path), device="cpu")
    assert isinstance(generator, CausalGenerator)
    assert generator.max_tokens == 256
    contexts, targets = generator.encode_contexts(["who"], PASSAGES), generator.encode_targets(["the é 日本"])
    assert generator.decode(targets.tokens[0].tolist()) == "the é 日本"
    expected = generator.logits(contexts, targets)[:, 0, 0]
    torch.testing.assert_close(generator.prefill(contexts)[0], expected, atol=1e-4, rtol=1e-4)


def test_generator_from_a_gguf_file_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    generator = load_generator(save_gguf(tmp_path / "gguf"), InstructionTemplate(), device="cpu")
    assert isinstance(generator, CausalGenerator)
    generator.module.save_pretrained(str(tmp_path / "saved"))
    generator.tokenizer.save_pretrained(str(tmp_path / "saved"))
    saved = load_generator(tmp_path / "saved", InstructionTemplate(), device="cpu")
    contexts, targets = generator.encode_contexts(["who"], PASSAGES), generator.encode_targets(["the"])
    torch.testing.assert_close(saved.logits(contexts, targets), generator.logits(contexts, targets))


def test_several_and_truncated_gguf_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InputError, match="has 2 GGUF files"):
        load_generator(tmp_path)
    (tmp_path / "b.gguf").unlink()
    with pytest.raises(InputError, match="it ends inside its header"):
        load_generator(tmp_path, device="cpu")


def write_gguf(folder: Path, key: str, number: int) -> Path:
    """Write a small GGUF file whose 32-bit number `key` is changed."""
    path = save_gguf(folder) / "tiny.gguf"
    content = bytearray(path.read_bytes())
    start = content.index(key.encode()) + len(key) + 4
    content[start : start + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        ("llama.block_count", 100_000, "its 'llama.block_count' is 100,000; at most 12 are possible"),
        ("llama.attention.head_count", 1 << 30, "at most 10,000 are possible"),
        ("llama.context_length", 1 << 31, "at most 16,777,216 are possible"),
        ("llama.embedding_length", 1 << 31, "at most 16,777,216 are possible"),
    ],
)
def test_gguf_file_with_huge_numbers_is_refused_before_loading(
    tmp_path: Path, key: str, number: int, message: str
) -> None:
    for read in (load_generator, load_generator_tokenizer, read_architecture):
        with pytest.raises(InputError, match=re.escape(message)):
            read(write_gguf(tmp_path, key, number))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<IQQ", 3, 1 << 60, 1), "tensors and 1 keys"),
        (struct.pack("<IQQ", 3, 0, 1 << 60), "keys"),
        (struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "a text has"),
        (struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"a", 9, 0, 1 << 60), "more than 8,388,608 items"),
        (struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"a", 9, 9, 1), "unknown type 9"),
        (struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcIQQIQ", 1, b"a", 2, 1 << 30, 1 << 30, 0, 0), "values in"),
        (struct.pack(">IQQ", 3, 0, 0), "not a GGUF file of version 2 or 3"),
    ],
)
def test_gguf_file_with_wrong_lengths_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + header)
    with pytest.raises(InputError, match=f"is corrupt .*{message}"):
        load_generator(tmp_path, device="cpu")
