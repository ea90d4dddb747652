"""A framework that is not installed is named with the line that installs it."""

import re
import sys
from importlib import import_module

import pytest

from rag_model.errors import MissingExtraError


@pytest.mark.parametrize(
    ("door", "package"), [("langchain", "langchain_core"), ("llamaindex", "llama_index.core"), ("haystack", "haystack")]
)
def test_a_missing_framework_is_told_with_its_install_line(
    door: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"rag_model.integrations.{door}", raising=False)
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'bookwheel[{door}]'")):
        import_module(f"rag_model.integrations.{door}")
