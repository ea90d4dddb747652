"""Every chunker fulfils the contract for any text."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.chunkers.article_words import MAX_WORD_LENGTH, split_words
from rag_model.corpus.chunkers.chunker import (
    CHUNKERS,
    MAX_ANCHOR,
    MAX_HEADING,
    Chunker,
    ChunkFunction,
    build_chunker,
    create_anchor,
    list_setting_files,
    settings_to_json,
)
from rag_model.corpus.chunkers.windows import Recursive, Sections, Words
from rag_model.corpus.records import Article, Passage, Section
from rag_model.digest import digest_file
from rag_model.errors import InputError, UsageError
from tests.fixtures.hostile_texts import ARTICLES
from tests.fixtures.plugin_package import install_package
from tests.fixtures.window_chunker import OverlappingWindows, save_tokenizer
from tests.fixtures.work_counters import count_lines

SIZES = st.integers(1, 12)
WORD_CHUNKERS = ["words", "sections", "sentences", "recursive"]


def check_contract(chunker: Chunker, article: Article) -> list[Passage]:
    """Check the contract for the passages of an article, except the size limit, whose unit depends on the chunker."""
    passages = list(chunker.open()(article))
    full_text = " ".join(" ".join(section.text for section in article.sections).split())
    covered_end = 0
    for passage in passages:
        # `keeps_lines` keeps line breaks and indentation.
        text = " ".join(passage.text.split()) if article.keeps_lines else passage.text
        assert text
        # Words repeat, so the last possible position is right.
        max_start = covered_end + full_text.startswith(" ", covered_end)
        start = full_text.rfind(text, 0, max_start + len(text))
        assert start >= 0
        assert not full_text[covered_end:start].strip(), "no word may be left out"
        longest = MAX_WORD_LENGTH + (42 if article.keeps_lines else 1)
        assert len(passage.text) <= passage.n_words * longest, "the number of characters is limited"
        assert len(passage.section) <= MAX_HEADING
        covered_end = max(covered_end, start + len(text))
    assert not full_text[covered_end:].strip()
    assert len({passage.id for passage in passages}) == len(passages)
    assert all(passage.id.split() == [passage.id] and passage.id.startswith("12:") for passage in passages)
    assert list(chunker.open()(article)) == passages
    return passages


@pytest.mark.parametrize("name", WORD_CHUNKERS)
@settings(max_examples=50)
@given(article=ARTICLES, size=SIZES, keeps_lines=st.booleans())
def test_word_chunkers_fulfil_the_contract(name: str, article: Article, size: int, keeps_lines: bool) -> None:
    passages = check_contract(build_chunker(name, {"words": size}), replace(article, keeps_lines=keeps_lines))
    assert all(0 < passage.n_words <= size for passage in passages)


@pytest.mark.parametrize("name", ["words", "sentences", "recursive"])
@settings(max_examples=50)
@given(article=ARTICLES, size=SIZES)
def test_texts_of_passages_follow_from_their_word_numbers(name: str, article: Article, size: int) -> None:
    words = [word for section in article.sections for word in split_words(section.text)]
    passages = list(build_chunker(name, {"words": size}).open()(article))
    spans = [(passage.start_word, passage.start_word + passage.n_words) for passage in passages]
    numbers = [number for span in spans for number in range(*span)]
    assert numbers == list(range(len(words))), "spans are disjoint and cover all words"
    assert ["".join(words[start:end]).strip() for start, end in spans] == [passage.text for passage in passages]


def build_hostile_article(name: str) -> Callable[[int], Article]:
    """Return a function that builds an article whose size is proportional to a number."""

    def build(times: int) -> Article:
        texts: dict[str, Sequence[Section]] = {
            "equal headings": [Section("a", "x")] * times,
            "a long word": [Section("", "w" * 100 * times)],
            "a run of marks": [Section("", "日" * 12 + "。" * 50 * times)],
            "short sentences": [Section("", "He is. " * times)],
            "short and long": [Section("", ("Yes. " + "word " * 150 + "end. ") * (times // 10))],
            "blank lines": [Section("", "\n" * 100 * times + "x")],
            "nested boundaries": [Section("h", "One two. Three.\nFour\n\n")] * times,
        }
        return Article("12", 0, "Ada", tuple(texts[name]))

    return build


HOSTILE = ["equal headings", "a long word", "a run of marks", "short sentences", "short and long", "blank lines"]


@pytest.mark.parametrize("text", [*HOSTILE, "nested boundaries"])
@pytest.mark.parametrize("name", WORD_CHUNKERS)
def test_work_is_linear_in_the_text(name: str, text: str) -> None:
    chunk, article = build_chunker(name, {}).open(), build_hostile_article(text)
    once, twice = (count_lines(lambda times=times: list(chunk(article(times)))) for times in (400, 800))
    assert twice <= 2.2 * once


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, "[UNK]")
    return path


@settings(max_examples=50)
@given(article=ARTICLES, size=SIZES, overlap=st.integers(0, 11))
def test_overlapping_windows_fulfil_the_contract(tokenizer: Path, article: Article, size: int, overlap: int) -> None:
    chunker = OverlappingWindows(tokenizer, size, min(overlap, size - 1))
    passages = check_contract(chunker, article)
    loaded_tokenizer = Tokenizer.from_file(str(tokenizer))
    counts = [len(loaded_tokenizer.encode(passage.text).ids) for passage in passages]
    assert all(count <= size for count in counts)
    words = [word for section in article.sections for word in split_words(section.text)]
    total_tokens = sum(len(loaded_tokenizer.encode(word).ids) for word in words)
    assert sum(counts) <= total_tokens + chunker.overlap * max(0, len(counts) - 1)


HEADINGS = st.lists(st.sampled_from(["", "a", "a 2", "a 2 2", "a_2_3", "_2", "b", "x" * 70]), max_size=30)


class LookupCounter(dict[str, int]):
    """A dict of used anchors that counts its lookups."""

    count = 0

    def __contains__(self, name: object) -> bool:
        self.count += 1
        return super().__contains__(name)


def find_first_free(heading: str, used_anchors: set[str]) -> str:
    """Return the heading's anchor by definition: the heading, with the first free number from 2 if it is used."""
    name = "_".join(heading.split())[:MAX_ANCHOR]
    candidates = [name, *(f"{name}_{n}" for n in range(2, len(used_anchors) + 3))]
    return next(anchor for anchor in candidates if anchor not in used_anchors)


@given(HEADINGS)
def test_anchor_has_the_first_free_number(headings: list[str]) -> None:
    used_anchors: dict[str, int] = {}
    expected_anchors: set[str] = set()
    for heading in headings:
        expected = find_first_free(heading, expected_anchors)
        assert create_anchor(heading, used_anchors) == expected
        expected_anchors.add(expected)
    assert {*used_anchors} == expected_anchors


def test_equal_headings_need_a_constant_number_of_lookups() -> None:
    for headings in (["a"] * 4000, [f"a {n}" for n in range(2, 2000)] + ["a"] * 2000):
        used_anchors = LookupCounter()
        names = [create_anchor(heading, used_anchors) for heading in headings]
        assert len({*names}) == len(headings)
        assert used_anchors.count <= 3 * len(headings)


@dataclass(frozen=True)
class ModelChunker:
    """A chunker with a model as a setting."""

    version: ClassVar[str] = "1"
    model: Path = field(default=Path("none"), metadata={"files": ("config.json", "*.safetensors")})
    depth: int = 3

    def open(self) -> ChunkFunction:
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "layers").mkdir(parents=True)
    for name in ("config.json", "README.md", "layers/a.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def digest_model(path: Path) -> Any:
    return settings_to_json(ModelChunker(path))["model"]


def test_digest_depends_on_setting_files_only(folder: Path, tmp_path: Path) -> None:
    first = digest_model(folder)
    assert settings_to_json(ModelChunker(folder)) == {"model": first, "depth": 3}
    assert list(list_setting_files(ModelChunker(folder))["model"]) == ["config.json", "layers/a.safetensors"]
    assert digest_model(shutil.copytree(folder, tmp_path / "moved")) == first
    (folder / "README.md").write_text("other words")
    assert digest_model(folder) == first
    (folder / "layers" / "a.safetensors").write_text("other weights")
    changed = digest_model(folder)
    assert changed != first
    (folder / "layers" / "a.safetensors").rename(folder / "b.safetensors")
    assert digest_model(folder) not in {first, changed}


def test_single_file_is_identified_by_its_digest(folder: Path) -> None:
    assert digest_model(folder / "config.json") == digest_file(folder / "config.json")
    assert list(list_setting_files(ModelChunker(folder / "README.md"))["model"].values()) == [folder / "README.md"]


def test_digest_instead_of_a_path_is_refused(folder: Path) -> None:
    digest_path = Path(digest_model(folder))
    assert digest_model(digest_path) == str(digest_path)
    with pytest.raises(InputError, match=r"gives the digest sha256:.* for .*: give the path"):
        list_setting_files(ModelChunker(digest_path))


def test_path_without_the_setting_files_is_refused(folder: Path, tmp_path: Path) -> None:
    """A parent folder is refused too, although a folder in it has such files."""
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(
            InputError, match=r"model of the recipe's chunker must be a folder with config\.json, not .*: correct it"
        ):
            list_setting_files(ModelChunker(path))


@pytest.fixture(autouse=True)
def forget_loaded_chunkers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the chunkers that earlier tests have loaded from packages."""
    monkeypatch.setattr(CHUNKERS, "_loaded", {})


def test_missing_settings_have_defaults() -> None:
    assert build_chunker("words", {}) == Words(100)
    assert build_chunker("sections", {"words": 7}) == Sections(7)
    assert ChunkRecipe(words=7).create_chunker() == ChunkRecipe(settings={"words": 7}).create_chunker() == Recursive(7)
    assert ChunkRecipe(words=7).to_json() == ChunkRecipe(settings={"words": 7}).to_json()


def test_chunker_of_another_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, "chunkers", "overlapping = tests.fixtures.window_chunker:OverlappingWindows")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_chunker("overlapping", {"tokenizer": "t.json"}) == OverlappingWindows(Path("t.json"))
    with pytest.raises(UsageError, match=r"choose one of words, .*, semantic, overlapping"):
        build_chunker("topics", {})


def test_built_in_chunker_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, "chunkers", "words = tests.fixtures.window_chunker:OverlappingWindows")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_chunker("words", {}) == Words(100)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        (
            "absent",
            "tests.fixtures.absent:OverlappingWindows",
            r"chunker 'absent' \(tests.fixtures.absent:OverlappingWindows.*\) cannot be imported \(No module named",
        ),
        ("lacking", "tests.fixtures.window_chunker:Absent", "chunker 'lacking' .* cannot be imported"),
        (
            "function",
            "tests.fixtures.window_chunker:save_tokenizer",
            "chunker 'function' .* is <function save_tokenizer .*, which is not a chunker: see",
        ),
    ],
)
def test_invalid_entry_point_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str, message: str
) -> None:
    monkeypatch.syspath_prepend(install_package(tmp_path, "chunkers", f"{name} = {target}"))
    with pytest.raises(InputError, match=message) as error:
        ChunkRecipe(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"chunker": "topics"}, "choose one of words, sections"),
        ({"words": 0}, "at least 1"),
        ({"settings": {"overlap": 3}}, "the recipe's chunker 'recursive' has no setting 'overlap': choose from words"),
        ({"settings": {"words": "ten"}}, "the recipe's chunker 'recursive', words must be a whole number"),
        ({"words": 3, "settings": {"words": 3}}, "gives words twice"),
    ],
)
def test_invalid_recipe_is_reported(recipe: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        ChunkRecipe(**recipe)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
