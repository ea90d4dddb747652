"""Linear layers by oneDNN, for inference in float32 on a CPU.

torch multiplies float32 matrices by MKL, which has no AVX-512 kernels for other makers' processors: there oneDNN takes
about half the time. Equal up to rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _OneDnnLinear(nn.Module):
    """A linear layer whose weights are laid out for oneDNN once."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        self.weight: Any = layer.weight.detach().to_mkldnn()
        self.bias: Any = bias.detach().to_mkldnn()

    def forward(self, rows: Tensor) -> Tensor:
        """Return (…, out) of (…, in)."""
        out: Tensor = torch.ops.aten.mkldnn_linear(rows.to_mkldnn(), self.weight, self.bias)
        return out.to_dense()


def with_onednn(whole: nn.Module) -> nn.Module:
    """Replace the linear layers of a float32 model on the CPU, in place; the model cannot be trained or saved then.

    Without oneDNN in this build of torch, the model stays as it is.
    """
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        for name, layer in list(whole.named_modules()):
            if type(layer) is nn.Linear:
                whole.set_submodule(name, _OneDnnLinear(layer))
    return whole
