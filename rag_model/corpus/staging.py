"""Files that planning makes for the workers: written locally, then handed to the caller's `stage`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs

from rag_model.errors import ResourceError

Stage = Callable[[Path], str]  # puts a local file where workers can read it, and returns its URL

RATIO = 4  # estimated text bytes per compressed byte, used as weight of parts: zlib's real ratio differs by machine


def put(stage: Stage, path: Path) -> str:
    """Stage a file and return its URL; delete the local file unless the URL is its own path."""
    url = stage(path)
    fs, place = url_to_fs(url)
    stays = "file" in fs.protocol and Path(place) == path.absolute()
    if not stays:
        path.unlink(missing_ok=True)
    return url


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise a write error of the block as one sentence that names `folder`."""
    try:
        yield
    except OSError as refused:
        raise ResourceError(
            f"cannot write to {folder} ({refused.strerror or refused}): free space there or choose another folder"
        ) from refused
