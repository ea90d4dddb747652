"""An encoder's transformer as transformers loads and saves it: what trains, and what `Bert` does not compute."""

from pathlib import Path
from typing import Any

import torch
import transformers

from rag_model.encoders.architecture import DPR_ENCODERS
from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.pretrained import load_pretrained
from rag_model.errors import InputError


def load_transformer(folder: Path, dtype: torch.dtype) -> Any:
    """Load the encoder of a folder, DPR's with its projection.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
    """
    return pretrained(_class_of(folder), folder, dtype, "give a bi-encoder")


def pretrained(kind: Any, folder: Path, dtype: torch.dtype, advice: str = "fetch it again") -> Any:
    """Load a transformers model of class `kind` from a folder, from safetensors alone; no code of the folder runs.

    Raises:
        InputError: weights are missing or corrupt; where transformers cannot read them, the sentence ends in `advice`.
    """
    whole, loading = load_pretrained(
        kind, folder, "encoder", advice, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(name for name in loading["missing_keys"] if "pooler" not in name):
        raise InputError(f"encoder {folder} lacks {len(missing)} tensors, the first is {missing[0]}: fetch it again")
    return whole


def _class_of(folder: Path) -> Any:
    architecture = next(iter(read_object(folder / CONFIG).get("architectures") or [""]))
    return getattr(transformers, architecture) if architecture in DPR_ENCODERS else transformers.AutoModel
