"""Logits of pairs by torch, from the safetensors of a Hugging Face folder."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.model import CUDA_BATCH_TOKENS, device_named
from rag_model.encoders.pairs.onednn import with_onednn
from rag_model.encoders.pairs.tokens import PairBatch, check_scores_pairs
from rag_model.encoders.pretrained import load_pretrained
from rag_model.encoders.weights import weight_files
from rag_model.errors import InputError

CPU_BATCH_TOKENS = 1024  # padding included; a float32 MiniLM is 10 % slower with 4,096, which no cache holds


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A sequence classifier with one label, on one device; `load` makes one for inference."""

    whole: Any  # transformers': ids, mask and perhaps types to (b, 1) logits

    @classmethod
    def load(cls, folder: Path, device: str | None = None) -> Self:
        """Load the model of `folder` in float32, by default on one of the GPUs, else on the CPU.

        Raises:
            InputError: a file is missing or corrupt, or it is another kind of model, such as a bi-encoder.
            UsageError: this machine has no such device.
        """
        weight_files(folder)
        read_object(folder / CONFIG)
        check_scores_pairs(folder)
        where = device_named(device)
        whole, missing = load_classifier(folder)
        if missing:
            raise InputError(f"cross-encoder {folder} lacks {len(missing)} tensors, {missing[0]} first: fetch it again")
        whole = whole.to(where).eval().requires_grad_(False)
        return cls(with_onednn(whole) if where.type == "cpu" else whole)

    @property
    def batch_tokens(self) -> int:
        """Return how many tokens a batch may have, padding included."""
        return CUDA_BATCH_TOKENS if self.whole.device.type == "cuda" else CPU_BATCH_TOKENS

    @torch.inference_mode()
    def logits(self, batch: PairBatch) -> npt.NDArray[np.float32]:
        """Return the (b,) float32 logits of a batch."""
        told: npt.NDArray[np.float32] = self.forward(batch).cpu().numpy()
        return told

    def forward(self, batch: PairBatch) -> Tensor:
        """Return the (b,) float32 logits of a batch, with gradient where the weights have one."""
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if takes_types(self.whole):
            inputs["token_type_ids"] = batch.types
        here = {name: torch.from_numpy(values).to(self.whole.device) for name, values in inputs.items()}
        logits: Tensor = self.whole(**here).logits
        return logits[:, 0].float()  # (b, 1) -> (b,)


def load_classifier(folder: Path) -> tuple[Any, list[str]]:
    """Load a transformer with a head of one label, in float32 on the CPU, and name the tensors that `folder` lacks.

    Raises:
        InputError: a file is missing or corrupt, or transformers has no such head for the model.
    """
    whole, loading = load_pretrained(
        transformers.AutoModelForSequenceClassification,
        folder,
        "cross-encoder",
        "fetch it again",
        dtype=torch.float32,
        num_labels=1,
        use_safetensors=True,
        output_loading_info=True,
    )
    return whole, sorted(loading["missing_keys"])


def takes_types(whole: Any) -> bool:
    """Return whether a model tells the two texts apart by segment ids."""
    named = "token_type_ids" in inspect.signature(whole.forward).parameters
    return named and getattr(whole.config, "type_vocab_size", 0) > 1
