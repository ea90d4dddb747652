"""The new place that an export writes to: a folder of this machine, or one in a repository of the Hugging Face Hub."""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rag_model.errors import StoreError, UsageError
from rag_model.extras import require
from rag_model.landing import TEMPORARY, sync
from rag_model.secrets import refuse_secret, refuse_url
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

Destination = Path | str  # a folder, or hf://datasets/USER/NAME/FOLDER, hf://USER/NAME for a model
_HUB = "hf://"


def destination(named: str) -> Destination:
    """Return the place that a text names.

    Raises:
        UsageError: it is a URL of another kind, or one that may contain a secret.
    """
    if named.startswith(_HUB):
        refuse_secret(named)
        return named
    refuse_url(Path(named))
    return Path(named)


def write_files(
    store: Store, files: Mapping[str, BlobRef], out: Destination, kind: Literal["dataset", "model"] = "dataset"
) -> int:
    """Write a version's files, each verified, to the new folder `out`; return their bytes.

    `kind` is that of the repository, if `out` is in one.

    Raises:
        StoreError: a file is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already.
    """
    with new_folder(out, kind) as building:
        for path, ref in files.items():
            store.blobs.fetch(ref, building / path)
    return sum(ref.size for ref in files.values())


@contextmanager
def new_folder(out: Destination, kind: Literal["dataset", "model"] = "dataset") -> Iterator[Path]:
    """Yield a folder to fill, which appears as `out`, complete, when the block succeeds and is deleted when it fails.

    Raises:
        StoreError: the folder cannot be written.
        UsageError: `out` exists already, or is in a repository of another kind.
    """
    try:
        if isinstance(out, Path):
            with _local(out) as building:
                yield building
        else:
            require("huggingface_hub", "hub")
            committed = require("rag_model.store.pulling.commit", "hub").committed
            with committed(out, kind, "Export by bookwheel") as building:
                yield building
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error


@contextmanager
def _local(out: Path) -> Iterator[Path]:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"there is something at {out} already: give a new folder")
    building = out.absolute().with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    building.mkdir(parents=True)
    try:
        yield building
        for path in building.rglob("*"):
            sync(path)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
