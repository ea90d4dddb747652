"""The layers of BERT and RoBERTa for inference, without transformers: bit for bit what its classes compute.

Most encoders are one of the two. transformers takes longer to import than torch, and its classes take nearly twice the
time of their own kernels for a single question. What is not exactly such an encoder is left to it.

Devlin et al. 2018 (arXiv 1810.04805); Liu et al. 2019 (arXiv 1907.11692), whose positions begin behind the padding's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from rag_model.encoders.batches import STEADY_TOKENS
from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.weights import StoredTensor, canonical_names, stored_tensors

_BERT, _ROBERTA = ("bert", "dpr"), ("roberta", "xlm-roberta", "camembert")  # transformers' kinds of models
_PADDING = dict.fromkeys(_BERT, 0) | dict.fromkeys(_ROBERTA, 1)  # default ids
_SIZES = {  # fields of `BertShape`, and their names in a config
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "words": "vocab_size",
    "positions": "max_position_embeddings",
    "kinds": "type_vocab_size",
}
_PLAIN: Mapping[str, tuple[Any, ...]] = {  # what a config may say of such a model
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "attn_implementation": ("sdpa", None),
    "_attn_implementation": ("sdpa", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "projection_dim": (0, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_PARTS: Mapping[str, tuple[str, ...]] = {  # of a layer as `_Layer` has them: sizes of what each gives and takes
    "attention.self.query": ("hidden", "hidden"),
    "attention.self.key": ("hidden", "hidden"),
    "attention.self.value": ("hidden", "hidden"),
    "attention.output.dense": ("hidden", "hidden"),
    "attention.output.LayerNorm": ("hidden",),
    "intermediate.dense": ("inner", "hidden"),
    "output.dense": ("hidden", "inner"),
    "output.LayerNorm": ("hidden",),
}
_TABLES = {  # sizes by the names of the tensors
    "embeddings.word_embeddings": ("words", "hidden"),
    "embeddings.position_embeddings": ("positions", "hidden"),
    "embeddings.token_type_embeddings": ("kinds", "hidden"),
}
_NORM = "embeddings.LayerNorm"


@dataclass(frozen=True, slots=True)
class BertShape:
    """The numbers of such an encoder."""

    layers: int
    heads: int
    hidden: int
    inner: int
    words: int
    positions: int
    kinds: int
    epsilon: float  # of the layer norms
    pad_id: int
    behind_padding: bool  # positions begin at `pad_id` + 1

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Read the config of a folder; None: it is another kind of model, or says more than these layers do.

        Raises:
            InputError: the config is missing or corrupt.
        """
        config = read_object(folder / CONFIG)
        kind = str(config.get("model_type"))
        if kind not in _PADDING or any(config.get(key, known[0]) not in known for key, known in _PLAIN.items()):
            return None
        sizes: dict[str, Any] = {name: config.get(key) for name, key in _SIZES.items()}
        pad_id, epsilon = config.get("pad_token_id", _PADDING[kind]), config.get("layer_norm_eps", 1e-12)
        if any(type(size) is not int for size in (*sizes.values(), pad_id)) or type(epsilon) is not float:
            return None
        shape = cls(**sizes, epsilon=epsilon, pad_id=pad_id, behind_padding=kind in _ROBERTA)
        return shape if min(*sizes.values(), pad_id + 1) > 0 and shape.hidden % shape.heads == 0 else None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and sizes of all tensors, as `canonical_names` has them."""
        for name, table in _TABLES.items():
            yield f"{name}.weight", self._sizes(table)
        parts = {f"encoder.layer.{n}.{name}": sizes for n in range(self.layers) for name, sizes in _PARTS.items()}
        for name, sizes in {_NORM: ("hidden",), **parts}.items():
            yield f"{name}.weight", self._sizes(sizes)
            yield f"{name}.bias", self._sizes(sizes[:1])

    def _sizes(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in names)


@dataclass(frozen=True, slots=True)
class _Affine:
    """A weight and a bias: of a linear map, or of a layer norm."""

    weight: Tensor
    bias: Tensor

    def map(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, epsilon: float) -> Tensor:
        return functional.layer_norm(x, self.bias.shape, self.weight, self.bias, epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Attention and a feed-forward part, each added to its input and normalised."""

    query: _Affine
    key: _Affine
    value: _Affine
    attended: _Affine
    attended_norm: _Affine
    wide: _Affine
    narrow: _Affine
    narrow_norm: _Affine

    def __call__(self, x: Tensor, mask: Tensor | None, shape: BertShape) -> Tensor:
        query, key, value = (one.map(x) for one in (self.query, self.key, self.value))  # (b, t, h)
        return self._rest(_attention(query, key, value, mask, shape.heads), x, shape.epsilon)

    def packed(self, x: Tensor, sizes: Sequence[tuple[int, int]], shape: BertShape) -> Tensor:
        """Do the same for (n, h) rows: groups of b texts of t tokens, and behind them rows that no text attends to.

        `STEADY_TOKENS` rows are multiplied at a time, which keeps the feed-forward part's numbers in the cache.
        """
        pieces = torch.split(x, STEADY_TOKENS)
        parts = (self.query, self.key, self.value)
        whole = [torch.cat([part.map(piece) for piece in pieces]) for part in parts]  # each (n, h)
        seen, start = torch.zeros_like(x), 0
        for b, t in sizes:
            own = slice(start, start := start + b * t)
            query, key, value = (one[own].view(b, t, shape.hidden) for one in whole)  # (b t, h) -> (b, t, h)
            seen[own] = _attention(query, key, value, None, shape.heads).flatten(0, 1)  # (b, t, h) -> (b t, h)
        both = zip(torch.split(seen, STEADY_TOKENS), pieces, strict=True)
        return torch.cat([self._rest(attended, piece, shape.epsilon) for attended, piece in both])

    def _rest(self, seen: Tensor, x: Tensor, epsilon: float) -> Tensor:
        x = self.attended_norm.norm(self.attended.map(seen) + x, epsilon)
        return self.narrow_norm.norm(self.narrow.map(functional.gelu(self.wide.map(x))) + x, epsilon)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, heads: int) -> Tensor:
    """Return what each token sees, (b, t, h), by queries, keys and values of (b, t, h)."""
    b, t, h = query.shape
    split = (b, t, heads, h // heads)
    query, key, value = (one.view(split).transpose(1, 2) for one in (query, key, value))  # (b, heads, t, h / heads)
    seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=split[-1] ** -0.5)
    return seen.transpose(1, 2).reshape(b, t, h)  # (b, heads, t, h / heads) -> (b, t, h)


@dataclass(frozen=True, slots=True)
class Bert:
    """Token ids to hidden states; make it with `load`."""

    shape: BertShape
    words: Tensor  # (V, h)
    positions: Tensor  # (p, h)
    kind: Tensor  # (h,) of texts of the first kind: bi-encoders give no other
    norm: _Affine
    layers: tuple[_Layer, ...]

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self | None:
        """Load the encoder of a folder; None: it is of another kind, or its tensors are there twice or do not fit.

        Raises:
            InputError: a file is missing or corrupt.
        """
        shape = BertShape.of(folder)
        if shape is None:
            return None
        stored = canonical_names(stored_tensors(folder))
        wanted = dict(shape.tensors())
        if any(name not in stored or not stored[name].fits(sizes) for name, sizes in wanted.items()):
            return None
        if any(name.partition(".")[2] in wanted for name in stored):  # as well with a prefix: which are meant?
            return None
        return cls._of(shape, {name: _tensor(stored[name], device, dtype) for name in wanted})

    @classmethod
    def _of(cls, shape: BertShape, tensors: Mapping[str, Tensor]) -> Self:
        def part(name: str) -> _Affine:
            return _Affine(tensors[f"{name}.weight"], tensors[f"{name}.bias"])

        layers = (_Layer(*(part(f"encoder.layer.{n}.{name}") for name in _PARTS)) for n in range(shape.layers))
        words, positions, kinds = (tensors[f"{name}.weight"] for name in _TABLES)
        return cls(shape, words, positions, kinds[0], part(_NORM), tuple(layers))

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic of the weights."""
        return self.words.dtype

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        """Return the (b, t, h) hidden states of (b, t) ids, as transformers does; a mask is 0 where padding is."""
        b, t = input_ids.shape
        x = self._embedded(input_ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :].expand(b, 1, t, t)
        for layer in self.layers:
            x = layer(x, mask, self.shape)
        return (x,)

    def packed(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """Return the (b, t, h) hidden states of each group of (b, t) ids, which are texts without padding.

        The linear maps take `STEADY_TOKENS` tokens of all groups at once, so other groups change no bit on a CPU.
        """
        sizes = [(len(ids), ids.shape[1]) for ids in groups]
        x = torch.cat([self._embedded(ids).flatten(0, 1) for ids in groups])  # (b, t, h) of each -> (n, h)
        n = len(x)
        x = functional.pad(x, (0, 0, 0, -n % STEADY_TOKENS))
        for layer in self.layers:
            x = layer.packed(x, sizes, self.shape)
        parts = torch.split(x[:n], [b * t for b, t in sizes])
        both = zip(parts, sizes, strict=True)
        return [part.view(*size, self.shape.hidden) for part, size in both]  # (b t, h) -> (b, t, h)

    def _embedded(self, ids: Tensor) -> Tensor:
        x = functional.embedding(ids, self.words) + self.kind  # (b, t, h)
        return self.norm.norm(x + self._placed(ids), self.shape.epsilon)

    def _placed(self, ids: Tensor) -> Tensor:
        """Return the vectors of positions, (t, h), or (b, t, h) where they are counted without padding."""
        if not self.shape.behind_padding:
            return self.positions[: ids.shape[1]]
        real = ids.ne(self.shape.pad_id).int()  # (b, t)
        return functional.embedding((real.cumsum(1).to(real.dtype) * real).long() + self.shape.pad_id, self.positions)


def _tensor(stored: StoredTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor; on a CPU it stays mapped from its file where it has that type already."""
    values = torch.from_numpy(stored.mapped())
    return (values.view(torch.bfloat16) if stored.dtype == "BF16" else values).to(device, dtype)
