"""The model: token ids in, vectors out, on one device."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rag_model.encoders.architecture import DPR_ENCODERS, check_kind
from rag_model.encoders.batches import LENGTH_MULTIPLE, STEADY_TOKENS, by_length, by_tokens, padded
from rag_model.encoders.bert import Bert
from rag_model.encoders.pretrained import check_config
from rag_model.encoders.room import halved
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.tokens import TokenIds
from rag_model.errors import UsageError
from rag_model.extras import require

# Tokens of a batch, padding included. On two cores with AMX 2,048 to 4,096 are the fastest (larger batches do not fit
# the cache); a GPU needs batches so large that kernel launches cost little.
CPU_BATCH_TOKENS = 4096
CUDA_BATCH_TOKENS = 65_536
_WITHOUT_AVX512 = ("DEFAULT", "AVX2")  # torch's names of CPU capabilities


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded encoder on its device."""

    whole: nn.Module | None  # the model as transformers loads, trains and saves it; None: its layers are `Bert`
    body: nn.Module | Bert  # from ids and mask to hidden states
    projection: nn.Module | None  # DPR's `encode_proj`
    spec: EncoderSpec
    dim: int
    pad_id: int  # RoBERTa derives positions from it
    device: torch.device
    dtype: torch.dtype
    batch_tokens: int

    @torch.inference_mode()
    def encode(self, tokens: Sequence[TokenIds], *, steady: bool = False) -> npt.NDArray[np.float32]:
        """Return the (n, d) float32 vectors of inputs, in order; on CUDA the host waits once, at the end.

        `steady` vectors do not depend on the other inputs: equal bits on a CPU, equal up to rounding on a GPU.

        Raises:
            ResourceError: a GPU's memory does not hold one input; a batch that does not fit is halved.
        """
        out = torch.empty((len(tokens), self.dim), device=self.device)
        lengths, least = [len(ids) for ids in tokens], min(STEADY_TOKENS, self.batch_tokens) if steady else 0
        packs = steady and self._packs
        work = self._packed if packs else self.vectors
        batches = by_tokens(lengths, self.batch_tokens) if packs else by_length(lengths, self.batch_tokens, least)
        for rows, made in halved(batches, lambda rows: work([tokens[row] for row in rows])):
            out[_to(torch.from_numpy(rows), self.device)] = made  # (b,) positions; (b, d)
        found: npt.NDArray[np.float32] = out.cpu().numpy()
        return found

    def vectors(self, batch: Sequence[TokenIds], multiple: int = LENGTH_MULTIPLE) -> Tensor:
        """Return the (b, d) float32 vectors of one batch of inputs, with gradient; t is a multiple of `multiple`."""
        lengths = np.array([len(ids) for ids in batch])
        real = np.arange(padded(int(lengths.max()), multiple)) < lengths[:, None]  # (t,) < (b, 1) -> (b, t)
        ids = np.full(real.shape, self.pad_id, np.int64)
        ids[real] = np.concatenate(batch)  # ragged -> (b, t), padded at the end
        mask = None if real.all() else _to(torch.from_numpy(real), self.device)
        hidden = self.body(
            input_ids=_to(torch.from_numpy(ids), self.device),
            attention_mask=None if mask is None else mask.long(),
        )[0]
        pooled = self._pool(hidden, mask, _to(torch.from_numpy(lengths), self.device))  # (b, t, h) -> (b, h)
        return self._finished(pooled)

    @property
    def _packs(self) -> bool:
        """Whether `_packed` is quicker: the kernels of bf16 want padded lengths, and a GPU few launches."""
        return isinstance(self.body, Bert) and self.device.type == "cpu" and self.dtype == torch.float32

    def _packed(self, batch: Sequence[TokenIds]) -> Tensor:
        """Return the (b, d) float32 vectors of inputs without padding; those of equal length stand together."""
        assert isinstance(self.body, Bert)
        groups = [torch.from_numpy(np.stack([*some])).long() for _, some in groupby(batch, len)]  # each (b, t)
        pooled = [self._pool(own, None, torch.full(own.shape[:1], own.shape[1])) for own in self.body.packed(groups)]
        return self._finished(torch.cat(pooled))  # (b, h) of each group -> (b, d)

    def _finished(self, vectors: Tensor) -> Tensor:
        if self.projection is not None:
            vectors = self.projection(vectors.to(self.dtype)).float()  # (b, h) -> (b, d)
        return nn.functional.normalize(vectors) if self.spec.normalize else vectors

    def _pool(self, hidden: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:
        if self.spec.pooling == "cls":
            return hidden[:, 0].float()  # (b, t, h) -> (b, h)
        if self.spec.pooling == "last":
            # (b, t, h) -> (b, h): the last real token
            return hidden[torch.arange(len(hidden), device=self.device), lengths - 1].float()
        if mask is not None:
            hidden = hidden.masked_fill(~mask[..., None], 0)  # (b, t) -> (b, t, 1)
        return hidden.sum(1, dtype=torch.float32) / lengths[:, None]  # (b, t, h) -> (b, h), divided by (b, 1)


def learning_multiple(device: torch.device) -> int:
    """Return what the length of a batch with gradient is a multiple of: float32 on a CPU gains nothing by padding."""
    return 1 if device.type == "cpu" and not torch.is_autocast_enabled("cpu") else LENGTH_MULTIPLE


def load_model(
    folder: Path, spec: EncoderSpec, device: str | None = None, dtype: str | None = None, *, trainable: bool = False
) -> Model:
    """Load the encoder of `folder`, by default on one of the GPUs, else on the CPU.

    For inference BERT and its like need no transformers; a `trainable` model is always one of transformers.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
        MissingExtraError: transformers is needed and not installed.
        UsageError: this machine has no such device.
    """
    check_kind(folder)
    where, kind = arithmetic(device, dtype)
    if not trainable:
        check_config(folder)
        if (bert := Bert.load(folder, where, kind)) is not None:
            shape = bert.shape
            return Model(None, bert, None, spec, shape.hidden, shape.pad_id, where, kind, _budget(where))
    require("transformers", "model")
    whole = import_module("rag_model.encoders.transformer").load_transformer(folder, kind)
    return model_of(whole, spec, where)


def model_of(whole: Any, spec: EncoderSpec, device: torch.device, batch_tokens: int | None = None) -> Model:
    """Make a `Model` from a transformers model in memory; its dtype does not change."""
    whole.to(device).eval()
    inner = getattr(whole, DPR_ENCODERS.get(type(whole).__name__, ""), None)
    body, projection = (inner.bert_model, getattr(inner, "encode_proj", None)) if inner else (whole, None)
    dim = projection.out_features if projection is not None else whole.config.hidden_size
    pad_id = getattr(whole.config, "pad_token_id", None) or 0
    return Model(whole, body, projection, spec, dim, pad_id, device, whole.dtype, batch_tokens or _budget(device))


def _budget(device: torch.device) -> int:
    return CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS


def device_of(turn: int) -> str:
    """Return the device of part or worker number `turn`: the GPUs in rotation, else the CPU."""
    return f"cuda:{turn % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"


def arithmetic(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Return the named device and dtype; None: one of the GPUs, else the CPU, and the dtype that is fastest there.

    Raises:
        UsageError: this machine has no such device.
    """
    where = device_named(device)
    return where, getattr(torch, dtype) if dtype else fastest_dtype(where)


def device_named(name: str | None) -> torch.device:
    """Return the named device (`cpu`, `cuda:1`); None: one of the GPUs, else the CPU.

    Raises:
        UsageError: this machine has no such device.
    """
    if name is None:
        name = device_of(os.getpid())  # workers started together have consecutive ids
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"this machine has no {name}: install a CUDA build of torch, or use cpu")
    try:
        return torch.device(name)
    except RuntimeError as unknown:
        raise UsageError(f"device {name!r} is unknown: use cpu or cuda:0") from unknown


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if `device` has fast bfloat16: GPUs, and CPUs with AVX512-BF16 or AMX.

    A process with `ATEN_CPU_CAPABILITY=avx2` gets float32, like a processor without AVX512.
    """
    restricted = torch.backends.cpu.get_cpu_capability() in _WITHOUT_AVX512
    fast = device.type == "cuda" or (torch.cpu._is_avx512_bf16_supported() and not restricted)
    return torch.bfloat16 if fast else torch.float32


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
