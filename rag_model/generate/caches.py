"""Key-value caches of transformers: pass them on, and select rows without changing the source.

Since transformers 5.24 arguments and results are named `cache`, before `past_key_values`; both are
supported.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from functools import cache as cache_results
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast

_AnyCache = TypeVar("_AnyCache", bound=Cache)
_ARGUMENT_NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before
_OUTPUT_FIELDS = {field.name for field in fields(CausalLMOutputWithPast)}  # of this release


def build_continuation_arguments(module: Any, cache: Cache) -> dict[str, Any]:
    """Return the arguments that make a transformers model continue from `cache`."""
    return {_find_argument_name(type(module).forward): cache, "use_cache": True}


def send_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a GPU receives it without the host waiting for earlier work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache_results
def _find_argument_name(forward: Callable[..., Any]) -> str:
    """Return the argument name in a method's signature, or this release's name if the method takes
    any keyword.
    """
    return next(
        name for names in (signature(forward).parameters, _OUTPUT_FIELDS) for name in _ARGUMENT_NAMES if name in names
    )


def get_cache(outputs: Mapping[str, Any]) -> Any:
    """Return the cache of a transformers model output."""
    return next(outputs[name] for name in _ARGUMENT_NAMES if name in outputs)


def select_cache_rows(cache: _AnyCache, rows: Tensor, *, same_contexts: bool = False) -> _AnyCache:
    """Return a cache of `rows`, (m,) int64; continuing from it does not change `cache`.

    With `same_contexts` row i of the result has the same context as row i of `cache`, as when a
    beam is reordered. Then the cross-attention keys and values, which are most of a cache, are not
    copied.
    """
    selected: Any = _copy_cache(cache)
    (selected.self_attention_cache if same_contexts else selected).reorder_cache(rows)
    return selected  # type: ignore[no-any-return]


def _copy_cache(cache: Any) -> Any:
    """Return a shallow copy with the same tensors; a layer that appends tokens allocates new
    tensors.
    """
    copied = copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        copied.self_attention_cache = _copy_cache(cache.self_attention_cache)
        copied.cross_attention_cache = _copy_cache(cache.cross_attention_cache)
        copied.is_updated = dict(cache.is_updated)
    else:
        copied.layers = [copy(layer) for layer in cache.layers]
    return copied
