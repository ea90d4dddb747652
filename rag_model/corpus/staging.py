"""Files that planning makes for the workers: written locally, then handed to the caller's `stage`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs

from rag_model.errors import ResourceError

Stage = Callable[[Path], str]  # puts a local file where workers can read it, and returns its URL

RATIO = 4  # text bytes to a compressed byte, by which parts are weighed: zlib's own figure differs by machine


def put(stage: Stage, path: Path) -> str:
    """Stage a file, remove it here unless its URL is where it lies, and return the URL."""
    url = stage(path)
    fs, place = url_to_fs(url)
    stays = "file" in fs.protocol and Path(place) == path.absolute()
    if not stays:
        path.unlink(missing_ok=True)
    return url


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the disk under `folder` refuses into one sentence."""
    try:
        yield
    except OSError as refused:
        raise ResourceError(
            f"cannot write to {folder} ({refused.strerror or refused}): free space there or choose another folder"
        ) from refused
