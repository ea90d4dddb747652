"""BERT and RoBERTa layers for inference, whose results equal those of transformers bit for bit.

Most encoders are BERT or RoBERTa models. transformers takes longer to import than torch, and for a
single question its classes take nearly twice as long as the kernels that they call. All other
models are run by transformers.

Devlin et al. 2018 (arXiv 1810.04805); Liu et al. 2019 (arXiv 1907.11692), in which position ids
begin after the padding id.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from rag_model.encoders.files import CONFIG, read_json_object
from rag_model.encoders.tokens import BATCH_INVARIANT_TOKENS
from rag_model.encoders.weights import StoredTensor, canonicalize_names, read_tensor_headers

# Values of `model_type` in config.json.
_BERT, _ROBERTA = ("bert", "dpr"), ("roberta", "xlm-roberta", "camembert")
# default padding id by model type
_DEFAULT_PAD_IDS = dict.fromkeys(_BERT, 0) | dict.fromkeys(_ROBERTA, 1)
_CONFIG_KEYS = {  # fields of `BertSizes`, and their names in a config
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
}
# Config keys and the values that these layers implement.
_SUPPORTED_CONFIG: Mapping[str, tuple[Any, ...]] = {
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
# Modules of a layer, in the order of the fields of `_Layer`, with their (output, input) sizes.
_LAYER_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention.self.query": ("hidden", "hidden"),
    "attention.self.key": ("hidden", "hidden"),
    "attention.self.value": ("hidden", "hidden"),
    "attention.output.dense": ("hidden", "hidden"),
    "attention.output.LayerNorm": ("hidden",),
    "intermediate.dense": ("inner", "hidden"),
    "output.dense": ("hidden", "inner"),
    "output.LayerNorm": ("hidden",),
}
_EMBEDDING_TABLES = {  # names and sizes of the embedding tables
    "embeddings.word_embeddings": ("vocabulary", "hidden"),
    "embeddings.position_embeddings": ("positions", "hidden"),
    "embeddings.token_type_embeddings": ("token_types", "hidden"),
}
_NORM = "embeddings.LayerNorm"


@dataclass(frozen=True, slots=True)
class BertSizes:
    """Sizes of a BERT encoder, from its config."""

    layers: int  # number of layers
    heads: int  # number of attention heads
    hidden: int  # hidden size
    inner: int  # size of the feed-forward network
    vocabulary: int  # vocabulary size
    positions: int  # number of position embeddings
    token_types: int  # number of token types
    epsilon: float  # epsilon of the layer normalizations
    pad_id: int
    positions_after_padding: bool  # whether position ids begin at `pad_id` + 1

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the sizes from the config of a folder; None if these layers cannot run the model.

        Raises:
            InputError: the config is missing or corrupt.
        """
        config = read_json_object(folder / CONFIG)
        model_type = str(config.get("model_type"))
        if model_type not in _DEFAULT_PAD_IDS or any(
            config.get(key, values[0]) not in values for key, values in _SUPPORTED_CONFIG.items()
        ):
            return None
        config_sizes: dict[str, Any] = {name: config.get(key) for name, key in _CONFIG_KEYS.items()}
        pad_id, epsilon = config.get("pad_token_id", _DEFAULT_PAD_IDS[model_type]), config.get("layer_norm_eps", 1e-12)
        if any(type(size) is not int for size in (*config_sizes.values(), pad_id)) or type(epsilon) is not float:
            return None
        sizes = cls(**config_sizes, epsilon=epsilon, pad_id=pad_id, positions_after_padding=model_type in _ROBERTA)
        return sizes if min(*config_sizes.values(), pad_id + 1) > 0 and sizes.hidden % sizes.heads == 0 else None

    def iter_tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (canonical name, shape) of every tensor; see `canonicalize_names`."""
        for name, size_names in _EMBEDDING_TABLES.items():
            yield f"{name}.weight", self._resolve_sizes(size_names)
        module_sizes = {
            f"encoder.layer.{n}.{name}": sizes for n in range(self.layers) for name, sizes in _LAYER_PARTS.items()
        }
        for name, sizes in {_NORM: ("hidden",), **module_sizes}.items():
            yield f"{name}.weight", self._resolve_sizes(sizes)
            yield f"{name}.bias", self._resolve_sizes(sizes[:1])

    def _resolve_sizes(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in names)


@dataclass(frozen=True, slots=True)
class _Affine:
    """Weight and bias of a linear layer or a layer normalization."""

    weight: Tensor
    bias: Tensor

    def linear(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def layer_norm(self, x: Tensor, epsilon: float) -> Tensor:
        return functional.layer_norm(x, self.bias.shape, self.weight, self.bias, epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Self-attention and a feed-forward network, each with a residual connection and a layer
    norm.
    """

    query: _Affine
    key: _Affine
    value: _Affine
    attention_output: _Affine
    attention_norm: _Affine
    intermediate: _Affine
    output: _Affine
    output_norm: _Affine

    def __call__(self, x: Tensor, mask: Tensor | None, sizes: BertSizes) -> Tensor:
        # (b, t, h)
        query, key, value = (projection.linear(x) for projection in (self.query, self.key, self.value))
        return self._add_feed_forward(_attend(query, key, value, mask, sizes.heads), x, sizes.epsilon)

    def forward_packed(self, x: Tensor, group_sizes: Sequence[tuple[int, int]], sizes: BertSizes) -> Tensor:
        """Return the (n, h) output for packed rows: groups of b texts of t tokens, then padding.

        The layer multiplies `BATCH_INVARIANT_TOKENS` rows at a time, so that the activations of the
        feed-forward network stay in the CPU cache.
        """
        blocks = torch.split(x, BATCH_INVARIANT_TOKENS)
        projections = (self.query, self.key, self.value)
        # Each (n, h)
        states_by_role = [torch.cat([projection.linear(block) for block in blocks]) for projection in projections]
        attention, first_row = torch.zeros_like(x), 0
        for b, t in group_sizes:
            token_rows = slice(first_row, first_row := first_row + b * t)
            query, key, value = (
                states[token_rows].view(b, t, sizes.hidden) for states in states_by_role
            )  # (b t, h) -> (b, t, h)
            # (b, t, h) -> (b t, h)
            attention[token_rows] = _attend(query, key, value, None, sizes.heads).flatten(0, 1)
        pairs = zip(torch.split(attention, BATCH_INVARIANT_TOKENS), blocks, strict=True)
        return torch.cat(
            [self._add_feed_forward(attended_block, block, sizes.epsilon) for attended_block, block in pairs]
        )

    def _add_feed_forward(self, attention: Tensor, x: Tensor, epsilon: float) -> Tensor:
        x = self.attention_norm.layer_norm(self.attention_output.linear(attention) + x, epsilon)
        return self.output_norm.layer_norm(
            self.output.linear(functional.gelu(self.intermediate.linear(x))) + x, epsilon
        )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, n_heads: int) -> Tensor:
    """Return the (b, t, h) multi-head attention of (b, t, h) queries, keys and values."""
    b, t, h = query.shape
    head_shape = (b, t, n_heads, h // n_heads)
    # (b, heads, t, h / heads)
    query, key, value = (states.view(head_shape).transpose(1, 2) for states in (query, key, value))
    attention = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=head_shape[-1] ** -0.5)
    return attention.transpose(1, 2).reshape(b, t, h)  # (b, heads, t, h / heads) -> (b, t, h)


@dataclass(frozen=True, slots=True)
class Bert:
    """A BERT encoder, which maps token ids to hidden states; create one with `load`."""

    sizes: BertSizes
    word_embeddings: Tensor  # (V, h)
    position_embeddings: Tensor  # (p, h)
    # (h,) embedding of token type 0, the only type that bi-encoders use
    token_type_embedding: Tensor
    norm: _Affine
    layers: tuple[_Layer, ...]

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self | None:
        """Load the encoder of a folder.

        The result is None if these layers cannot run the model, or if a tensor is duplicated or has
        an unexpected shape.

        Raises:
            InputError: a file is missing or corrupt.
        """
        sizes = BertSizes.read(folder)
        if sizes is None:
            return None
        stored_tensors = canonicalize_names(read_tensor_headers(folder))
        tensor_shapes = dict(sizes.iter_tensor_shapes())
        if any(
            name not in stored_tensors or not stored_tensors[name].has_float_shape(shape)
            for name, shape in tensor_shapes.items()
        ):
            return None
        # A tensor that is stored under two names is ambiguous.
        if any(name.partition(".")[2] in tensor_shapes for name in stored_tensors):
            return None
        return cls._from_tensors(
            sizes, {name: _load_tensor(stored_tensors[name], device, dtype) for name in tensor_shapes}
        )

    @classmethod
    def _from_tensors(cls, sizes: BertSizes, tensors: Mapping[str, Tensor]) -> Self:
        def affine(name: str) -> _Affine:
            return _Affine(tensors[f"{name}.weight"], tensors[f"{name}.bias"])

        layers = (_Layer(*(affine(f"encoder.layer.{n}.{name}") for name in _LAYER_PARTS)) for n in range(sizes.layers))
        word_table, position_table, type_table = (tensors[f"{name}.weight"] for name in _EMBEDDING_TABLES)
        return cls(sizes, word_table, position_table, type_table[0], affine(_NORM), tuple(layers))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.word_embeddings.dtype

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        """Return the (b, t, h) hidden states of (b, t) ids, as transformers does; the mask is 0 for
        padding.
        """
        b, t = input_ids.shape
        x = self._embed_tokens(input_ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :].expand(b, 1, t, t)
        for layer in self.layers:
            x = layer(x, mask, self.sizes)
        return (x,)

    def forward_packed(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """Return the (b, t, h) hidden states of each group of (b, t) ids; the texts have no
        padding.

        The linear layers process `BATCH_INVARIANT_TOKENS` tokens of all groups at a time, so on a
        CPU the result of each group is bit for bit independent of the other groups.
        """
        group_sizes = [(len(ids), ids.shape[1]) for ids in groups]
        # (b, t, h) of each -> (n, h)
        x = torch.cat([self._embed_tokens(ids).flatten(0, 1) for ids in groups])
        n = len(x)
        x = functional.pad(x, (0, 0, 0, -n % BATCH_INVARIANT_TOKENS))
        for layer in self.layers:
            x = layer.forward_packed(x, group_sizes, self.sizes)
        packed_parts = torch.split(x[:n], [b * t for b, t in group_sizes])
        parts_and_shapes = zip(packed_parts, group_sizes, strict=True)
        # (b t, h) -> (b, t, h)
        return [part.view(*shape, self.sizes.hidden) for part, shape in parts_and_shapes]

    def _embed_tokens(self, ids: Tensor) -> Tensor:
        x = functional.embedding(ids, self.word_embeddings) + self.token_type_embedding  # (b, t, h)
        return self.norm.layer_norm(x + self._embed_positions(ids), self.sizes.epsilon)

    def _embed_positions(self, ids: Tensor) -> Tensor:
        """Return the position embeddings: (t, h), or (b, t, h) if padding is not counted."""
        if not self.sizes.positions_after_padding:
            return self.position_embeddings[: ids.shape[1]]
        is_token = ids.ne(self.sizes.pad_id).int()  # (b, t)
        return functional.embedding(
            (is_token.cumsum(1).to(is_token.dtype) * is_token).long() + self.sizes.pad_id, self.position_embeddings
        )


def _load_tensor(tensor: StoredTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Load a tensor; on a CPU it stays memory-mapped if its file already has the dtype."""
    cpu_values = torch.from_numpy(tensor.memory_map())
    return (cpu_values.view(torch.bfloat16) if tensor.dtype == "BF16" else cpu_values).to(device, dtype)
