"""The sizes of a model are those that transformers counts, and what a backward pass holds stays within the bound."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, BertModel

from rag_model.encoders.architecture import read_architecture
from rag_model.errors import InputError
from tests.fixtures.tiny import save_bert, write_json
from tests.fixtures.tiny_generators import save_bart, save_gguf, save_llama, save_t5

FAMILIES = [
    (save_bert, AutoModel, 1),
    (save_bart, AutoModelForSeq2SeqLM, 2),
    (save_t5, AutoModelForSeq2SeqLM, 2),
    (save_llama, AutoModelForCausalLM, 1),
]
SIZES = [(32, 128), (8, 512)]  # texts, and tokens of each
BACKWARD = """
import os, re, sys
import torch
from transformers import AutoModel

torch.set_num_threads(1)


def peak():  # of this process alone: what getrusage says begins with its parent's
    return 1024 * int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])


model = AutoModel.from_pretrained(sys.argv[1]).train()
model(input_ids=torch.ones(1, 2, dtype=torch.long)).last_hidden_state.sum().backward()
for size in sys.argv[2:]:
    if os.fork() == 0:  # so that what one size leaves in memory is no room for the next
        before, ids = peak(), torch.ones(*map(int, size.split("x")), dtype=torch.long)
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.sum().backward()
        print(peak() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(("save", "family", "halves"), FAMILIES, ids=["bert", "bart", "t5", "llama"])
def test_a_folder_is_as_large_as_its_model(
    save: Callable[[Path], Path], family: type, halves: int, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model")
    found, model = read_architecture(folder), family.from_pretrained(str(folder))
    config = model.config
    stored = [one.numel() for name, one in model.named_parameters() if "pooler" not in name]  # which the folder lacks
    assert found.parameters == pytest.approx(sum(stored), rel=0.01)
    assert (found.hidden, found.vocabulary) == (config.hidden_size, config.vocab_size)
    assert found.layers == halves * config.num_hidden_layers
    assert found.heads == config.num_attention_heads
    assert 0 < found.operations_per_token < 2 * found.parameters


def test_a_quantised_file_is_as_large_as_the_model_in_it(tmp_path: Path) -> None:
    found = read_architecture(save_gguf(tmp_path))
    module = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=next(tmp_path.glob("*.gguf")).name)
    assert found.parameters == sum(one.numel() for one in module.parameters())
    assert (found.layers, found.hidden) == (module.config.num_hidden_layers, module.config.hidden_size)


@pytest.mark.slow
def test_a_backward_pass_holds_no_more_than_is_said(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    BertModel(config).save_pretrained(str(tmp_path))
    code = [sys.executable, "-c", BACKWARD, str(tmp_path), *(f"{texts}x{tokens}" for texts, tokens in SIZES)]
    printed = subprocess.run(code, check=True, capture_output=True, text=True).stdout.split()
    for (texts, tokens), held in zip(SIZES, printed, strict=True):
        said = read_architecture(tmp_path).estimate_activation_bytes(texts, tokens)
        assert said / 4 < int(held) < said


@pytest.mark.parametrize("config", [{}, {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": "many"}])
def test_a_config_that_names_no_sizes_is_refused(config: dict[str, object], tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "model")
    write_json(folder / "config.json", config)
    with pytest.raises(InputError, match=r"config\.json names no "):
        read_architecture(folder)


def test_a_broken_quantised_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match=r"model\.gguf is corrupt"):
        read_architecture(tmp_path)
