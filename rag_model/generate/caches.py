"""Keys and values of the tokens read so far: rows of them chosen anew, with those they came from left as they were."""

from copy import copy
from typing import Any, TypeVar

from torch import Tensor
from transformers import Cache, EncoderDecoderCache

_AnyCache = TypeVar("_AnyCache", bound=Cache)


def chosen(cache: _AnyCache, rows: Tensor, *, same_contexts: bool = False) -> _AnyCache:
    """Return a cache of `rows`, (m,) int64; going on from it changes nothing in `cache`.

    `same_contexts`: row i of the result reads the context that row i reads now, as when a beam is put in order. What a
    decoder has read of its context, which is most of a cache, then stays in place.
    """
    found: Any = _copied(cache)
    (found.self_attention_cache if same_contexts else found).reorder_cache(rows)
    return found  # type: ignore[no-any-return]


def _copied(cache: Any) -> Any:
    """Return a cache that holds the same tensors; a layer that grows makes new ones."""
    found = copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        found.self_attention_cache = _copied(cache.self_attention_cache)
        found.cross_attention_cache = _copied(cache.cross_attention_cache)
        found.is_updated = dict(cache.is_updated)
    else:
        found.layers = [copy(layer) for layer in cache.layers]
    return found
