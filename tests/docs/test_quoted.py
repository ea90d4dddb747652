"""Errors that the pages of `docs/extend` quote are those of the code without the packages."""

import re
from collections.abc import Callable

import pytest

from flows.cli import app
from rag_model.corpus.chunkers.chunker import CHUNKERS, build_chunker
from rag_model.corpus.dump_formats.dump_format import FORMATS, detect_format
from rag_model.index.kind import KINDS, IndexBuilder, IndexPlanner, IndexSearcher, get_kind, get_kind_for_factory
from rag_model.retrieve.factory import CALLS
from rag_model.training.objectives.objective import OBJECTIVES
from tests.docs.blocks import DOCS, read_blocks


def _parse_unknown_objective() -> None:
    words = ["finetune", "toy", "--store", "s", "--train", "t", "--dev", "d"]
    app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    ("page", "number", "call"),
    [
        ("chunker", 0, lambda: build_chunker("overlapping", {})),
        ("index-kind", 0, lambda: get_kind("words")),
        ("index-kind", 1, lambda: get_kind_for_factory("WORDS")),
        ("objective", 0, _parse_unknown_objective),
        ("dump-format", 0, lambda: detect_format("file:///archive.mbox")),
    ],
)
def test_a_page_quotes_the_error_message(
    page: str, number: int, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (CHUNKERS, FORMATS, KINDS, OBJECTIVES):
        monkeypatch.setattr(registry, "_loaded", {})  # other tests install the packages of these pages
    with pytest.raises(Exception) as error:  # noqa: PT011 - a command line's error is Cyclopts's own
        call()
    quotes = [
        _normalize(block.text) for block in read_blocks(DOCS / "extend" / f"{page}.md") if block.language == "text"
    ]
    pattern = re.escape(quotes[number].removeprefix("bookwheel: ")).replace("…", ".*")
    assert re.fullmatch(pattern, _normalize(str(error.value)))


def test_the_page_of_retrievers_names_every_call() -> None:
    quote, broken_quote = [
        block.text for block in read_blocks(DOCS / "extend" / "retriever.md") if block.language == "text"
    ]
    assert _normalize(broken_quote).startswith(
        "retriever 'interleave' (interleave_retriever:build of the package interleave_retriever 1.0) returned "
    )
    assert f"choose one of {', '.join(CALLS.list_names())}, or name an index: " in _normalize(quote)


@pytest.mark.parametrize("protocol", [IndexBuilder, IndexSearcher, IndexPlanner])
def test_the_page_of_index_kinds_lists_every_member(protocol: type) -> None:
    page = (DOCS / "extend" / "index-kind.md").read_text()
    members = {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}
    assert members
    assert [name for name in members if not re.search(rf"^\| [^|]*`{name}[`(]", page, re.MULTILINE)] == []


def _normalize(text: str) -> str:
    return " ".join(text.split())
