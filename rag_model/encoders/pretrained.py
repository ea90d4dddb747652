"""Load a Hugging Face folder with transformers, after checking its config: a folder must never run
code.

`config.json` can make transformers do more than build a model of a given size. With the package
`kernels`, transformers downloads attention code that the config names and runs it, even if
`trust_remote_code` is False. With the package `peft`, transformers opens the folder that an adapter
names. Quantization methods import further packages. And transformers creates as many layers and
labels as the config says, before it reads the tensors.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_model.encoders.architecture import DPR_ENCODERS
from rag_model.encoders.files import CONFIG, read_json_object, write_json
from rag_model.encoders.weights import WEIGHTS, read_tensor_headers
from rag_model.errors import InputError
from rag_model.extras import require
from rag_model.tokenizer import is_exception_or_panic

if TYPE_CHECKING:
    import torch

_FETCH_AGAIN = "fetch it again"
_POOLER = "pooler"
_ADAPTER = "adapter_config.json"
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Values of config keys that select torch's implementations. transformers may download any other
# implementation, such as flash_attention_2, from the hub.
_ALLOWED_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# Types of position embeddings that transformers ignores without an error.
_UNSUPPORTED_POSITIONS = "relative_key", "relative_key_query", "alibi"
# Keys of vision models, which load weights and code of other packages.
_VISION_KEYS = re.compile(r"timm|backbone")
_LAYER_KEYS = re.compile(r"(^|_)layers?$")  # num_hidden_layers, encoder_layers, n_layer
_COUNT_KEYS = re.compile(r"(^|_)(labels|heads|experts|groups|blocks|group_num)$")
_MAX_COUNT = 10_000  # maximum number of labels, heads or experts, each of which becomes an object
# Without this setting, transformers may download kernels even if no config names them.
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
        error_summary = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"{noun} {folder} cannot be loaded ({error_summary}): {advice}") from error


@cache
def _silence_transformers() -> None:
    """Switch off transformers' warnings and progress bars."""
    transformers_logging = import_module("transformers.utils.logging")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


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
    for key, value in _iter_json_members(read_json_object(folder / CONFIG)):
        if (problem_text := _describe_unsupported(key, value) or _describe_excess(key, value, n_tensors)) is not None:
            raise InputError(f"model file {folder / CONFIG} {problem_text}")


def _iter_json_members(json_value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all objects nested in a JSON value."""
    pending_values = [json_value]
    while pending_values:
        json_item = pending_values.pop()
        if isinstance(json_item, dict):
            yield from json_item.items()
            pending_values += json_item.values()
        elif isinstance(json_item, list):
            pending_values += json_item


def _describe_unsupported(key: str, value: Any) -> str | None:
    for name, allowed_names in _ALLOWED_IMPLEMENTATIONS.items():
        implementation_names = value.values() if isinstance(value, dict) else [value]
        if name in key and not all(choice is None or choice in allowed_names for choice in implementation_names):
            return (
                f"names {key} {_abbreviate(value)}, which is code of another package: "
                f"remove it, or choose {', '.join(allowed_names)}"
            )
    if key in _QUANTIZATION_KEYS and value:
        return f"has a {key}, and quantized weights are not supported: save the model as fp32, fp16 or bf16"
    if key == "position_embedding_type" and value in _UNSUPPORTED_POSITIONS:
        return (
            f"says {key} {_abbreviate(value)}, and such positions are not supported: give a model "
            "whose positions are absolute"
        )
    if value and (_VISION_KEYS.search(key) or (key == "model_type" and _VISION_KEYS.search(str(value)))):
        return f"names {_abbreviate(key)} {_abbreviate(value)}, and image models are not supported: give a text model"
    return None


def _describe_excess(key: str, config_value: Any, n_tensors: int) -> str | None:
    limit = n_tensors if _LAYER_KEYS.search(key) else _MAX_COUNT if _COUNT_KEYS.search(key) else None
    if limit is None or not isinstance(config_value, int) or config_value <= limit:
        return None
    reason = f"its weights have {n_tensors} tensors" if limit == n_tensors else f"at most {_MAX_COUNT:,} are possible"
    return f"says {key} {_abbreviate(config_value)}, but {reason}: fetch the model again"


def _abbreviate(untrusted_value: Any) -> str:
    """Return an untrusted value for an error message: one line of at most 60 characters."""
    return ascii(untrusted_value)[:60]


def load_transformer(folder: Path, dtype: "torch.dtype") -> Any:
    """Load the encoder in a folder with transformers, for DPR including its projection.

    Raises:
        InputError: weights are missing, pickled, corrupt, or of another kind of model.
    """
    return load_transformers_model(_choose_auto_class(folder), folder, dtype, "give a bi-encoder")


def load_transformers_model(auto_class: Any, folder: Path, dtype: "torch.dtype", advice: str = _FETCH_AGAIN) -> Any:
    """Load a transformers model from the safetensors in a folder, without running code from the
    folder.

    Raises:
        InputError: weights are missing or corrupt; if transformers cannot read them, the message
            ends with `advice`.
    """
    model, missing_tensors = load_weights(auto_class, folder, "encoder", dtype, advice)
    refuse_missing_tensors("encoder", folder, [name for name in missing_tensors if _POOLER not in name])
    return model


def load_weights(
    auto_class: Any, folder: Path, noun: str, dtype: "torch.dtype", advice: str = _FETCH_AGAIN, **arguments: Any
) -> tuple[Any, list[str]]:
    """Load a model like `load_pretrained`; return (model, names of the missing tensors).

    Raises:
        InputError: for the same reasons as `load_pretrained`.
    """
    model, loading_info = load_pretrained(
        auto_class, folder, noun, advice, dtype=dtype, use_safetensors=True, output_loading_info=True, **arguments
    )
    return model, sorted(loading_info["missing_keys"])


def refuse_missing_tensors(noun: str, folder: Path, names: Sequence[str]) -> None:
    """Raise an `InputError` if `names`, the names of missing tensors, is not empty."""
    if names:
        raise InputError(f"{noun} {folder} lacks {len(names)} tensors, the first is {names[0]}: {_FETCH_AGAIN}")


def check_body_is_complete(model: Any, folder: Path, missing_tensors: Sequence[str]) -> None:
    """Raise an `InputError` if tensors of a model's body are missing; a missing head can be
    trained.
    """
    names = [name for name in missing_tensors if name.startswith(f"{model.base_model_prefix}.")]
    refuse_missing_tensors("model", folder, [name for name in names if not is_pooler(name)])


def is_pooler(name: str) -> bool:
    """Return whether a tensor belongs to BERT's pooler, on which no vector and no logit depends."""
    return _POOLER in name.split(".")


def freeze_pooler(model: Any) -> None:
    """Freeze only BERT's pooler, because distributed training would wait for its gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_pooler(name))


def load_body(folder: Path, device: "torch.device", dtype: "torch.dtype") -> Any:
    """Load a transformer without a head, to be trained except for its pooler.

    Raises:
        InputError: for the same reasons as `load_transformers_model`.
    """
    body = load_transformers_model(require("transformers", "model").AutoModel, folder, dtype).to(device)
    freeze_pooler(body)
    return body


def save_body(body: Any, head_tensors: Mapping[str, "torch.Tensor"], architecture: str, folder: Path) -> None:
    """Write weights and config of a transformer without its pooler; `head_tensors` are added."""
    tensors = {f"{body.base_model_prefix}.{name}": tensor for name, tensor in body.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not is_pooler(name)} | {**head_tensors}
    save_file = require("safetensors.torch", "model").save_file
    contiguous_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous_tensors, folder / WEIGHTS, {"format": "pt"})
    config = {**body.config.to_diff_dict(), "architectures": [architecture], "dtype": "float32"}
    write_json(folder / CONFIG, {**config, "model_type": body.config.model_type})


def _choose_auto_class(folder: Path) -> Any:
    architecture = next(iter(read_json_object(folder / CONFIG).get("architectures") or [""]))
    transformers = require("transformers", "model")
    return getattr(transformers, architecture) if architecture in DPR_ENCODERS else transformers.AutoModel
