"""Caches under both names that transformers has for them."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rag_model.generate.decoding import build_continuation_arguments, get_cache


class Earlier(nn.Module):
    """Knows the name of before transformers 5.24."""

    def forward(self, input_ids: Tensor, past_key_values: object = None, use_cache: bool = False) -> Tensor:
        return input_ids


class Later(nn.Module):
    def forward(self, input_ids: Tensor, cache: object = None, use_cache: bool = False) -> Tensor:
        return input_ids


class AnyName(nn.Module):
    def forward(self, input_ids: Tensor, **given: object) -> Tensor:
        return input_ids


@pytest.mark.parametrize(("kind", "names"), [(Earlier, {"past_key_values"}), (Later, {"cache"})])
def test_a_model_continues_by_the_name_that_it_knows(kind: type[nn.Module], names: set[str]) -> None:
    cache, module = DynamicCache(), kind()
    given = build_continuation_arguments(module, cache)
    assert given.keys() - {"use_cache"} == names
    assert given["use_cache"] is True
    assert all(given[name] is cache for name in names)
    assert module(torch.ones(1), **given) is not None
    assert get_cache(dict.fromkeys(names, cache)) is cache


def test_a_model_that_takes_any_name_is_given_the_one_of_this_release() -> None:
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - a model of this release

    (name,) = build_continuation_arguments(AnyName(), DynamicCache()).keys() - {"use_cache"}
    assert {name} == build_continuation_arguments(LlamaForCausalLM.__new__(LlamaForCausalLM), DynamicCache()).keys() - {
        "use_cache"
    }
