"""A recipe names a chunker, built in or of another package, and every mistake is one sentence."""

from pathlib import Path

import pytest

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.chunkers.recursive import Recursive
from rag_model.corpus.chunkers.registry import CHUNKERS, build_chunker
from rag_model.corpus.chunkers.windows import Sections, Words
from rag_model.errors import InputError, UsageError
from tests.fixtures.overlapping import Overlapping, offer


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test's packages brought is forgotten."""
    monkeypatch.setattr(CHUNKERS, "_loaded", {})


def test_settings_that_are_left_out_keep_their_defaults() -> None:
    assert build_chunker("words", {}) == Words(100)
    assert build_chunker("sections", {"words": 7}) == Sections(7)
    assert ChunkRecipe(words=7).built() == ChunkRecipe(settings={"words": 7}).built() == Recursive(7)
    assert ChunkRecipe(words=7).content() == ChunkRecipe(settings={"words": 7}).content()


def test_a_chunker_of_another_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert build_chunker("overlapping", {"tokenizer": "t.json"}) == Overlapping(Path("t.json"))
    with pytest.raises(UsageError, match=r"choose one of words, .*, semantic, overlapping"):
        build_chunker("topics", {})


def test_a_built_in_chunker_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, name="words")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_chunker("words", {}) == Words(100)


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        (
            "absent",
            "tests.fixtures.absent:Overlapping",
            r"chunker 'absent' \(tests.fixtures.absent:Overlapping\) cannot be imported \(No module named",
        ),
        ("lacking", "tests.fixtures.overlapping:Absent", "chunker 'lacking' .* cannot be imported"),
        ("function", "tests.fixtures.overlapping:offer", "<function offer at .*> is not a chunker"),
    ],
)
def test_what_is_no_chunker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str, says: str) -> None:
    offer(tmp_path, target, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((InputError, UsageError), match=says) as wrong:
        ChunkRecipe(name)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"chunker": "topics"}, "choose one of words, sections"),
        ({"words": 0}, "at least 1"),
        ({"settings": {"overlap": 3}}, "the recipe's chunker 'recursive' has no setting 'overlap': it knows words"),
        ({"settings": {"words": "ten"}}, "the recipe's chunker 'recursive', words must be a whole number"),
        ({"words": 3, "settings": {"words": 3}}, "gives words twice"),
    ],
)
def test_a_mistake_is_one_sentence(recipe: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as wrong:
        ChunkRecipe(**recipe)  # type: ignore[arg-type]
    assert "\n" not in str(wrong.value)
