"""The static model: token ids in, the means of their vectors out. It runs on the CPU: there is little to compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rag_model.encoders.static_folder import StaticTable
from rag_model.encoders.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class StaticModel:
    """A table of token vectors; float32 ones stay mapped from their file, so that processes share them."""

    table: Tensor  # (r, d) float32
    rows: Tensor | None  # (v,) int32: the row of each token; None: its own number
    weights: Tensor | None  # (v,) float32: of each token; None: 1
    normalize: bool
    whole: None = None  # no transformer: nothing to train

    @classmethod
    def of(cls, table: StaticTable, *, normalize: bool) -> Self:
        """Load a folder's table."""
        rows, weights = (None if own is None else torch.from_numpy(own) for own in (table.mapping, table.weights))
        return cls(torch.from_numpy(table.vectors()), rows, weights, normalize)

    @property
    def device(self) -> torch.device:
        """Return the CPU."""
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        """Return float32."""
        return self.table.dtype

    @property
    def dim(self) -> int:
        """Return the length of a vector."""
        return self.table.shape[1]

    @torch.inference_mode()
    def encode(self, tokens: Sequence[TokenIds], *, steady: bool = False) -> npt.NDArray[np.float32]:
        """Return the (n, d) float32 vectors of inputs, in order; that of an input without tokens is 0.

        Vectors do not depend on the other inputs, `steady` or not.
        """
        lengths = torch.tensor([len(line) for line in tokens], dtype=torch.int32)  # (n,)
        ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *tokens]))  # ragged -> (t,)
        starts = torch.cumsum(lengths, 0, dtype=torch.int32) - lengths
        sums = nn.functional.embedding_bag(
            ids if self.rows is None else self.rows[ids],
            self.table,
            starts,
            mode="sum",
            per_sample_weights=None if self.weights is None else self.weights[ids],
        )  # (t,), (r, d) -> (n, d)
        means = sums / lengths.clamp(min=1)[:, None]
        found: npt.NDArray[np.float32] = (nn.functional.normalize(means) if self.normalize else means).numpy()
        return found
