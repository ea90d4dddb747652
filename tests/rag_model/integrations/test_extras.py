"""The error for a framework that is not installed contains the command that installs it."""

import re
import sys
from importlib import import_module

import pytest

from rag_model.errors import MissingExtraError


@pytest.mark.parametrize(
    ("framework", "package"),
    [("langchain", "langchain_core"), ("llamaindex", "llama_index.core"), ("haystack", "haystack")],
)
def test_missing_framework_is_reported_with_its_install_command(
    framework: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"rag_model.integrations.{framework}", raising=False)
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'bookwheel[{framework}]'")):
        import_module(f"rag_model.integrations.{framework}")
