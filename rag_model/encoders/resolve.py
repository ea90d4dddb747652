"""Find the files of an encoder, and those of its question encoder.

An encoder is named by a folder, or by a hub name, which is fetched once into the hub's own cache.
"""

import json
from pathlib import Path

from rag_model.encoders.files import CONFIG
from rag_model.encoders.space import Space, tokenizer_files
from rag_model.encoders.spec import RECORD_FILE, EncoderSpec
from rag_model.encoders.static_folder import static_body
from rag_model.encoders.weights import weight_files
from rag_model.errors import InputError
from rag_model.extras import require
from rag_model.secrets import refuse_secret

_FETCHED = ["*.json", "*.txt", "*.model", "*.safetensors"]
_OTHER_RUNTIMES = ["onnx/*", "openvino/*"]


def resolve_folder(name: str | Path) -> Path:
    """Return the local folder of model `name`: a folder, or a hub name such as `intfloat/e5-small-v2`.

    Raises:
        InputError: it is not a folder, and the hub has no such model or cannot be reached.
        UsageError: it is a URL that may contain a secret.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    refuse_secret(str(name))
    if isinstance(name, Path) or name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise InputError(f"there is no model folder {name}: give a folder, or a hub name such as intfloat/e5-small-v2")
    hub = require("huggingface_hub", "model")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_FETCHED, ignore_patterns=_OTHER_RUNTIMES))
    except Exception as failed:  # the hub may also raise any exception of its HTTP library
        raise InputError(
            f"model {name} is not a local folder, and cannot be fetched from the hub ({type(failed).__name__}):  "
            "check the name and the network, or give a local folder"
        ) from failed


def question_sibling(name: str) -> str:
    """Return the name of the question encoder that belongs to passage encoder `name`; most are the same encoder.

    >>> question_sibling("facebook/dpr-ctx_encoder-single-nq-base")
    'facebook/dpr-question_encoder-single-nq-base'
    """
    parent, slash, last = name.rstrip("/").rpartition("/")
    return parent + slash + last.replace("ctx_encoder", "question_encoder")


def question_files(folder: Path, spec: EncoderSpec, space: Space, workdir: Path) -> dict[str, Path]:
    """Return, by name, the files that form, in one flat folder, a question encoder for `space`.

    Its record, `bookwheel.json`, is written into `workdir`; the others are files of `folder`.

    Raises:
        InputError: `folder` has no weights or no tokenizer.
    """
    record = workdir / RECORD_FILE
    declared = {"asks": space.to_json(), "spec": spec.to_json()}
    record.write_text(json.dumps(declared, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    body = static_body(folder) if spec.is_static else folder
    configs = [] if spec.is_static and not (folder / CONFIG).is_file() else [folder / CONFIG]
    files = [*configs, *tokenizer_files(body), *weight_files(body), record]
    return {path.name: path for path in files}
