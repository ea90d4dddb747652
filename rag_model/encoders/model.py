"""Run transformer encoders, which map token ids to vectors, on one device."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    pad_rows,
    run_batches,
)
from rag_model.errors import UsageError
from rag_model.extras import require
from rag_model.process import claim_gpu

# Tokens per batch, including padding. On two cores with AMX, 2,048 to 4,096 tokens are the fastest,
# because larger batches do not fit into the cache. On a GPU the batches must be large enough that
# kernel launches cost little.
CPU_BATCH_TOKENS = 4096
CUDA_BATCH_TOKENS = 65_536
PRECISION_VARIABLE = "BOOKWHEEL_PRECISION"
_CAPABILITIES_WITHOUT_AVX512 = ("DEFAULT", "AVX2")  # names of CPU capabilities in torch


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded encoder on its device."""

    # the whole model, for training and saving; None if `body` is `Bert`
    transformers_model: nn.Module | None
    body: nn.Module | Bert  # module that maps token ids and attention mask to hidden states
    projection: nn.Module | None  # DPR's `encode_proj`; None for other models
    spec: EncoderSpec
    dim: int
    pad_id: int  # padding id, from which RoBERTa derives positions
    device: torch.device
    dtype: torch.dtype
    batch_tokens: int  # maximum tokens per batch, including padding

    @torch.inference_mode()
    def encode(self, token_ids: Sequence[TokenIds], *, batch_invariant: bool = False) -> npt.NDArray[np.float32]:
        """Return the (n, d) float32 vectors of inputs, in order; the host waits for CUDA only
        once, at the end.

        With `batch_invariant`, a vector does not depend on the other inputs: bit for bit on a CPU,
        and up to rounding on a GPU.

        Raises:
            ResourceError: a single input does not fit into the GPU's memory. Larger batches that do
                not fit are halved.
        """
        vectors_by_row = torch.empty((len(token_ids), self.dim), device=self.device)
        compute_vectors = self._forward_packed if batch_invariant and self._can_pack else self.forward
        batches = self.split_into_batches([len(ids) for ids in token_ids], batch_invariant=batch_invariant)
        for batch_rows, vectors in run_batches(batches, lambda rows: compute_vectors([token_ids[row] for row in rows])):
            # (b, d) vectors of (b,) rows
            vectors_by_row[_move_to(torch.from_numpy(batch_rows), self.device)] = vectors
        vectors_array: npt.NDArray[np.float32] = vectors_by_row.cpu().numpy()
        return vectors_array

    def split_into_batches(self, lengths: Sequence[int], *, batch_invariant: bool) -> Iterator[npt.NDArray[np.int64]]:
        """Yield batches of row numbers for inputs of these lengths, longest inputs first.

        On a GPU only `batch_tokens` limits a batch. Results of GPU kernels depend on the batch
        anyway, and every new batch shape costs about 45 ms with cuDNN's attention (H200, torch
        2.11). With a limit of tokens, the same few shapes recur.
        """
        if not batch_invariant or self.device.type == "cuda":
            return batch_by_length(lengths, self.batch_tokens)
        if self._can_pack:
            return batch_without_padding(lengths, self.batch_tokens)
        min_tokens = min(BATCH_INVARIANT_TOKENS, self.batch_tokens)
        return batch_by_length(lengths, self.batch_tokens, min_tokens, mix_lengths=isinstance(self.body, Bert))

    def forward(self, batch: Sequence[TokenIds], length_multiple: int = LENGTH_MULTIPLE) -> Tensor:
        """Return the (b, d) float32 vectors of one batch, with gradient.

        Inputs are padded to the longest one, rounded up to a multiple of `length_multiple` tokens.
        """
        lengths = np.array([len(ids) for ids in batch])
        ids, is_token = pad_rows(batch, pad_length(int(lengths.max()), length_multiple), self.pad_id)
        padding_mask = None if is_token.all() else _move_to(torch.from_numpy(is_token), self.device)
        hidden_states = self.body(
            input_ids=_move_to(torch.from_numpy(ids), self.device),
            attention_mask=None if padding_mask is None else padding_mask.long(),
        )[0]
        # (b, t, h) -> (b, h)
        pooled_states = self._pool(hidden_states, padding_mask, _move_to(torch.from_numpy(lengths), self.device))
        return self._project(pooled_states)

    @property
    def _can_pack(self) -> bool:
        """Whether packing is faster than padding. It is faster only for float32 on a CPU, because
        bf16 kernels need padded lengths, and a GPU needs few kernel launches.
        """
        return isinstance(self.body, Bert) and self.device.type == "cpu" and self.dtype == torch.float32

    def _forward_packed(self, batch: Sequence[TokenIds]) -> Tensor:
        """Return the (b, d) float32 vectors of inputs without padding; inputs of equal length must
        be adjacent.
        """
        assert isinstance(self.body, Bert)
        # Each (b, t)
        id_groups = [torch.from_numpy(np.stack([*group])).long() for _, group in groupby(batch, len)]
        pooled_states = [
            self._pool(hidden_states, None, torch.full(hidden_states.shape[:1], hidden_states.shape[1]))
            for hidden_states in self.body.forward_packed(id_groups)
        ]
        return self._project(torch.cat(pooled_states))  # (b, h) of each group -> (b, d)

    def _project(self, vectors: Tensor) -> Tensor:
        if self.projection is not None:
            vectors = self.projection(vectors.to(self.dtype)).float()  # (b, h) -> (b, d)
        vectors = vectors[:, : self.dim]  # (b, h) -> (b, d); d < h if the spec has `truncate_dim`
        return nn.functional.normalize(vectors) if self.spec.normalize else vectors

    def _pool(self, hidden_states: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:
        if self.spec.pooling == "cls":
            return hidden_states[:, 0].float()  # (b, t, h) -> (b, h)
        if self.spec.pooling == "last":
            # (b, t, h) -> (b, h): the last real token
            return hidden_states[torch.arange(len(hidden_states), device=self.device), lengths - 1].float()
        if mask is not None:
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0)  # (b, t) -> (b, t, 1)
        # (b, t, h) -> (b, h), divided by (b, 1)
        return hidden_states.sum(1, dtype=torch.float32) / lengths[:, None]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode (no dropout) for the block, then restore the mode of each submodule."""
    training_modules = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training_modules:
            submodule.training = True


def get_training_length_multiple(device: torch.device) -> int:
    """Return the multiple to which training batches are padded: 1 for float32 on a CPU, where
    padding has no benefit.
    """
    return 1 if device.type == "cpu" and not torch.is_autocast_enabled("cpu") else LENGTH_MULTIPLE


def load_model(
    folder: Path, spec: EncoderSpec, device: str | None = None, dtype: str | None = None, *, trainable: bool = False
) -> Model:
    """Load the encoder in `folder`, by default on one of the GPUs, or else on the CPU.

    BERT and RoBERTa run without the package `transformers`, unless `trainable` is set.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
        MissingExtraError: transformers is needed and not installed.
        UsageError: this machine has no such device.
    """
    check_is_encoder(folder)
    resolved_device, resolved_dtype = resolve_device_and_dtype(device, dtype)
    if not trainable:
        check_config(folder)
        if (bert_encoder := Bert.load(folder, resolved_device, resolved_dtype)) is not None:
            model_sizes = bert_encoder.sizes
            return Model(
                None,
                bert_encoder,
                None,
                spec,
                spec.truncate_dim or model_sizes.hidden,
                model_sizes.pad_id,
                resolved_device,
                resolved_dtype,
                get_max_batch_tokens(resolved_device),
            )
    require("transformers", "model")
    transformers_model = import_module("rag_model.encoders.pretrained").load_transformer(folder, resolved_dtype)
    return wrap_transformers_model(transformers_model, spec, resolved_device)


def wrap_transformers_model(transformers_model: Any, spec: EncoderSpec, device: torch.device) -> Model:
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
        get_max_batch_tokens(device),
    )


def get_max_batch_tokens(device: torch.device) -> int:
    """Return the maximum number of tokens per batch on a device, padding included."""
    return CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS


def choose_process_device() -> str:
    """Return the device of this process: a GPU that it claims, or the CPU if there is none.

    In a training with several processes, each uses the GPU that the launcher assigned.
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
    resolved_device = resolve_device(device)
    resolved_dtype = getattr(torch, dtype) if dtype else choose_fastest_dtype(resolved_device)
    return resolved_device, resolved_dtype


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


def choose_fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for GPUs and for CPUs with AVX512-BF16 or AMX, else float32.

    With `ATEN_CPU_CAPABILITY=avx2` a process gets float32, like a processor without AVX512.
    """
    lacks_avx512 = torch.backends.cpu.get_cpu_capability() in _CAPABILITIES_WITHOUT_AVX512
    has_fast_bf16 = device.type == "cuda" or (torch.cpu._is_avx512_bf16_supported() and not lacks_avx512)
    return torch.bfloat16 if has_fast_bf16 else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of torch with this name.

    Raises:
        UsageError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype {name!r} is unknown: use float32, bfloat16 or float16")
    return dtype


def choose_inference_dtype(device: str | torch.device | None = None) -> str:
    """Return the dtype of a cross-encoder or a generator that is not trained.

    The dtype is bfloat16 on a GPU that computes in it, else float32. `BOOKWHEEL_PRECISION=float32`
    in the environment selects float32 everywhere. For `device`, see `resolve_device`.

    Raises:
        UsageError: the environment names another precision.
    """
    precision = os.environ.get(PRECISION_VARIABLE) or "auto"
    if precision not in ("auto", "float32"):
        raise UsageError(f"{PRECISION_VARIABLE} is {precision!r}: use auto or float32")
    uses_gpu = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
    has_bf16 = uses_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if precision == "auto" and has_bf16 else "float32"


def list_dtype_memo_inputs() -> dict[str, str]:
    """Return the dtype of `choose_inference_dtype` as an input of a memo key; empty for float32.

    Results in different dtypes thus have different keys; float32, the usual dtype, adds nothing.
    """
    dtype = choose_inference_dtype()
    return {} if dtype == "float32" else {"dtype": dtype}


def _move_to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
