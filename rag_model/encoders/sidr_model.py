"""SiDR as a torch module: a transformer that weighs each term of its vocabulary, by its own word embeddings.

V(x) = max over tokens i of elu1p(LN(h_i) E^T): Zhou et al., "Semi-Parametric Retrieval via Binary Bag-of-Tokens Index"
(arXiv 2405.01924), with elu1p(z) = elu(z) + 1. Ids that are no term weigh nothing (`bag.terms_of`).
"""

import json
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from rag_model.encoders.bag import terms_of
from rag_model.encoders.files import CONFIG
from rag_model.encoders.max_products import max_products
from rag_model.encoders.model import device_named
from rag_model.encoders.space import Space
from rag_model.encoders.sparse_spec import RECORDED, SparseSpec
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.tokens import copy_tokenizer, load_tokenizer
from rag_model.encoders.transformer import pretrained
from rag_model.encoders.weights import WEIGHTS, stored_tensors
from rag_model.errors import InputError

_NORM = "sidr_norm"  # prefix of the normalisation's tensors
_ARCHITECTURE = "SidrModel"


class SidrModel(nn.Module):
    """A transformer, a layer normalisation, and its word embeddings as terms; make it with `load` or `begin`."""

    terms: Tensor  # (V,) bool

    def __init__(self, body: Any, terms: Tensor) -> None:
        """Put a new normalisation on a transformer; `terms` (V,) bool: the ids that are terms."""
        super().__init__()
        self.body = body
        self.norm = nn.LayerNorm(body.config.hidden_size, device=body.device, dtype=body.dtype)
        self.register_buffer("terms", terms.to(body.device), persistent=False)

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None, dtype: torch.dtype = torch.float32) -> Self:
        """Load the SiDR of a folder; `device` as of `device_named`.

        Raises:
            InputError: weights are missing or corrupt.
        """
        found = cls._bodied(folder, device, dtype)
        stored = stored_tensors(folder)
        try:
            held = {name: stored[f"{_NORM}.{name}"].read() for name in ("weight", "bias")}
            with torch.no_grad():
                found.norm.weight.copy_(torch.from_numpy(held["weight"]))
                found.norm.bias.copy_(torch.from_numpy(held["bias"]))
        except (KeyError, RuntimeError) as broken:
            raise InputError(f"SiDR {folder} lacks {_NORM}.weight or .bias: fetch it again, or train one") from broken
        return found

    @classmethod
    def begin(cls, folder: Path, *, device: str | None = None) -> Self:
        """Begin with a plain transformer: the normalisation learns from ones and zeros on.

        Raises:
            InputError: the encoder cannot be loaded.
        """
        return cls._bodied(folder, device, torch.float32)

    @classmethod
    def _bodied(cls, folder: Path, device: str | None, dtype: torch.dtype) -> Self:
        body = pretrained(transformers.AutoModel, folder, dtype).to(device_named(device))
        for name, parameter in body.named_parameters():
            parameter.requires_grad_("pooler" not in name.split("."))
        size = int(body.get_input_embeddings().weight.shape[0])
        return cls(body, torch.from_numpy(terms_of(load_tokenizer(folder, 8), size))).eval()

    @property
    def device(self) -> torch.device:
        """The current device of the weights."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The arithmetic of the transformer."""
        return self.norm.weight.dtype

    @property
    def pad_id(self) -> int:
        """The token of padding."""
        return int(getattr(self.body.config, "pad_token_id", None) or 0)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        """Return (b, V) weights, at least float32, of (b, t) ids; `real` (b, t) bool: what is not padding.

        elu1p rises, so it is as well taken after the maximum.
        """
        hidden = self.norm(self.body(input_ids=ids, attention_mask=real.long())[0])  # (b, t, h)
        best = max_products(hidden, self.body.get_input_embeddings().weight, real.sum(1).tolist())  # (b, V)
        best = best.to(torch.promote_types(best.dtype, torch.float32))
        return (nn.functional.elu(best) + 1).masked_fill(~self.terms, 0)

    def own(self, ids: Tensor) -> Tensor:
        """Return (b, V) bool: the bags of tokens of (b, t) ids, padding included, which is no term."""
        held = torch.zeros(len(ids), len(self.terms), dtype=torch.bool, device=ids.device)
        return held.scatter_(1, ids, True) & self.terms

    def save(self, folder: Path, tokenizer_of: Path, spec: SparseSpec, asks: Space | None = None) -> None:
        """Write a folder that `SparseEncoder.load` opens; `asks`: the space of its questions, of a pair."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer(tokenizer_of, folder)
        prefix = self.body.base_model_prefix
        body = {
            f"{prefix}.{name}": one for name, one in self.body.state_dict().items() if "pooler" not in name.split(".")
        }
        norm = {f"{_NORM}.{name}": one for name, one in self.norm.state_dict().items()}
        tensors = {name: one.detach().cpu().contiguous() for name, one in (body | norm).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        config = {**self.body.config.to_diff_dict(), "architectures": [_ARCHITECTURE], "dtype": "float32"}
        config["model_type"] = self.body.config.model_type
        told = {RECORDED: spec.to_json(), **({"asks": asks.to_json()} if asks else {})}
        for name, value in ((CONFIG, config), (RECORD_FILE, told)):
            (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
