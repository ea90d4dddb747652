"""Hand-made passages and hits, for measures that need no index."""

from collections.abc import Callable, Sequence

import pytest

from rag_model.corpus.records import Passage
from rag_model.retrieve.hits import Hit


def _passage(page: str, text: str, position: int = 0) -> Passage:
    return Passage(
        f"{page}-{position}",
        page,
        7,
        f"Title {page}",
        "",
        text,
        0,
        len(text.split()),
        Passage.hash_of(page, text),
    )


@pytest.fixture(scope="session")
def make_passage() -> Callable[..., Passage]:
    """Return a function that creates a passage from a page, a text and a position in the article."""
    return _passage


@pytest.fixture(scope="session")
def make_hits() -> Callable[[Sequence[tuple[str, str]]], tuple[Hit, ...]]:
    """Return a function that creates hits from (page, text) pairs, best first, with scores of 1/rank."""

    def make(texts_by_page: Sequence[tuple[str, str]]) -> tuple[Hit, ...]:
        return tuple(
            Hit(rank, 1 / rank, rank - 1, _passage(page, text, rank), f"https://x/?oldid={rank}", "CC")
            for rank, (page, text) in enumerate(texts_by_page, start=1)
        )

    return make
