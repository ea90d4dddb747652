"""Sparse models as torch modules, which map token ids to one weight per vocabulary term.

`SparseModel` is SPLADE on a masked language model. `SidrModel` is SiDR, which computes the weight
of each term with the model's own word embeddings: V(x) = max over tokens i of elu1p(LN(h_i) E^T),
with elu1p(z) = elu(z) + 1 (Zhou et al., "Semi-Parametric Retrieval via Binary Bag-of-Tokens Index",
arXiv 2405.01924). Ids that are not terms have weight 0 (`bag.compute_term_mask`).

`max_inner_products` computes the maximum without keeping the products of all tokens. A plain matrix
product keeps (b, t, V) values for the backward pass: a gigabyte for 32 texts of 256 tokens and
BERT's vocabulary. Here the products of one text at a time are computed, and only the position of
each maximum is kept. The backward pass then costs as much as one token per text instead of t: the
gradient of a word is a weighted sum of one token of each text, and the gradient of a token is a
weighted sum of those words whose maximum is at this token. `embedding_bag` computes these sums
without storing the (b, V, h) products.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rag_model.encoders.bag import compute_term_mask
from rag_model.encoders.model import resolve_device
from rag_model.encoders.pretrained import load_body, load_transformers_model, save_body
from rag_model.encoders.space import Space
from rag_model.encoders.sparse_encoder import SparseSpec
from rag_model.encoders.spec import SPARSE_KEY, write_encoder_record
from rag_model.encoders.tokens import copy_tokenizer, load_tokenizer
from rag_model.encoders.weights import read_tensor_headers
from rag_model.errors import InputError

_NORM_PREFIX = "sidr_norm"  # prefix of the tensors of the layer normalization
_ARCHITECTURE = "SidrModel"


class SparseModel(nn.Module):
    """A SPLADE model (equations in `sparse_encoder`); create one with `load`."""

    def __init__(self, transformers_model: Any, spec: SparseSpec) -> None:
        """Wrap a transformers model with logits over its vocabulary."""
        super().__init__()
        self.whole, self.spec = transformers_model, spec

    @classmethod
    def load(
        cls, folder: Path, spec: SparseSpec, *, device: str | None = None, dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load the model of `folder`; for `device`, see `resolve_device`.

        Raises:
            InputError: weights are missing or corrupt.
        """
        resolved_device = resolve_device(device)
        model = load_transformers_model(transformers.AutoModelForMaskedLM, folder, dtype)
        return cls(model.to(resolved_device).eval(), spec)

    @property
    def device(self) -> torch.device:
        """Current device of the weights."""
        device: torch.device = self.whole.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the transformer."""
        dtype: torch.dtype = self.whole.dtype
        return dtype

    @property
    def pad_id(self) -> int:
        """The padding token id, from which RoBERTa derives positions."""
        return int(getattr(self.whole.config, "pad_token_id", None) or 0)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (b, V) float32 term weights of (b, t) ids; `attention_mask` (b, t) bool is False
        for padding.
        """
        logits = self.whole(input_ids=ids, attention_mask=attention_mask.long()).logits  # (b, t, V)
        logits = logits.masked_fill(~attention_mask[..., None], 0).relu_()  # padding has weight 0
        if self.spec.pooling == "max":  # log(1 + x) is monotonic, so it may follow the maximum
            return self._activate(logits.amax(1).float())  # (b, t, V) -> (b, V)
        return self._activate(logits.float()).sum(1)

    def _activate(self, logits: Tensor) -> Tensor:
        weights = torch.log1p(logits)
        return torch.log1p(weights) if self.spec.activation == "log1p_relu" else weights


def find_top_terms(
    weights: Tensor, max_terms: int, scale: int, max_units: int, always_kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (the `max_terms` terms with the largest weights, their quantized weights), (b, c)
    int64 each, in descending order of weight.

    A weight of 1 is `scale` units, clipped at `max_units`; an entry with 0 units is empty. Terms
    of equal weight are in the order of their ids. `always_kept`, (b, V) bool, selects terms that
    are returned regardless of their weight.
    """
    vocabulary_size = weights.shape[1]
    weight_units = (weights * scale).round().clamp(max=max_units).long()
    tie_breakers = torch.arange(vocabulary_size - 1, -1, -1, device=weights.device)
    sort_keys = weight_units * vocabulary_size + tie_breakers  # unique keys
    top_sort_keys = sort_keys.topk(min(max_terms, vocabulary_size), dim=1).values
    if always_kept is not None:
        is_kept = always_kept | (sort_keys >= top_sort_keys[:, -1:])  # (b, V)
        max_kept_terms = int(is_kept.sum(1).max())
        top_sort_keys = torch.where(is_kept, sort_keys, tie_breakers).topk(max_kept_terms, dim=1).values
    return vocabulary_size - 1 - top_sort_keys % vocabulary_size, top_sort_keys // vocabulary_size


def max_inner_products(hidden: Tensor, words: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return (b, V): the maximum of hidden[i, t] · words[v] over the first `lengths[i]` tokens t,
    with gradients.

    `hidden` is (b, t, h), `words` (V, h). If several tokens have the same product, only one of them
    gets the gradient.
    """
    maxima: Tensor = _MaxProducts.apply(hidden, words, tuple(lengths))  # type: ignore[no-untyped-call]
    return maxima


class _MaxProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, words: Tensor, lengths: tuple[int, ...]) -> Tensor:
        maxima = hidden.new_empty(len(hidden), len(words))
        argmax_positions = torch.empty(maxima.shape, dtype=torch.int16, device=hidden.device)
        for row, length in enumerate(lengths):
            inner_products = hidden[row, :length] @ words.T  # (t, h) @ (h, V) -> (t, V)
            maxima[row], best_positions = inner_products.max(0)
            argmax_positions[row] = best_positions
        ctx.save_for_backward(hidden, words, argmax_positions)
        return maxima

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, words, positions = ctx.saved_tensors
        n_texts, n_tokens, _ = hidden.shape
        text_starts = torch.arange(0, n_texts * n_tokens, n_tokens, device=hidden.device)
        token_rows = positions + text_starts[:, None]  # (b, V) row numbers of (b * t, h)
        # (V, b) -> (V, h)
        words_gradient = _compute_weighted_sums(hidden.flatten(0, 1), token_rows.T, gradient.T)
        token_order = token_rows.flatten().argsort(stable=True)  # (b * V,), sorted by token
        # number of words per token
        word_counts = token_rows.flatten().bincount(minlength=n_texts * n_tokens)
        hidden_gradient = _compute_weighted_sums(
            words, token_order % len(words), gradient.flatten()[token_order], word_counts.cumsum(0) - word_counts
        )  # (b * t, h)
        return hidden_gradient.view_as(hidden), words_gradient, None


def _compute_weighted_sums(rows: Tensor, row_ids: Tensor, factors: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return a weighted sum of `rows` for each row of `row_ids`, or for each segment of `row_ids`
    that begins at a position in `starts`.
    """
    row_ids, factors = row_ids.contiguous(), factors.to(rows.dtype).contiguous()
    return nn.functional.embedding_bag(row_ids, rows, starts, mode="sum", per_sample_weights=factors)


class SidrModel(nn.Module):
    """A SiDR model: a transformer with a layer normalization, and its word embeddings as terms.

    Create one with `load` or `from_encoder`.
    """

    term_mask: Tensor  # (V,) bool, whether each id is a term

    def __init__(self, body: Any, term_mask: Tensor) -> None:
        """Add a new layer normalization to a transformer; `term_mask` (V,) bool marks the ids that
        are terms.
        """
        super().__init__()
        self.body = body
        self.norm = nn.LayerNorm(body.config.hidden_size, device=body.device, dtype=body.dtype)
        self.register_buffer("term_mask", term_mask.to(body.device), persistent=False)

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None, dtype: torch.dtype = torch.float32) -> Self:
        """Load the SiDR of a folder; for `device`, see `resolve_device`.

        Raises:
            InputError: weights are missing or corrupt.
        """
        model = cls._with_new_norm(folder, device, dtype)
        stored_tensors = read_tensor_headers(folder)
        try:
            norm_weights = {name: stored_tensors[f"{_NORM_PREFIX}.{name}"].read() for name in ("weight", "bias")}
            with torch.no_grad():
                model.norm.weight.copy_(torch.from_numpy(norm_weights["weight"]))
                model.norm.bias.copy_(torch.from_numpy(norm_weights["bias"]))
        except (KeyError, RuntimeError) as error:
            raise InputError(
                f"SiDR {folder} lacks {_NORM_PREFIX}.weight or .bias: fetch it again, or train one"
            ) from error
        return model

    @classmethod
    def from_encoder(cls, folder: Path, *, device: str | None = None) -> Self:
        """Create an untrained model from a plain transformer; the normalization starts with ones
        and zeros.

        Raises:
            InputError: the encoder cannot be loaded.
        """
        return cls._with_new_norm(folder, device, torch.float32)

    @classmethod
    def _with_new_norm(cls, folder: Path, device: str | None, dtype: torch.dtype) -> Self:
        body = load_body(folder, resolve_device(device), dtype)
        n_tokens = int(body.get_input_embeddings().weight.shape[0])
        return cls(body, torch.from_numpy(compute_term_mask(load_tokenizer(folder, 8), n_tokens))).eval()

    @property
    def device(self) -> torch.device:
        """Current device of the weights."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the transformer."""
        return self.norm.weight.dtype

    @property
    def pad_id(self) -> int:
        """Padding token id."""
        return int(getattr(self.body.config, "pad_token_id", None) or 0)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (b, V) term weights, at least float32, of (b, t) ids; `attention_mask` (b, t) is
        False for padding.

        elu1p is monotonic, so it is computed after the maximum.
        """
        # (b, t, h)
        hidden = self.norm(self.body(input_ids=ids, attention_mask=attention_mask.long())[0])
        scores = max_inner_products(
            hidden, self.body.get_input_embeddings().weight, attention_mask.sum(1).tolist()
        )  # (b, V)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return (nn.functional.elu(scores) + 1).masked_fill(~self.term_mask, 0)

    def bag_of_tokens(self, ids: Tensor) -> Tensor:
        """Return the (b, V) bool bags of tokens of (b, t) ids; padding is not a term."""
        is_present = torch.zeros(len(ids), len(self.term_mask), dtype=torch.bool, device=ids.device)
        return is_present.scatter_(1, ids, True) & self.term_mask

    def save(self, folder: Path, tokenizer_folder: Path, spec: SparseSpec, target_space: Space | None = None) -> None:
        """Write a folder for `SparseEncoder.load`; `target_space` is the space of the passages, if
        the model encodes questions for another encoder.
        """
        copy_tokenizer(tokenizer_folder, folder)
        norm_tensors = {f"{_NORM_PREFIX}.{name}": tensor for name, tensor in self.norm.state_dict().items()}
        save_body(self.body, norm_tensors, _ARCHITECTURE, folder)
        write_encoder_record(folder, {SPARSE_KEY: spec.to_json()}, target_space)
