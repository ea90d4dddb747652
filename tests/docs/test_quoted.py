"""What the pages of `docs/extend` quote of an error is what the code says where the package is missing."""

import re
from collections.abc import Callable

import pytest

from flows.cli import app
from rag_model.corpus.chunkers.registry import CHUNKERS, build_chunker
from rag_model.index.registry import KINDS, kind_for, kind_named
from rag_model.retrieve.composer import CALLS
from rag_model.training.objectives.registry import OBJECTIVES
from tests.docs.blocks import DOCS, blocks


def _unknown_objective() -> None:
    given = ["finetune", "toy", "--store", "s", "--train", "t", "--dev", "d"]
    app.parse_args(given, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    ("page", "place", "call"),
    [
        ("chunker", 0, lambda: build_chunker("overlapping", {})),
        ("index-kind", 0, lambda: kind_named("words")),
        ("index-kind", 1, lambda: kind_for("WORDS")),
        ("objective", 0, _unknown_objective),
    ],
)
def test_a_page_quotes_the_sentence_as_it_is(
    page: str, place: int, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (CHUNKERS, KINDS, OBJECTIVES):
        monkeypatch.setattr(registry, "_loaded", {})  # other tests install the packages of these pages
    with pytest.raises(Exception) as told:  # noqa: PT011 - a command line's error is Cyclopts's own
        call()
    shown = [_words(block.text) for block in blocks(DOCS / "extend" / f"{page}.md") if block.language == "text"]
    pattern = re.escape(shown[place].removeprefix("bookwheel: ")).replace("…", ".*")
    assert re.fullmatch(pattern, _words(str(told.value)))


def test_the_page_of_retrievers_names_every_call() -> None:
    (shown,) = [block.text for block in blocks(DOCS / "extend" / "retriever.md") if block.language == "text"]
    assert f"choose one of {', '.join(CALLS.names())}, or name an index: " in _words(shown)


def _words(text: str) -> str:
    return " ".join(text.split())
