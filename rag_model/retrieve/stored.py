"""The files of a model that retrieval loads: an encoder of questions, or one that reads pairs."""

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Stored(Protocol):
    """A model that may have been loaded from a folder."""

    @property
    def folder(self) -> Path | None:
        """The folder."""
        ...


def model_files(model: object) -> dict[str, int]:
    """Return the files of a model's folder, in bytes by path; none of a model that lies in no folder."""
    if not isinstance(model, Stored) or model.folder is None:
        return {}
    return {str(path): path.stat().st_size for path in sorted(model.folder.rglob("*")) if path.is_file()}
