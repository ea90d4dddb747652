"""The chunker of a build, whose setting files are stored for the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.chunkers.chunker import digest_files, is_single_file, list_setting_files
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.store import Store

SettingFiles = tuple[tuple[str, tuple[tuple[str, BlobRef], ...]], ...]  # by setting: (name, blob)


@dataclass(frozen=True, slots=True)
class StoredChunker:
    """A chunk recipe whose file settings are replaced by digests, and the stored files."""

    recipe: ChunkRecipe
    files: SettingFiles = ()


def store_chunker(store: Store, recipe: ChunkRecipe) -> StoredChunker:
    """Store the files that a recipe's settings name, so that later changes do not affect the build.

    Raises:
        InputError: a file is missing.
        StoreError: the store is full or unwritable.
    """
    setting_files = list_setting_files(recipe.create_chunker())
    stored = {
        setting: {name: store.blobs.put_file(file) for name, file in files.items()}
        for setting, files in setting_files.items()
    }
    digests = {setting: digest_files({name: ref.id for name, ref in refs.items()}) for setting, refs in stored.items()}
    blobs_by_setting = tuple((setting, tuple(refs.items())) for setting, refs in stored.items())
    return StoredChunker(replace(recipe, settings={**recipe.settings, **digests}), blobs_by_setting)


def local_paths(store: Store, files: SettingFiles) -> dict[str, Path]:
    """Return the local paths of each setting's files; fetch them if needed.

    Raises:
        StoreError: a file is missing or damaged.
    """
    return {setting: _local_path(store, dict(refs)) for setting, refs in files}


def _local_path(store: Store, refs: Mapping[str, BlobRef]) -> Path:
    paths = {name: store.blobs.get_local_path(ref) for name, ref in refs.items()}
    return next(iter(paths.values())) if is_single_file(paths) else build_link_tree(paths)
