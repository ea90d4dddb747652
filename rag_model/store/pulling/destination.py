"""The destination of an export: a new folder on this machine or in a repository of the Hub."""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rag_model.atomic_write import TEMPORARY_PREFIX, fsync
from rag_model.errors import StoreError, UsageError
from rag_model.extras import require
from rag_model.secrets import refuse_secret, refuse_url_as_path
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store

Destination = Path | str  # a folder, hf://datasets/USER/NAME/FOLDER, or hf://USER/NAME for a model
_HUB = "hf://"


def parse_destination(text: str) -> Destination:
    """Parse the destination of an export: an `hf://` URL or a local path.

    Raises:
        UsageError: the text is another URL, or a URL that may contain a secret.
    """
    if text.startswith(_HUB):
        refuse_secret(text)
        return text
    refuse_url_as_path(Path(text))
    return Path(text)


def export_files(
    store: Store,
    files: Mapping[str, BlobRef],
    out: Destination,
    kind: Literal["dataset", "model"] = "dataset",
) -> int:
    """Write a version's files, each verified, to the new folder `out`; return the number of bytes.

    `kind` is the kind of repository, if `out` is on the Hub.

    Raises:
        StoreError: a file is missing or damaged, or `out` cannot be written.
        UsageError: `out` exists already.
    """
    with open_destination(out, kind) as folder:
        for path, ref in files.items():
            store.blobs.fetch(ref, folder / path)
    return sum(ref.size for ref in files.values())


@contextmanager
def open_destination(out: Destination, kind: Literal["dataset", "model"] = "dataset") -> Iterator[Path]:
    """Yield a temporary folder; rename it to `out` when the block succeeds, delete it on failure.

    Raises:
        StoreError: the folder cannot be written.
        UsageError: `out` exists already, or is in a repository of another kind.
    """
    try:
        if isinstance(out, Path):
            with _open_local_folder(out) as folder:
                yield folder
        else:
            require("huggingface_hub", "hub")
            open_commit = require("rag_model.store.objects.hub", "hub").open_commit
            with open_commit(out, kind, "Export by bookwheel") as folder:
                yield folder
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error


@contextmanager
def _open_local_folder(out: Path) -> Iterator[Path]:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already: give a new folder")
    staging = out.absolute().with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in staging.rglob("*"):
            fsync(path)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
