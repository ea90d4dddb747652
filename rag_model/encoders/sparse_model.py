"""A masked-language model as a torch module that weighs terms: ids in, one weight a term of the vocabulary out."""

from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor, nn

from rag_model.encoders.model import device_named
from rag_model.encoders.sparse_spec import SparseSpec
from rag_model.encoders.transformer import pretrained


class SparseModel(nn.Module):
    """w(text) over the vocabulary (`sparse_spec`); make it with `load`."""

    def __init__(self, whole: Any, spec: SparseSpec) -> None:
        """Weigh terms by a transformers model with logits over its vocabulary."""
        super().__init__()
        self.whole, self.spec = whole, spec

    @classmethod
    def load(
        cls, folder: Path, spec: SparseSpec, *, device: str | None = None, dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load the model of `folder`; `device` as of `device_named`.

        Raises:
            InputError: weights are missing or corrupt.
        """
        where = device_named(device)
        whole = pretrained(transformers.AutoModelForMaskedLM, folder, dtype)
        return cls(whole.to(where).eval(), spec)

    @property
    def device(self) -> torch.device:
        """The current device of the weights."""
        found: torch.device = self.whole.device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic of the transformer."""
        found: torch.dtype = self.whole.dtype
        return found

    @property
    def pad_id(self) -> int:
        """The token of padding: RoBERTa derives positions from it."""
        return int(getattr(self.whole.config, "pad_token_id", None) or 0)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        """Return (b, V) float32 weights of the vocabulary, of (b, t) ids; `real` (b, t) bool: what is not padding."""
        logits = self.whole(input_ids=ids, attention_mask=real.long()).logits  # (b, t, V)
        logits = logits.masked_fill(~real[..., None], 0).relu_()  # a padding adds nothing
        if self.spec.pooling == "max":  # log(1 + x) rises with x: it is as well taken after the maximum
            return self._activated(logits.amax(1).float())  # (b, t, V) -> (b, V)
        return self._activated(logits.float()).sum(1)

    def _activated(self, logits: Tensor) -> Tensor:
        weights = torch.log1p(logits)
        return torch.log1p(weights) if self.spec.activation == "log1p_relu" else weights


def heaviest(weights: Tensor, count: int, units: int, most: int, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the `count` heaviest terms, (b, c) int64, and their weights in units, (b, c) int64, the heaviest first.

    A weight of 1 is `units` units, at most `most`; of equal ones the smaller term comes first. 0 units: no term.
    `own` (b, V) bool: terms that are kept beside them, however light.
    """
    size = weights.shape[1]
    whole = (weights * units).round().clamp(max=most).long()
    order = torch.arange(size - 1, -1, -1, device=weights.device)
    keys = whole * size + order  # no two are equal
    found = keys.topk(min(count, size), dim=1).values
    if own is not None:
        kept = own | (keys >= found[:, -1:])  # (b, V)
        width = int(kept.sum(1).max())
        found = torch.where(kept, keys, order).topk(width, dim=1).values
    return size - 1 - found % size, found // size
