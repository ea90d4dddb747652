"""A missing extra is one sentence with the line that installs it; a broken one shows its own error."""

import sys
from pathlib import Path

import pytest

from rag_model.errors import MissingExtraError
from rag_model.extras import require


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'bookwheel\[model\]'"):
        require("a_package_that_nobody_wrote", "model")


def test_an_installed_package_is_returned() -> None:
    assert require("json", "model") is sys.modules["json"]


def test_a_package_that_lacks_another_tells_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="something_it_needs"):
        require("half_installed", "model")
