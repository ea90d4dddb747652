"""Run transformer encoders on one device: token ids in, vectors out."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rag_model.encoders.architecture import DPR_ENCODERS, check_is_encoder
from rag_model.encoders.bert import Bert
from rag_model.encoders.pretrained import check_config
from rag_model.encoders.spec import EncoderSpec
from rag_model.encoders.tokens import (
    BATCH_INVARIANT_TOKENS,
    LENGTH_MULTIPLE,
    TokenIds,
    batch_by_length,
    batch_without_padding,
    pad_length,
    run_batches,
)
from rag_model.errors import UsageError
from rag_model.extras import require
from rag_model.process import claim_gpu

# Tokens per batch, padding included. On two cores with AMX 2,048 to 4,096 are the fastest (larger
# batches do not fit the cache). On a GPU the batches must be so large that kernel launches cost
# little.
CPU_BATCH_TOKENS = 4096
CUDA_BATCH_TOKENS = 65_536
PRECISION_VARIABLE = "BOOKWHEEL_PRECISION"
_CAPABILITIES_WITHOUT_AVX512 = ("DEFAULT", "AVX2")  # as torch names CPU capabilities


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded encoder on its device."""

    transformers_model: nn.Module | None  # for training and saving; None if `body` is `Bert`
    body: nn.Module | Bert  # maps token ids and attention mask to hidden states
    projection: nn.Module | None  # DPR's `encode_proj`
    spec: EncoderSpec
    dim: int
    pad_id: int  # RoBERTa derives positions from it
    device: torch.device
    dtype: torch.dtype
    batch_tokens: int

    @torch.inference_mode()
    def encode(self, tokens: Sequence[TokenIds], *, batch_invariant: bool = False) -> npt.NDArray[np.float32]:
        """Return the (n, d) float32 vectors of inputs, in order; on CUDA the host waits once, at
        the end.

        `batch_invariant` vectors do not depend on the other inputs: bit for bit on a CPU, up to
        rounding on a GPU.

        Raises:
            ResourceError: a GPU's memory does not hold one input. Batches that do not fit are
                halved.
        """
        out = torch.empty((len(tokens), self.dim), device=self.device)
        run = self._forward_packed if batch_invariant and self._can_pack else self.forward
        batches = self.split_into_batches([len(ids) for ids in tokens], batch_invariant=batch_invariant)
        for rows, vectors in run_batches(batches, lambda rows: run([tokens[row] for row in rows])):
            out[_move_to(torch.from_numpy(rows), self.device)] = vectors  # (b,) positions; (b, d)
        result: npt.NDArray[np.float32] = out.cpu().numpy()
        return result

    def split_into_batches(self, lengths: Sequence[int], *, batch_invariant: bool) -> Iterator[npt.NDArray[np.int64]]:
        """Yield batches of row numbers for inputs of these lengths, longest inputs first.

        On a GPU only the token budget limits a batch: its kernels round by the batch anyway, and
        every new shape of a batch costs about 45 ms with cuDNN's attention (H200, torch 2.11). With
        a budget, the same few shapes recur.
        """
        if not batch_invariant or self.device.type == "cuda":
            return batch_by_length(lengths, self.batch_tokens)
        if self._can_pack:
            return batch_without_padding(lengths, self.batch_tokens)
        min_tokens = min(BATCH_INVARIANT_TOKENS, self.batch_tokens)
        return batch_by_length(lengths, self.batch_tokens, min_tokens, mix_lengths=isinstance(self.body, Bert))

    def forward(self, batch: Sequence[TokenIds], multiple: int = LENGTH_MULTIPLE) -> Tensor:
        """Return the (b, d) float32 vectors of one batch, with gradient; pads to a multiple of
        `multiple` tokens.
        """
        lengths = np.array([len(ids) for ids in batch])
        # (t,) < (b, 1) -> (b, t)
        is_token = np.arange(pad_length(int(lengths.max()), multiple)) < lengths[:, None]
        ids = np.full(is_token.shape, self.pad_id, np.int64)
        ids[is_token] = np.concatenate(batch)  # ragged -> (b, t), padded at the end
        mask = None if is_token.all() else _move_to(torch.from_numpy(is_token), self.device)
        hidden = self.body(
            input_ids=_move_to(torch.from_numpy(ids), self.device),
            attention_mask=None if mask is None else mask.long(),
        )[0]
        # (b, t, h) -> (b, h)
        pooled = self._pool(hidden, mask, _move_to(torch.from_numpy(lengths), self.device))
        return self._project(pooled)

    @property
    def _can_pack(self) -> bool:
        """Whether packing is faster than padding: bf16 kernels need padded lengths, and a GPU few
        kernel launches.
        """
        return isinstance(self.body, Bert) and self.device.type == "cpu" and self.dtype == torch.float32

    def _forward_packed(self, batch: Sequence[TokenIds]) -> Tensor:
        """Return the (b, d) float32 vectors of inputs without padding; inputs of equal length must
        be adjacent.
        """
        assert isinstance(self.body, Bert)
        # Each (b, t)
        groups = [torch.from_numpy(np.stack([*group])).long() for _, group in groupby(batch, len)]
        pooled = [
            self._pool(states, None, torch.full(states.shape[:1], states.shape[1]))
            for states in self.body.forward_packed(groups)
        ]
        return self._project(torch.cat(pooled))  # (b, h) of each group -> (b, d)

    def _project(self, vectors: Tensor) -> Tensor:
        if self.projection is not None:
            vectors = self.projection(vectors.to(self.dtype)).float()  # (b, h) -> (b, d)
        vectors = vectors[:, : self.dim]  # (b, h) -> (b, d); d < h if the spec has `truncate_dim`
        return nn.functional.normalize(vectors) if self.spec.normalize else vectors

    def _pool(self, hidden: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:
        if self.spec.pooling == "cls":
            return hidden[:, 0].float()  # (b, t, h) -> (b, h)
        if self.spec.pooling == "last":
            # (b, t, h) -> (b, h): the last real token
            return hidden[torch.arange(len(hidden), device=self.device), lengths - 1].float()
        if mask is not None:
            hidden = hidden.masked_fill(~mask[..., None], 0)  # (b, t) -> (b, t, 1)
        # (b, t, h) -> (b, h), divided by (b, 1)
        return hidden.sum(1, dtype=torch.float32) / lengths[:, None]


def training_length_multiple(device: torch.device) -> int:
    """Return the length multiple of training batches: 1 for float32 on a CPU, where padding gains
    nothing.
    """
    return 1 if device.type == "cpu" and not torch.is_autocast_enabled("cpu") else LENGTH_MULTIPLE


def load_model(
    folder: Path, spec: EncoderSpec, device: str | None = None, dtype: str | None = None, *, trainable: bool = False
) -> Model:
    """Load the encoder of `folder`, by default on one of the GPUs, else on the CPU.

    Inference with BERT and RoBERTa does not need transformers; a `trainable` model is always one of
    transformers.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
        MissingExtraError: transformers is needed and not installed.
        UsageError: this machine has no such device.
    """
    check_is_encoder(folder)
    resolved_device, resolved_dtype = resolve_device_and_dtype(device, dtype)
    if not trainable:
        check_config(folder)
        if (bert := Bert.load(folder, resolved_device, resolved_dtype)) is not None:
            sizes = bert.sizes
            return Model(
                None,
                bert,
                None,
                spec,
                spec.truncate_dim or sizes.hidden,
                sizes.pad_id,
                resolved_device,
                resolved_dtype,
                _batch_token_budget(resolved_device),
            )
    require("transformers", "model")
    transformers_model = import_module("rag_model.encoders.pretrained").load_transformer(folder, resolved_dtype)
    return wrap_transformers_model(transformers_model, spec, resolved_device)


def wrap_transformers_model(
    transformers_model: Any, spec: EncoderSpec, device: torch.device, batch_tokens: int | None = None
) -> Model:
    """Create a `Model` from a transformers model in memory; its dtype does not change."""
    transformers_model.to(device).eval()
    dpr_encoder = getattr(transformers_model, DPR_ENCODERS.get(type(transformers_model).__name__, ""), None)
    body, projection = (
        (dpr_encoder.bert_model, getattr(dpr_encoder, "encode_proj", None))
        if dpr_encoder
        else (transformers_model, None)
    )
    dim = projection.out_features if projection is not None else transformers_model.config.hidden_size
    pad_id = getattr(transformers_model.config, "pad_token_id", None) or 0
    return Model(
        transformers_model,
        body,
        projection,
        spec,
        spec.truncate_dim or dim,
        pad_id,
        device,
        transformers_model.dtype,
        batch_tokens or _batch_token_budget(device),
    )


def _batch_token_budget(device: torch.device) -> int:
    return CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS


def choose_process_device() -> str:
    """Return the device of this process: a GPU that it claims, or the CPU if there is none.

    One of several processes of a training uses the GPU that its launcher assigned.
    """
    if torch.cuda.is_available() and torch.distributed.is_available() and torch.distributed.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return f"cuda:{claim_gpu(torch.cuda.device_count())}" if torch.cuda.is_available() else "cpu"


def resolve_device_and_dtype(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Return the torch device and dtype; None selects a GPU, else the CPU, and the fastest dtype on
    that device.

    Raises:
        UsageError: this machine has no such device.
    """
    resolved = resolve_device(device)
    return resolved, getattr(torch, dtype) if dtype else fastest_dtype(resolved)


def resolve_device(name: str | None) -> torch.device:
    """Return the torch device (`cpu`, `cuda:1`); None selects one of the GPUs, else the CPU.

    Raises:
        UsageError: this machine has no such device.
    """
    if name is None:
        name = choose_process_device()
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"this machine has no {name}: install a CUDA build of torch, or use cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is unknown: use cpu or cuda:0") from error


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for GPUs and for CPUs with AVX512-BF16 or AMX, else float32.

    With `ATEN_CPU_CAPABILITY=avx2` a process gets float32, like a processor without AVX512.
    """
    lacks_avx512 = torch.backends.cpu.get_cpu_capability() in _CAPABILITIES_WITHOUT_AVX512
    has_fast_bf16 = device.type == "cuda" or (torch.cpu._is_avx512_bf16_supported() and not lacks_avx512)
    return torch.bfloat16 if has_fast_bf16 else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name.

    Raises:
        UsageError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype {name!r} is unknown: use float32, bfloat16 or float16")
    return dtype


def choose_inference_dtype(device: str | torch.device | None = None) -> str:
    """Return the dtype of a cross-encoder or a generator that is not trained.

    It is bfloat16 on a GPU that computes in it, else float32. `BOOKWHEEL_PRECISION=float32` in the
    environment selects float32 everywhere. `device` is as in `resolve_device`.

    Raises:
        UsageError: the environment names another precision.
    """
    precision = os.environ.get(PRECISION_VARIABLE) or "auto"
    if precision not in ("auto", "float32"):
        raise UsageError(f"{PRECISION_VARIABLE} is {precision!r}: use auto or float32")
    uses_gpu = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
    has_bf16 = uses_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if precision == "auto" and has_bf16 else "float32"


def list_inference_inputs() -> dict[str, str]:
    """Return the dtype of `choose_inference_dtype` as an input of a memo key; nothing for float32.

    Results of different dtypes must not be mixed; most are of float32, which needs no mention.
    """
    dtype = choose_inference_dtype()
    return {} if dtype == "float32" else {"dtype": dtype}


def _move_to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
