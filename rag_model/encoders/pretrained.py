"""Load a Hugging Face folder with transformers, after checking its config: a folder must never run
code.

`config.json` can make transformers do more than build a model of a given size. With the package
`kernels`, transformers downloads attention code that the config names and runs it, even if
`trust_remote_code` is False. With `peft` it opens the folder that an adapter names. Quantization
methods import further packages. And it creates as many layers and labels as the config says, before
it reads the tensors.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_model.encoders.architecture import DPR_ENCODERS
from rag_model.encoders.files import CONFIG, read_json_object
from rag_model.encoders.weights import read_tensor_headers
from rag_model.errors import InputError
from rag_model.extras import require
from rag_model.tokenizer import is_exception_or_panic

if TYPE_CHECKING:
    import torch

_ADAPTER = "adapter_config.json"
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Implementations in torch; all others, such as flash_attention_2, may be downloaded from the hub.
_ALLOWED_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# transformers ignores these values without an error.
_UNSUPPORTED_POSITIONS = "relative_key", "relative_key_query", "alibi"
# Keys of vision models, which load weights and code of other packages.
_VISION_KEYS = re.compile(r"timm|backbone")
_LAYER_KEYS = re.compile(r"(^|_)layers?$")  # num_hidden_layers, encoder_layers, n_layer
_COUNT_KEYS = re.compile(r"(^|_)(labels|heads|experts|groups|blocks|group_num)$")
_MAX_COUNT = 10_000  # maximum number of labels, heads or experts, each of which becomes an object
# Otherwise transformers may also download kernels that no config names.
os.environ.setdefault("USE_HUB_KERNELS", "NO")


def load_pretrained(auto_class: Any, folder: Path, noun: str, advice: str, **arguments: Any) -> Any:
    """Call `from_pretrained` of a transformers class, without downloads and without running code
    from the folder.

    Args:
        auto_class: a class of transformers for models, configs or tokenizers.
        folder: the folder of the model.
        noun: the kind of model, for errors.
        advice: what to do if transformers cannot read the folder.
        arguments: further arguments of `from_pretrained`.

    Raises:
        InputError: as for `check_config`, or transformers cannot read the folder.
    """
    check_config(folder)
    _silence_transformers()
    try:
        return auto_class.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **arguments)
    # An invalid config may raise any exception, such as a division by zero, or a panic of Rust
    # code.
    except BaseException as error:
        if not is_exception_or_panic(error):
            raise
        sentence = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"{noun} {folder} cannot be loaded ({sentence}): {advice}") from error


@cache
def _silence_transformers() -> None:
    """Switch off transformers' warnings and progress bars."""
    logging = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_config(folder: Path) -> None:
    """Check that transformers can safely read the config of a folder; a GGUF folder has no config.

    Raises:
        InputError: the config refers to code, quantized weights, positions that are not absolute or
            an adapter, or has more layers, heads or labels than the model can have; or a file is
            missing or corrupt.
    """
    if (folder / _ADAPTER).exists():
        raise InputError(f"model {folder} is an adapter ({_ADAPTER}): merge it into its model, and give that folder")
    if not (folder / CONFIG).is_file():
        return
    n_tensors = len(read_tensor_headers(folder))
    for key, value in _iter_entries(read_json_object(folder / CONFIG)):
        if (problem := _find_unsupported(key, value) or _find_excessive(key, value, n_tensors)) is not None:
            raise InputError(f"model file {folder / CONFIG} {problem}")


def _iter_entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all objects nested in a JSON value."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield from item.items()
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def _find_unsupported(key: str, value: Any) -> str | None:
    for name, allowed in _ALLOWED_IMPLEMENTATIONS.items():
        names = value.values() if isinstance(value, dict) else [value]
        if name in key and not all(choice is None or choice in allowed for choice in names):
            return (
                f"names {key} {_abbreviate(value)}, which is code of another package: "
                f"remove it, or choose {', '.join(allowed)}"
            )
    if key in _QUANTIZATION_KEYS and value:
        return f"has a {key}, and quantized weights are not supported: save the model as fp32, fp16 or bf16"
    if key == "position_embedding_type" and value in _UNSUPPORTED_POSITIONS:
        return (
            f"says {key} {_abbreviate(value)}, and such positions are not supported: give a model "
            "whose "
            "positions are absolute"
        )
    if value and (_VISION_KEYS.search(key) or (key == "model_type" and _VISION_KEYS.search(str(value)))):
        return f"names {_abbreviate(key)} {_abbreviate(value)}, and image models are not supported: give a text model"
    return None


def _find_excessive(key: str, value: Any, n_tensors: int) -> str | None:
    limit = n_tensors if _LAYER_KEYS.search(key) else _MAX_COUNT if _COUNT_KEYS.search(key) else None
    if limit is None or not isinstance(value, int) or value <= limit:
        return None
    reason = f"its weights have {n_tensors} tensors" if limit == n_tensors else f"at most {_MAX_COUNT:,} are possible"
    return f"says {key} {_abbreviate(value)}, but {reason}: fetch the model again"


def _abbreviate(value: Any) -> str:
    """Return an untrusted value for an error message: one line of at most 60 characters."""
    return ascii(value)[:60]


def load_transformer(folder: Path, dtype: "torch.dtype") -> Any:
    """Load the encoder in a folder with transformers, for DPR including its projection.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
    """
    return load_transformers_model(_choose_class(folder), folder, dtype, "give a bi-encoder")


def load_transformers_model(auto_class: Any, folder: Path, dtype: "torch.dtype", advice: str = "fetch it again") -> Any:
    """Load a transformers model from the safetensors in a folder, without running code from the
    folder.

    Raises:
        InputError: weights are missing or corrupt; if transformers cannot read them, the message
            ends with `advice`.
    """
    model, loading = load_pretrained(
        auto_class, folder, "encoder", advice, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    if missing_tensors := sorted(name for name in loading["missing_keys"] if "pooler" not in name):
        raise InputError(
            f"encoder {folder} lacks {len(missing_tensors)} tensors, the first is {missing_tensors[0]}: fetch it again"
        )
    return model


def _choose_class(folder: Path) -> Any:
    architecture = next(iter(read_json_object(folder / CONFIG).get("architectures") or [""]))
    transformers = require("transformers", "model")
    return getattr(transformers, architecture) if architecture in DPR_ENCODERS else transformers.AutoModel
