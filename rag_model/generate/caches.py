"""Key-value caches: what transformers calls them, and selecting rows into a new cache that leaves the source unchanged.

Arguments and results are named `cache` since transformers 5.24, and were named `past_key_values`; both are supported.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from functools import cache as cache_results
from inspect import signature
from typing import Any, TypeVar

from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithPast

_AnyCache = TypeVar("_AnyCache", bound=Cache)
_NAMES = ("cache", "past_key_values")  # now, and before
_NAMED = {one.name for one in fields(CausalLMOutputWithPast)}  # by this release


def continuing(module: Any, cache: Cache) -> dict[str, Any]:
    """Return the arguments with which a transformers model continues from `cache`."""
    return {_name(type(module).forward): cache, "use_cache": True}


@cache_results
def _name(forward: Callable[..., Any]) -> str:
    """Return the name that a model's method knows, or that of this release where it takes any name."""
    return next(name for names in (signature(forward).parameters, _NAMED) for name in _NAMES if name in names)


def cache_in(found: Mapping[str, Any]) -> Any:
    """Return the cache in a transformers model's result."""
    return next(found[name] for name in _NAMES if name in found)


def chosen(cache: _AnyCache, rows: Tensor, *, same_contexts: bool = False) -> _AnyCache:
    """Return a cache of `rows`, (m,) int64; continuing from it does not change `cache`.

    `same_contexts`: row i of the result has the same context as row i has now, as when a beam is reordered. The
    cross-attention keys and values, which are most of a cache, are then not copied.
    """
    found: Any = _copied(cache)
    (found.self_attention_cache if same_contexts else found).reorder_cache(rows)
    return found  # type: ignore[no-any-return]


def _copied(cache: Any) -> Any:
    """Return a cache that holds the same tensors; a layer that appends tokens allocates new tensors."""
    found = copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        found.self_attention_cache = _copied(cache.self_attention_cache)
        found.cross_attention_cache = _copied(cache.cross_attention_cache)
        found.is_updated = dict(cache.is_updated)
    else:
        found.layers = [copy(layer) for layer in cache.layers]
    return found
