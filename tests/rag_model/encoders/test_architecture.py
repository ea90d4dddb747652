"""Sizes of models equal those of transformers, and a backward pass allocates at most the estimated memory."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
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


@pytest.mark.parametrize(("save", "family", "halves"), FAMILIES, ids=["bert", "bart", "t5", "llama"])
def test_architecture_has_the_sizes_of_the_model(
    save: Callable[[Path], Path], family: type, halves: int, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model")
    architecture, model = read_architecture(folder), family.from_pretrained(str(folder))
    config = model.config
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    n_stored = sum(size for name, size in sizes.items() if "pooler" not in name)  # the folder has no pooler
    assert architecture.parameters == pytest.approx(n_stored, rel=0.01)
    assert (architecture.hidden, architecture.vocabulary) == (config.hidden_size, config.vocab_size)
    assert architecture.layers == halves * config.num_hidden_layers
    assert architecture.heads == config.num_attention_heads
    assert 0 < architecture.operations_per_token < 2 * architecture.parameters


def test_architecture_of_a_quantized_file_has_the_sizes_of_the_model(tmp_path: Path) -> None:
    architecture = read_architecture(save_gguf(tmp_path))
    module = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=next(tmp_path.glob("*.gguf")).name)
    assert architecture.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert (architecture.layers, architecture.hidden) == (module.config.num_hidden_layers, module.config.hidden_size)


@pytest.mark.parametrize(("texts", "tokens"), [(32, 128), (8, 512)])
def test_a_backward_pass_allocates_no_more_than_is_estimated(texts: int, tokens: int, tmp_path: Path) -> None:
    config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    model = BertModel(config).train()
    model.save_pretrained(str(tmp_path))
    token_ids = torch.ones(texts, tokens, dtype=torch.long)
    # Counts of torch's allocator, because the peak of a process differs by a third from run to run.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids)).last_hidden_state.sum().backward()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    estimate = read_architecture(tmp_path).estimate_activation_bytes(texts, tokens)
    assert estimate / 4 < peak < estimate


@pytest.mark.parametrize("config", [{}, {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": "many"}])
def test_a_config_that_names_no_sizes_is_refused(config: dict[str, object], tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "model")
    write_json(folder / "config.json", config)
    with pytest.raises(InputError, match=r"config\.json has no "):
        read_architecture(folder)


def test_a_broken_quantised_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match=r"model\.gguf is corrupt"):
        read_architecture(tmp_path)
