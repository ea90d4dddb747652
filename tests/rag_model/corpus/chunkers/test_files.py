"""Of a file that a setting names the bytes count, and not where they lie."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rag_model.corpus.chunkers.chunker import Cut
from rag_model.corpus.chunkers.files import named_files, settings_of
from rag_model.digest import digest_file
from rag_model.errors import InputError


@dataclass(frozen=True)
class Model:
    """A chunker that would read a model."""

    version: ClassVar[str] = "1"
    model: Path = field(default=Path("none"), metadata={"files": ("config.json", "*.safetensors")})
    depth: int = 3

    def open(self) -> Cut:
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "layers").mkdir(parents=True)
    for name in ("config.json", "README.md", "layers/a.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def digest(path: Path) -> Any:
    return settings_of(Model(path))["model"]


def test_the_files_that_decide_are_the_digest(folder: Path, tmp_path: Path) -> None:
    first = digest(folder)
    assert settings_of(Model(folder)) == {"model": first, "depth": 3}
    assert list(named_files(Model(folder))["model"]) == ["config.json", "layers/a.safetensors"]
    assert digest(shutil.copytree(folder, tmp_path / "moved")) == first
    (folder / "README.md").write_text("other words")
    assert digest(folder) == first
    (folder / "layers" / "a.safetensors").write_text("other weights")
    changed = digest(folder)
    assert changed != first
    (folder / "layers" / "a.safetensors").rename(folder / "b.safetensors")
    assert digest(folder) not in {first, changed}


def test_a_single_file_counts_as_its_own_digest(folder: Path) -> None:
    assert digest(folder / "config.json") == digest_file(folder / "config.json")
    assert list(named_files(Model(folder / "README.md"))["model"].values()) == [folder / "README.md"]


def test_a_digest_stays_itself_and_is_no_path(folder: Path) -> None:
    known = Path(digest(folder))
    assert digest(known) == str(known)
    with pytest.raises(InputError, match=r"by its digest sha256:.*: give the path"):
        named_files(Model(known))


def test_a_path_that_leads_nowhere_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    """Nor is a folder copied that is named by mistake, because a folder in it has such files."""
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=r"wants as model a folder with config\.json, and .* is none: correct it"):
            named_files(Model(path))
