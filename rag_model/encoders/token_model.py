"""A ColBERT as a torch module: a transformer and one linear projection; ids in, one unit vector a token out."""

import json
import shutil
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.model import device_named
from rag_model.encoders.space import tokenizer_files
from rag_model.encoders.token_spec import METADATA, TokenSpec, dense_folder
from rag_model.encoders.transformer import pretrained
from rag_model.encoders.weights import WEIGHTS, StoredTensor, stored_tensors
from rag_model.errors import InputError

LINEAR = "linear.weight"
_ARCHITECTURE = "HF_ColBERT"  # Stanford's name, which PyLate knows as well
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt")


class TokenModel(nn.Module):
    """E(text) = normalise(W · transformer(text)), one vector for each token; make it with `load` or `begin`."""

    def __init__(self, body: Any, weight: Tensor) -> None:
        """Join a transformer of hidden size h, and a projection, (d, h) float32."""
        super().__init__()
        self.body = body
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight.to(body.device, body.dtype))

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None, dtype: torch.dtype = torch.float32) -> Self:
        """Load the ColBERT of `folder`; `device` as of `device_named`.

        Raises:
            InputError: weights are missing, corrupt, or do not fit each other.
        """
        weight = torch.from_numpy(projection_of(folder).read())
        return cls(_transformer(folder, device, dtype), weight)

    @classmethod
    def begin(cls, folder: Path, dim: int, *, seed: int = 0, device: str | None = None) -> Self:
        """Put a new projection to `dim` components on a plain encoder: random orthonormal rows.

        They keep inner products of hidden states on average, so that MaxSim means something before any training.

        Raises:
            InputError: the encoder cannot be loaded.
        """
        body = _transformer(folder, device, torch.float32)
        random = torch.randn(body.config.hidden_size, dim, generator=torch.Generator().manual_seed(seed))
        return cls(body, torch.linalg.qr(random).Q.T.contiguous())  # (h, d) -> (d, h)

    @property
    def dim(self) -> int:
        """The number of components of a token's vector."""
        return int(self.linear.weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic of the transformer."""
        return self.linear.weight.dtype

    @property
    def device(self) -> torch.device:
        """The current device of the weights."""
        return self.linear.weight.device

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Return (b, t, d) float32 unit vectors of (b, t) ids; `seen` (b, t) bool: the tokens that others attend to."""
        hidden = self.body(input_ids=ids, attention_mask=seen.long())[0]  # (b, t, h)
        return nn.functional.normalize(self.linear(hidden).float(), dim=-1)

    def save(self, folder: Path, tokenizer_of: Path, spec: TokenSpec) -> None:
        """Write a folder in Stanford's layout, which PyLate opens too; the tokenizer is copied from another folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in [*tokenizer_files(tokenizer_of), *(tokenizer_of / name for name in _COPIED)]:
            if path.is_file() and path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
        prefix = self.body.base_model_prefix
        tensors = {f"{prefix}.{name}": value for name, value in self.body.state_dict().items() if not _unused(name)}
        tensors[LINEAR] = self.linear.weight.data
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
            folder / WEIGHTS,
            {"format": "pt"},
        )
        config = {**self.body.config.to_diff_dict(), "architectures": [_ARCHITECTURE], "dtype": "float32"}
        config["model_type"] = self.body.config.model_type
        _write(folder / CONFIG, config)
        _write(folder / METADATA, spec.metadata(self.dim))


def projection_of(folder: Path) -> StoredTensor:
    """Return the place of the projection of a ColBERT, (d, h).

    Raises:
        InputError: there is none, or it has a bias or an activation.
    """
    dense = dense_folder(folder)
    if dense is not None:
        told = read_object(dense / CONFIG)
        activation = str(told.get("activation_function", "Identity"))
        if told.get("bias") or told.get("use_residual") or not activation.endswith("Identity"):
            raise InputError(f"the projection in {dense} is not a plain matrix: use a ColBERT whose projection is")
    found = stored_tensors(dense or folder).get(LINEAR)
    if found is None or len(found.shape) != 2:
        raise InputError(f"ColBERT {folder} lacks its projection {LINEAR}: fetch it again, or train one")
    return found


def body_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the places of the transformer's tensors by name, without the projection."""
    return {name: tensor for name, tensor in stored_tensors(folder).items() if name != LINEAR}


def _transformer(folder: Path, device: str | None, dtype: torch.dtype) -> Any:
    where = device_named(device)
    body = pretrained(transformers.AutoModel, folder, dtype)
    for name, parameter in body.named_parameters():
        parameter.requires_grad_(not _unused(name))
    return body.to(where).eval()


def _unused(name: str) -> bool:
    """Whether no vector depends on a tensor: BERT's pooler."""
    return "pooler" in name.split(".")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
