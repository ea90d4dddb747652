"""What is wrong with an input is told in one sentence, with the right exit code, and nothing is half published.

Of each kind of input there is an example; the others are in the tests of the modules that read them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_model.store.store import Store

Write = Callable[[Path, Path], Path]


def truncated(folder: Path, dump: Path) -> Path:
    data = dump.read_bytes()
    (folder / "cut.xml.bz2").write_bytes(data[: len(data) // 2])
    return folder / "cut.xml.bz2"


def absent(folder: Path, dump: Path) -> Path:
    return folder / "absent.xml.bz2"


def of_no_kind(folder: Path, dump: Path) -> Path:
    (folder / "photo.png").write_bytes(b"\x89PNG")
    return folder / "photo.png"


DUMPS: list[tuple[Write, int, str]] = [
    (truncated, 1, "cut.xml.bz2"),
    (absent, 1, "absent.xml.bz2"),
    (of_no_kind, 2, "photo.png"),
]


@pytest.fixture
def unharmed(tmp_path: Path, library: Path, bookwheel: Any) -> Any:
    """Give a store; afterwards nothing but what was there is named or published, and that is whole."""
    store = tmp_path / "store"
    shutil.copytree(library, store)
    opened = Store.open(str(store))
    before = opened.snapshots.list_ids(), opened.refs.read_history("latest")
    yield store
    assert (opened.snapshots.list_ids(), opened.refs.read_history("latest")) == before
    assert opened.refs.list_names() == ["latest"]
    assert bookwheel("verify", "--store", store).code == 0


@pytest.mark.parametrize(("write", "code", "named"), DUMPS, ids=[write.__name__ for write, _, _ in DUMPS])
def test_a_bad_dump(
    write: Write, code: int, named: str, tmp_path: Path, unharmed: Path, mini_dump: Path, reindex: Any
) -> None:
    result = reindex(unharmed, dump=write(tmp_path, mini_dump))
    assert result.code == code, result.err
    assert named in result.complaint


def test_an_index_of_another_dump(
    tmp_path: Path, unharmed: Path, mini_dump: Path, reindex: Any, make_multistream: Callable[..., str]
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, pages in ((own, 10), (other, 7)):
        folder.mkdir()
        make_multistream(folder, mini_dump, pages_a_stream=pages)
    (index,) = own.glob("*-index*")
    index.write_bytes((other / index.name).read_bytes())
    (dump,) = set(own.iterdir()) - {index}
    result = reindex(unharmed, dump=dump)
    assert result.code == 1
    assert "index" in result.complaint


def test_an_encoder_that_lacks_a_file(tmp_path: Path, unharmed: Path, tiny: Path, reindex: Any) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "encoder"))
    (folder / "tokenizer.json").unlink()
    result = reindex(unharmed, encoder=folder)
    assert result.code == 1
    assert str(folder) in result.complaint


def test_no_encoder_of_that_name(unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, encoder="/nowhere/at-all")
    assert result.code == 1
    assert "/nowhere/at-all" in result.complaint


RECIPES = {
    "a wrong factory": ('[index.hnsw]\nfactory = "HSNW32"', 2, "HSNW32"),
    "a wrong dtype": ('[encode]\ndtype = "int3"', 2, "choose one of float16, float32"),
    "an unknown field of the encoder": ("[encode.spec]\npoolling = 'cls'", 2, "poolling"),
    "no TOML": ("[chunk\n", 2, "is not TOML"),
}


@pytest.mark.parametrize(("text", "code", "said"), RECIPES.values(), ids=RECIPES.keys())
def test_a_bad_recipe(text: str, code: int, said: str, tmp_path: Path, unharmed: Path, reindex: Any) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    result = reindex(unharmed, recipe=recipe)
    assert result.code == code, result.err
    assert said in result.complaint


def test_no_recipe_of_that_name(unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, recipe="/nowhere.toml")
    assert result.code == 2
    assert "/nowhere.toml" in result.complaint


def test_a_name_that_no_ref_can_have_is_told_before_the_work(unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, ref="../escape")
    assert result.code == 2
    assert "is not a ref name" in result.complaint
    assert "chunk" not in result.err


def test_a_limit_of_no_articles(unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, limit=0)
    assert result.code == 2
    assert "limit" in result.complaint


def test_a_store_that_cannot_be_written(tmp_path: Path, reindex: Any) -> None:
    (tmp_path / "file").touch()
    result = reindex(tmp_path / "file" / "store")
    assert result.code == 1
    assert str(tmp_path / "file" / "store") in result.complaint


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["search", "Who?", "-k", "1000"], 2, "1000"),
        (["search", "Who?", "-k", "0"], 2, "0"),
        (["search", ""], 2, "question"),
        (["search", "  \n"], 2, "question"),
        (["search"], 2, "no question"),
        (["search", "Who?", "--index", "ivfpq"], 2, "hnsw"),
        (["search", "Who?", "--ref", "nightly"], 1, "nightly"),
        (["search", "Who?", "--ref", "latest@9"], 1, "9"),
        (["evaluate", "--questions", "/nowhere.csv"], 1, "/nowhere.csv"),
        (["log", "--ref", "a/b"], 2, "is not a ref name"),
        (["show", "0000"], 1, "0000"),
        (["verify", "nothing"], 1, "nothing"),
        (["pull", "nothing", "dest"], 1, "nothing"),
        (["pull", "latest"], 2, "dest"),
        (["search", "Who?", "--kk", "3"], 2, "--kk"),
        (["serach", "Who?"], 2, "serach"),
        (["search", "Who?", "-k", "three"], 2, "three"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request(argv: list[str], code: int, said: str, library: Path, bookwheel: Any) -> None:
    result = bookwheel(*argv, "--store", library)
    assert result.code == code, result.err
    assert said.lower() in result.complaint.lower()


def test_k_larger_than_the_corpus_is_one_sentence_that_says_how_many_there_are(library: Path, bookwheel: Any) -> None:
    assert "247" in bookwheel("search", "Who?", "-k", 248, "--store", library).complaint


def test_a_question_from_another_space(library: Path, other_tiny: Path, bookwheel: Any) -> None:
    result = bookwheel("search", "Who?", "--question-encoder", other_tiny, "--store", library)
    assert result.code == 3
    assert "weights differ" in result.complaint


def test_no_store(tmp_path: Path, bookwheel: Any) -> None:
    for argv in (["search", "Who?"], ["log"], ["show"], ["verify"], ["pull", "latest", tmp_path / "dest"]):
        result = bookwheel(*argv, "--store", tmp_path / "none")
        assert result.code == 1, argv
        assert "there is no bookwheel store" in result.complaint
    assert not list(tmp_path.iterdir())


def test_a_dump_without_a_name_creates_no_store(tmp_path: Path, bookwheel: Any) -> None:
    result = bookwheel("reindex", "--dump", " ", "--store", tmp_path / "new")
    assert result.code == 2
    assert "the name of the dump is empty: give a path, a URL or a glob" in result.complaint
    assert not list(tmp_path.iterdir())


def test_hostile_markup_costs_its_page_and_no_more(
    tmp_path: Path, reindex: Any, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> None:
    deep = ["{{a|" * 40_000, "[[" * 40_000, "<div>" * 40_000, "{|\n|\n" * 20_000, "'''''" * 40_000, "<ref>" * 40_000]
    pages = [page_xml(page, f"Page {page} says some words. {markup}") for page, markup in enumerate(["", *deep, ""], 1)]
    dump = tmp_path / "deep.xml"
    dump.write_bytes(export_xml(*pages))
    result = reindex(tmp_path / "store", dump=dump)
    assert result.code == 0, result.err
    counts = result.json["counts"]
    assert counts["articles"] + sum(counts["dropped"].values()) == len(pages)
    assert counts["articles"] >= 2  # those without
