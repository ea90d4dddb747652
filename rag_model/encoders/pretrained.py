"""Load a Hugging Face folder with transformers, after its config was checked: a folder decides numbers, never code.

transformers obeys what `config.json` names beside the sizes of the model. With the package `kernels` it fetches the
attention code that is named there from the hub, and runs it, whatever `trust_remote_code` says; with `peft` it opens
another folder, which an adapter names. A method of quantisation imports packages of its own. And it builds as many
layers and labels as the config says, before it looks at the tensors.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.weights import stored_tensors
from rag_model.errors import InputError

_ADAPTER = "adapter_config.json"
_QUANTISED = ("quantization_config", "compression_config")
_IMPLEMENTATIONS = {  # of torch itself; flash_attention_2 and all others may be fetched from the hub
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
_POSITIONS = ("relative_key", "relative_key_query", "alibi")  # transformers no longer reads them, and does not say so
_FOREIGN = re.compile(r"timm|backbone")  # of vision models, which load weights and code of other packages
_LAYERS = re.compile(r"(^|_)layers?$")  # num_hidden_layers, encoder_layers, n_layer
_COUNTS = re.compile(r"(^|_)(labels|heads|experts|groups|blocks|group_num)$")
_MOST = 10_000  # labels, heads, experts: each is an object
os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers would also fetch kernels that no config names


def load_pretrained(kind: Any, folder: Path, noun: str, advice: str, **given: Any) -> Any:
    """Return what `kind.from_pretrained` makes of a folder; nothing is fetched, and no code of the folder runs.

    Args:
        kind: a class of transformers: of models, configs or tokenizers.
        folder: the model's.
        noun: what the model is, for errors.
        advice: what to do if transformers cannot read the folder.
        given: further arguments.

    Raises:
        InputError: as `check_config`, or transformers cannot read the folder.
    """
    check_config(folder)
    _quieten()
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **given)
    except Exception as broken:  # whatever follows from a strange config: divisions by zero, absent packages, memory
        sentence = str(broken).strip().partition("\n")[0] or type(broken).__name__
        raise InputError(f"{noun} {folder} cannot be loaded ({sentence}): {advice}") from broken


@cache
def _quieten() -> None:
    """Keep transformers' warnings and bars off the terminal."""
    logging = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_config(folder: Path) -> None:
    """Check what the config of a folder asks of transformers; a folder without one, of a GGUF file, asks nothing.

    Raises:
        InputError: it names code to load, quantised weights, positions that are not absolute or an adapter, or more
            layers, heads or labels than the model can have; or a file is missing or corrupt.
    """
    if (folder / _ADAPTER).exists():
        raise InputError(f"model {folder} is an adapter ({_ADAPTER}): merge it into its model, and give that folder")
    if not (folder / CONFIG).is_file():
        return
    tensors = len(stored_tensors(folder))
    for key, value in _entries(read_object(folder / CONFIG)):
        if (why := _unwanted(key, value) or _too_many(key, value, tensors)) is not None:
            raise InputError(f"model file {folder / CONFIG} {why}")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all objects in a JSON value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from one.items()
            left += one.values()
        elif isinstance(one, list):
            left += one


def _unwanted(key: str, value: Any) -> str | None:
    for name, known in _IMPLEMENTATIONS.items():
        named = value.values() if isinstance(value, dict) else [value]
        if name in key and not all(one is None or one in known for one in named):
            return f"names {key} {_shown(value)}, which is code of others: remove it, or choose {', '.join(known)}"
    if key in _QUANTISED and value:
        return f"has a {key}, and quantised weights are not read: save the model as fp32, fp16 or bf16"
    if key == "position_embedding_type" and value in _POSITIONS:
        return f"says {key} {_shown(value)}, and such positions are not read: give a model whose positions are absolute"
    if value and (_FOREIGN.search(key) or (key == "model_type" and _FOREIGN.search(str(value)))):
        return f"names {_shown(key)} {_shown(value)}, and models of images are not read: give a model of texts"
    return None


def _too_many(key: str, value: Any, tensors: int) -> str | None:
    most = tensors if _LAYERS.search(key) else _MOST if _COUNTS.search(key) else None
    if most is None or not isinstance(value, int) or value <= most:
        return None
    held = f"its weights have {tensors} tensors" if most == tensors else f"at most {_MOST:,} are possible"
    return f"says {key} {_shown(value)}, but {held}: fetch the model again"


def _shown(value: Any) -> str:
    """Return a value of others for an error: in one line, not too long."""
    return ascii(value)[:60]
