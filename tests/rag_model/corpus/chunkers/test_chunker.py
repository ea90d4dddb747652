"""Every chunker keeps the contract, whatever the text."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
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
from tests.fixtures.window_chunker import Overlapping, offer, save_tokenizer
from tests.fixtures.work_counters import lines_run

SIZES = st.integers(1, 12)
BY_WORDS = ["words", "sections", "sentences", "recursive"]


def keeps(chunker: Chunker, article: Article) -> list[Passage]:
    """Hold the passages of an article to the contract, but for the bound, whose unit is the chunker's own."""
    passages = list(chunker.open()(article))
    line = " ".join(" ".join(section.text for section in article.sections).split())
    reached = 0
    for passage in passages:
        # Line breaks and indentation, which `keeps_lines` keeps, are bounded too.
        text = " ".join(passage.text.split()) if article.keeps_lines else passage.text
        assert text
        furthest = reached + line.startswith(" ", reached)  # words repeat: the last place that fits is right
        at = line.rfind(text, 0, furthest + len(text))
        assert at >= 0
        assert not line[reached:at].strip(), "nothing is left out"
        longest = MAX_WORD_LENGTH + (42 if article.keeps_lines else 1)
        assert len(passage.text) <= passage.n_words * longest, "bounded in characters"
        assert len(passage.section) <= MAX_HEADING
        reached = max(reached, at + len(text))
    assert not line[reached:].strip()
    assert len({passage.id for passage in passages}) == len(passages)
    assert all(passage.id.split() == [passage.id] and passage.id.startswith("12:") for passage in passages)
    assert list(chunker.open()(article)) == passages
    return passages


@pytest.mark.parametrize("name", BY_WORDS)
@given(article=ARTICLES, size=SIZES, keeps_lines=st.booleans())
def test_chunkers_by_words(name: str, article: Article, size: int, keeps_lines: bool) -> None:
    passages = keeps(build_chunker(name, {"words": size}), replace(article, keeps_lines=keeps_lines))
    assert all(0 < passage.n_words <= size for passage in passages)


@pytest.mark.parametrize("name", ["words", "sentences", "recursive"])
@given(article=ARTICLES, size=SIZES)
def test_word_numbers_give_the_text_back(name: str, article: Article, size: int) -> None:
    words = [word for section in article.sections for word in split_words(section.text)]
    passages = list(build_chunker(name, {"words": size}).open()(article))
    spans = [(passage.start_word, passage.start_word + passage.n_words) for passage in passages]
    assert [at for span in spans for at in range(*span)] == list(range(len(words))), "disjoint, and all words"
    assert ["".join(words[start:end]).strip() for start, end in spans] == [passage.text for passage in passages]


def hostile(name: str) -> Callable[[int], Article]:
    """Return a function that makes an article of a size in proportion to a number."""

    def article(times: int) -> Article:
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

    return article


HOSTILE = ["equal headings", "a long word", "a run of marks", "short sentences", "short and long", "blank lines"]


@pytest.mark.parametrize("text", [*HOSTILE, "nested boundaries"])
@pytest.mark.parametrize("name", BY_WORDS)
def test_twice_the_text_takes_twice_the_work(name: str, text: str) -> None:
    cut, article = build_chunker(name, {}).open(), hostile(text)
    once, twice = (lines_run(lambda times=times: list(cut(article(times)))) for times in (400, 800))
    assert twice <= 2.2 * once


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, "[UNK]")
    return path


@given(article=ARTICLES, size=SIZES, overlap=st.integers(0, 11))
def test_overlapping_windows_of_tokens(tokenizer: Path, article: Article, size: int, overlap: int) -> None:
    chunker = Overlapping(tokenizer, size, min(overlap, size - 1))
    passages = keeps(chunker, article)
    read = Tokenizer.from_file(str(tokenizer))
    counts = [len(read.encode(passage.text).ids) for passage in passages]
    assert all(count <= size for count in counts)
    words = [word for section in article.sections for word in split_words(section.text)]
    whole = sum(len(read.encode(word).ids) for word in words)
    assert sum(counts) <= whole + chunker.overlap * max(0, len(counts) - 1)


HEADINGS = st.lists(st.sampled_from(["", "a", "a 2", "a 2 2", "a_2_3", "_2", "b", "x" * 70]), max_size=30)


class Lookups(dict[str, int]):
    """Names taken, which count how often one was looked for."""

    made = 0

    def __contains__(self, name: object) -> bool:
        self.made += 1
        return super().__contains__(name)


def first_free(heading: str, taken: set[str]) -> str:
    """Return the name by its definition: of the heading and the first free number from 2 on."""
    name = "_".join(heading.split())[:MAX_ANCHOR]
    return next(one for one in [name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))] if one not in taken)


@given(HEADINGS)
def test_a_name_has_the_first_free_number(headings: list[str]) -> None:
    taken: dict[str, int] = {}
    named: set[str] = set()
    for heading in headings:
        expected = first_free(heading, named)
        assert create_anchor(heading, taken) == expected
        named.add(expected)
    assert {*taken} == named


def test_equal_headings_are_looked_up_a_constant_number_of_times() -> None:
    for headings in (["a"] * 4000, [f"a {n}" for n in range(2, 2000)] + ["a"] * 2000):
        taken = Lookups()
        names = [create_anchor(heading, taken) for heading in headings]
        assert len({*names}) == len(headings)
        assert taken.made <= 3 * len(headings)


@dataclass(frozen=True)
class Model:
    """A chunker that would read a model."""

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


def digest(path: Path) -> Any:
    return settings_to_json(Model(path))["model"]


def test_the_files_that_decide_are_the_digest(folder: Path, tmp_path: Path) -> None:
    first = digest(folder)
    assert settings_to_json(Model(folder)) == {"model": first, "depth": 3}
    assert list(list_setting_files(Model(folder))["model"]) == ["config.json", "layers/a.safetensors"]
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
    assert list(list_setting_files(Model(folder / "README.md"))["model"].values()) == [folder / "README.md"]


def test_a_digest_stays_itself_and_is_no_path(folder: Path) -> None:
    known = Path(digest(folder))
    assert digest(known) == str(known)
    with pytest.raises(InputError, match=r"gives the digest sha256:.* for .*: give the path"):
        list_setting_files(Model(known))


def test_a_path_that_leads_nowhere_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    """Nor is a folder copied that is named by mistake, because a folder in it has such files."""
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(
            InputError, match=r"model of the recipe's chunker must be a folder with config\.json, not .*: correct it"
        ):
            list_setting_files(Model(path))


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test's packages brought is forgotten."""
    monkeypatch.setattr(CHUNKERS, "_loaded", {})


def test_settings_that_are_left_out_keep_their_defaults() -> None:
    assert build_chunker("words", {}) == Words(100)
    assert build_chunker("sections", {"words": 7}) == Sections(7)
    assert ChunkRecipe(words=7).create_chunker() == ChunkRecipe(settings={"words": 7}).create_chunker() == Recursive(7)
    assert ChunkRecipe(words=7).to_json() == ChunkRecipe(settings={"words": 7}).to_json()


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
            r"chunker 'absent' \(tests.fixtures.absent:Overlapping.*\) cannot be imported \(No module named",
        ),
        ("lacking", "tests.fixtures.window_chunker:Absent", "chunker 'lacking' .* cannot be imported"),
        (
            "function",
            "tests.fixtures.window_chunker:offer",
            "chunker 'function' .* is <function offer .*, which is not a chunker: see",
        ),
    ],
)
def test_what_is_no_chunker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str, says: str) -> None:
    offer(tmp_path, target, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=says) as wrong:
        ChunkRecipe(name)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"chunker": "topics"}, "choose one of words, sections"),
        ({"words": 0}, "at least 1"),
        ({"settings": {"overlap": 3}}, "the recipe's chunker 'recursive' has no setting 'overlap': choose from words"),
        ({"settings": {"words": "ten"}}, "the recipe's chunker 'recursive', words must be a whole number"),
        ({"words": 3, "settings": {"words": 3}}, "gives words twice"),
    ],
)
def test_a_mistake_is_one_sentence(recipe: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as wrong:
        ChunkRecipe(**recipe)  # type: ignore[arg-type]
    assert "\n" not in str(wrong.value)
