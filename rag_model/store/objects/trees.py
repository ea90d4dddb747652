"""A folder of symbolic links, so that blobs can be read under the names they have in a snapshot."""

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from rag_model.digest import digest_json
from rag_model.errors import StoreError
from rag_model.store.objects.cache import cache_folder


def linked_tree(targets: Mapping[str, Path]) -> Path:
    """Return a folder in the cache that holds a link to each target under its relative path, made once.

    Raises:
        StoreError: the cache folder cannot be written.
    """
    identity = digest_json({name: str(target) for name, target in targets.items()}).partition(":")[2]
    folder = cache_folder() / "trees" / identity
    if folder.is_dir():  # its targets exist: the caller has just fetched them
        return folder
    building = folder.with_name(f".{secrets.token_hex(8)}")
    try:
        for name, target in targets.items():
            link = building / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        building.rename(folder)  # atomic: complete or absent
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if not folder.is_dir():  # otherwise another process made the same one first
            raise StoreError(f"cannot write the cache folder {folder.parent}: {error.strerror}") from error
    return folder
