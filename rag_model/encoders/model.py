"""The model itself: token ids in, vectors out, on one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.utils import logging

from rag_model.encoders.spec import Pooling, read_json
from rag_model.encoders.weights import weight_files
from rag_model.errors import InputError

logging.set_verbosity_error()
logging.disable_progress_bar()
_DPR_ENCODERS = {"DPRContextEncoder": "ctx_encoder", "DPRQuestionEncoder": "question_encoder"}


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded encoder: transformer, optional projection (DPR's `encode_proj`), and what batching must know."""

    body: nn.Module
    projection: nn.Module | None
    pad_id: int
    dim: int
    device: torch.device
    dtype: torch.dtype


def has_fast_bf16() -> bool:
    """Say whether this CPU multiplies bf16 matrices faster than fp32 ones (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def load_model(folder: Path, device: str | None = None, dtype: str | None = None) -> Model:
    """Load the encoder of `folder` for inference.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = getattr(torch, dtype) if dtype else _best_dtype(where)
    weight_files(folder)
    config = read_json(folder / "config.json")
    if config.get("is_encoder_decoder"):
        raise InputError(
            f"encoder {folder} is a {config.get('model_type')} model, which generates text: give a bi-encoder (BERT, DPR, MPNet, …)"
        )
    body, projection = _load(folder, kind)
    body.to(where).eval()
    if projection is not None:
        projection.to(where).eval()
    loaded = body.config
    return Model(
        body,
        projection,
        int(loaded.pad_token_id or 0),
        int(projection.out_features if projection else loaded.hidden_size),
        where,
        kind,
    )


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda" or has_fast_bf16():
        return torch.bfloat16
    return torch.float32


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    architecture = next(iter(config.architectures or [""]))
    if config.model_type == "dpr":
        if architecture not in _DPR_ENCODERS:
            raise InputError(
                f"encoder {folder} is a {architecture}: give a DPRContextEncoder or a DPRQuestionEncoder"
            )
        import transformers

        whole = getattr(transformers, architecture).from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True
        )
        inner = getattr(whole, _DPR_ENCODERS[architecture])
        return inner.bert_model, getattr(inner, "encode_proj", None)
    kwargs = (
        {"add_pooling_layer": False}
        if config.model_type in {"bert", "roberta", "xlm-roberta", "mpnet"}
        else {}
    )
    return AutoModel.from_pretrained(
        str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, **kwargs
    ), None


def pool(hidden: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector a row: (n, length, d) hidden states and (n,) real lengths to (n, d) float32."""
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    real = torch.arange(hidden.shape[1], device=hidden.device)[None, :] < lengths[:, None]
    return (hidden.float() * real[..., None]).sum(1) / lengths[:, None]


@torch.inference_mode()
def forward(
    model: Model, batch: Sequence[npt.NDArray[np.int32]], pooling: Pooling, *, normalize: bool
) -> Tensor:
    """Encode one batch of token ids, right-padded to its longest: (n, d) float32 on the model's device."""
    lengths = torch.tensor([len(ids) for ids in batch])
    ids = torch.full((len(batch), int(lengths.max())), model.pad_id)
    for row, tokens in zip(ids, batch, strict=True):
        row[: len(tokens)] = torch.from_numpy(tokens)
    mask = (
        None
        if bool((lengths == ids.shape[1]).all())
        else (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    )
    ids, lengths = ids.to(model.device), lengths.to(model.device)
    hidden = model.body(
        input_ids=ids, attention_mask=None if mask is None else mask.to(model.device)
    ).last_hidden_state
    vectors = pool(hidden, lengths, pooling)
    if model.projection is not None:
        vectors = model.projection(vectors.to(model.dtype)).float()
    return nn.functional.normalize(vectors) if normalize else vectors
