"""Where an encoder's files are: a local folder, or a hub name fetched once; and which of them a question encoder needs."""

import json
from pathlib import Path

from rag_model.encoders.space import TOKENIZER_FILES, Space
from rag_model.encoders.spec import RECORD_FILE, EncoderSpec
from rag_model.encoders.weights import weight_files
from rag_model.errors import InputError
from rag_model.extras import require

_FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "*/config.json")


def resolve_folder(name: str | Path) -> Path:
    """Return the local folder of encoder `name`: a folder, or a hub name such as `intfloat/e5-small-v2`.

    Raises:
        InputError: it is no folder, and the hub has none of that name or can not be reached.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    if not isinstance(name, str) or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise InputError(
            f"encoder folder {name} does not exist: give a folder, or a hub name such as intfloat/e5-small-v2"
        )
    hub = require("huggingface_hub", "model")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as failed:  # the hub raises errors of many libraries
        raise InputError(
            f"encoder {name} is no folder here and could not be fetched from the hub ({type(failed).__name__}): "
            "check the name and the network, or give a local folder"
        ) from failed


def question_files(folder: Path, spec: EncoderSpec, space: Space, workdir: Path) -> dict[str, Path]:
    """Return the files, by flat name, that load again as a question encoder which asks into `space`.

    `bookwheel.json` is written into `workdir`; the others stay where they are.
    """
    record = workdir / RECORD_FILE
    record.write_text(
        json.dumps({"spec": spec.to_json(), "asks": space.to_json()}, indent=2, sort_keys=True) + "\n"
    )
    tokenizer = ["tokenizer.json"] if (folder / "tokenizer.json").is_file() else list(TOKENIZER_FILES)
    names = ["config.json", *tokenizer]
    files = [folder / name for name in names if (folder / name).is_file()] + weight_files(folder)
    return {**{path.name: path for path in files}, RECORD_FILE: record}
