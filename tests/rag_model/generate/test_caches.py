"""The argument for the cache has a different name before and after transformers 5.24."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rag_model.generate.decoding import build_continuation_arguments, get_cache


class EarlierModel(nn.Module):
    """Takes the name of transformers before 5.24."""

    def forward(self, input_ids: Tensor, past_key_values: object = None, use_cache: bool = False) -> Tensor:
        return input_ids


class LaterModel(nn.Module):
    def forward(self, input_ids: Tensor, cache: object = None, use_cache: bool = False) -> Tensor:
        return input_ids


class AnyNameModel(nn.Module):
    def forward(self, input_ids: Tensor, **arguments: object) -> Tensor:
        return input_ids


@pytest.mark.parametrize(("kind", "names"), [(EarlierModel, {"past_key_values"}), (LaterModel, {"cache"})])
def test_cache_is_passed_by_the_name_that_the_model_takes(kind: type[nn.Module], names: set[str]) -> None:
    cache, module = DynamicCache(), kind()
    arguments = build_continuation_arguments(module, cache)
    assert arguments.keys() - {"use_cache"} == names
    assert arguments["use_cache"] is True
    assert all(arguments[name] is cache for name in names)
    assert module(torch.ones(1), **arguments) is not None
    assert get_cache(dict.fromkeys(names, cache)) is cache


def test_model_that_takes_any_name_gets_the_name_of_this_release() -> None:
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - a model of this release

    llama = LlamaForCausalLM.__new__(LlamaForCausalLM)
    arguments, expected = (build_continuation_arguments(model, DynamicCache()) for model in (AnyNameModel(), llama))
    assert arguments.keys() == expected.keys()
