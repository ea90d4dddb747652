"""A folder of files kept as blobs, as an encoder is: put once, and laid out again wherever it is needed."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rag_model.store.blobs import BlobRef
from rag_model.store.store import Store

Folder = tuple[tuple[str, BlobRef], ...]  # (relative path, blob), sorted by path; hashable


def put_folder(store: Store, folder: Path, files: Sequence[str]) -> Folder:
    """Store the named files of a local folder; what is there already is not copied again.

    Raises:
        StoreError: a file cannot be read, or the store cannot be written.
    """
    return tuple((name, store.blobs.put_file(folder / name)) for name in sorted(files))


@contextmanager
def laid_out(store: Store, files: Mapping[str, BlobRef] | Folder) -> Iterator[Path]:
    """Yield a local folder that holds the files, as links to local copies; it is gone after the block.

    Raises:
        StoreError: a blob is missing or damaged.
    """
    with tempfile.TemporaryDirectory(prefix="bookwheel-folder-") as folder:
        for name, ref in dict(files).items():
            link = Path(folder) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(store.blobs.local(ref).absolute())
        yield Path(folder)
