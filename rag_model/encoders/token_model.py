"""A ColBERT as a torch module: a transformer and a linear projection, which map token ids to unit
vectors.
"""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rag_model.encoders.files import CONFIG, read_json_object, write_json
from rag_model.encoders.model import resolve_device
from rag_model.encoders.pretrained import load_body, save_body
from rag_model.encoders.spec import STANFORD_METADATA, TokenSpec, find_dense_folder
from rag_model.encoders.tokens import copy_tokenizer
from rag_model.encoders.weights import StoredTensor, read_tensor_headers
from rag_model.errors import InputError

PROJECTION_TENSOR = "linear.weight"
_ARCHITECTURE = "HF_ColBERT"  # Stanford's name, which PyLate reads too


class TokenModel(nn.Module):
    """E(text) = normalize(W · transformer(text)), one vector per token; create one with `load` or
    `from_encoder`.
    """

    def __init__(self, body: Any, weight: Tensor) -> None:
        """Combine a transformer of hidden size h with a (d, h) float32 projection."""
        super().__init__()
        self.body = body
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight.to(body.device, body.dtype))

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None, dtype: torch.dtype = torch.float32) -> Self:
        """Load the ColBERT of `folder`; for `device`, see `resolve_device`.

        Raises:
            InputError: weights are missing or corrupt, or their shapes do not match.
        """
        weight = torch.from_numpy(find_projection(folder).read())
        return cls(load_body(folder, resolve_device(device), dtype), weight)

    @classmethod
    def from_encoder(cls, folder: Path, dim: int, *, seed: int = 0, device: str | None = None) -> Self:
        """Create an untrained ColBERT from a plain encoder, with a random orthonormal projection to
        `dim` components.

        An orthonormal projection preserves inner products of hidden states on average, so that
        MaxSim is meaningful before any training.

        Raises:
            InputError: the encoder cannot be loaded.
        """
        body = load_body(folder, resolve_device(device), torch.float32)
        gaussian_projection = torch.randn(body.config.hidden_size, dim, generator=torch.Generator().manual_seed(seed))
        return cls(body, torch.linalg.qr(gaussian_projection).Q.T.contiguous())  # (h, d) -> (d, h)

    @property
    def dim(self) -> int:
        """Dimension of a token vector."""
        return int(self.linear.weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the transformer."""
        return self.linear.weight.dtype

    @property
    def device(self) -> torch.device:
        """Current device of the weights."""
        return self.linear.weight.device

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (b, t, d) float32 unit vectors of (b, t) ids; `attention_mask` is (b, t) bool."""
        hidden = self.body(input_ids=ids, attention_mask=attention_mask.long())[0]  # (b, t, h)
        return nn.functional.normalize(self.linear(hidden).float(), dim=-1)

    def save(self, folder: Path, tokenizer_folder: Path, spec: TokenSpec) -> None:
        """Write a folder in Stanford's layout, which PyLate reads too, with the tokenizer of
        `tokenizer_folder`.
        """
        copy_tokenizer(tokenizer_folder, folder)
        save_body(self.body, {PROJECTION_TENSOR: self.linear.weight}, _ARCHITECTURE, folder)
        write_json(folder / STANFORD_METADATA, spec.to_stanford_metadata(self.dim))


def find_projection(folder: Path) -> StoredTensor:
    """Return the (d, h) projection of a ColBERT.

    Raises:
        InputError: there is no projection, or it has a bias or an activation.
    """
    dense_folder = find_dense_folder(folder)
    if dense_folder is not None:
        dense_config = read_json_object(dense_folder / CONFIG)
        activation = str(dense_config.get("activation_function", "Identity"))
        if dense_config.get("bias") or dense_config.get("use_residual") or not activation.endswith("Identity"):
            raise InputError(
                f"the projection in {dense_folder} is not a plain matrix: use a ColBERT whose "
                "projection has no bias and no activation"
            )
    projection = read_tensor_headers(dense_folder or folder).get(PROJECTION_TENSOR)
    if projection is None or len(projection.shape) != 2:
        raise InputError(f"ColBERT {folder} lacks its projection {PROJECTION_TENSOR}: fetch it again, or train one")
    return projection


def list_body_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of the transformer by name, without the projection."""
    return {name: tensor for name, tensor in read_tensor_headers(folder).items() if name != PROJECTION_TENSOR}
