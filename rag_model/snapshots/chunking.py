"""The chunker of a build in the store, from which workers read the files that its settings name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.chunkers.files import digest_of, is_file, named_files
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.trees import linked_tree
from rag_model.store.store import Store

SettingFiles = tuple[tuple[str, tuple[tuple[str, BlobRef], ...]], ...]  # by setting: (name, blob)


@dataclass(frozen=True, slots=True)
class StoredChunker:
    """A recipe with digests in place of files, and these files in the store."""

    recipe: ChunkRecipe
    files: SettingFiles = ()


def store_chunker(store: Store, recipe: ChunkRecipe) -> StoredChunker:
    """Put the files that a recipe's settings name into the store; later changes to them do not reach the build.

    Raises:
        InputError: there is no such file.
        StoreError: the store is full or unwritable.
    """
    found = named_files(recipe.built())
    stored = {
        setting: {name: store.blobs.put_file(file) for name, file in files.items()} for setting, files in found.items()
    }
    digests = {setting: digest_of({name: ref.id for name, ref in refs.items()}) for setting, refs in stored.items()}
    kept = tuple((setting, tuple(refs.items())) for setting, refs in stored.items())
    return StoredChunker(replace(recipe, settings={**recipe.settings, **digests}), kept)


def local_paths(store: Store, files: SettingFiles) -> dict[str, Path]:
    """Return the local paths of the files of each setting; fetch them if needed.

    Raises:
        StoreError: a file is missing or damaged.
    """
    return {setting: _local(store, dict(refs)) for setting, refs in files}


def _local(store: Store, refs: Mapping[str, BlobRef]) -> Path:
    paths = {name: store.blobs.local(ref) for name, ref in refs.items()}
    return next(iter(paths.values())) if is_file(paths) else linked_tree(paths)
