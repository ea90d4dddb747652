"""Invalid inputs fail with one sentence and the right exit code, and leave the store unchanged.

There is one example for each kind of input; the tests of the modules that read the inputs have the others.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_model.store.store import Store

WriteDump = Callable[[Path, Path], Path]


def write_truncated(folder: Path, dump: Path) -> Path:
    data = dump.read_bytes()
    (folder / "cut.xml.bz2").write_bytes(data[: len(data) // 2])
    return folder / "cut.xml.bz2"


def get_missing_path(folder: Path, dump: Path) -> Path:
    return folder / "absent.xml.bz2"


def write_png(folder: Path, dump: Path) -> Path:
    (folder / "photo.png").write_bytes(b"\x89PNG")
    return folder / "photo.png"


@pytest.fixture
def unchanged_store(tmp_path: Path, library: Path, bookwheel: Any) -> Any:
    """A store; after the test, its snapshots and refs must be unchanged and valid."""
    store = tmp_path / "store"
    shutil.copytree(library, store)
    library_store = Store.open(str(store))
    old_state = library_store.snapshots.list_ids(), library_store.refs.read_history("latest")
    yield store
    assert (library_store.snapshots.list_ids(), library_store.refs.read_history("latest")) == old_state
    assert library_store.refs.list_names() == ["latest"]
    assert bookwheel("verify", "--store", store).code == 0


@pytest.mark.parametrize(
    ("write", "code", "message"),
    [(write_truncated, 1, "cut.xml.bz2"), (get_missing_path, 1, "absent.xml.bz2"), (write_png, 2, "photo.png")],
)
def test_invalid_dump_is_rejected(
    write: WriteDump, code: int, message: str, tmp_path: Path, unchanged_store: Path, mini_dump: Path, reindex: Any
) -> None:
    result = reindex(unchanged_store, dump=write(tmp_path, mini_dump))
    assert result.code == code, result.err
    assert message in result.complaint


def test_missing_dump_creates_no_store(tmp_path: Path, reindex: Any) -> None:
    result = reindex(tmp_path / "store", dump=tmp_path / "absent.xml.bz2")
    assert result.code == 1
    assert "absent.xml.bz2" in result.complaint
    assert not (tmp_path / "store").exists()


def test_multistream_index_of_another_dump_is_rejected(
    tmp_path: Path, unchanged_store: Path, mini_dump: Path, reindex: Any, make_multistream: Callable[..., str]
) -> None:
    dump_folder, other_folder = tmp_path / "dump", tmp_path / "other"
    for folder, pages in ((dump_folder, 10), (other_folder, 7)):
        folder.mkdir()
        make_multistream(folder, mini_dump, pages_a_stream=pages)
    (index,) = dump_folder.glob("*-index*")
    index.write_bytes((other_folder / index.name).read_bytes())
    (dump,) = set(dump_folder.iterdir()) - {index}
    result = reindex(unchanged_store, dump=dump)
    assert result.code == 1
    assert "index" in result.complaint


def test_encoder_without_tokenizer_is_rejected(tmp_path: Path, unchanged_store: Path, tiny: Path, reindex: Any) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "encoder"))
    (folder / "tokenizer.json").unlink()
    result = reindex(unchanged_store, encoder=folder)
    assert result.code == 1
    assert str(folder) in result.complaint


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [
        ({"encoder": "/nowhere/at-all"}, 1, "/nowhere/at-all"),
        ({"recipe": "/nowhere.toml"}, 2, "/nowhere.toml"),
        ({"ref": "../escape"}, 2, "is not a ref name"),
        ({"limit": 0}, 2, "limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_invalid_option_is_rejected_before_the_build(
    option: dict[str, Any], code: int, message: str, unchanged_store: Path, reindex: Any
) -> None:
    result = reindex(unchanged_store, **option)
    assert (result.code, message in result.complaint, "chunk" in result.err) == (code, True, False), result.err


RECIPES = {
    "a wrong factory": ('[index.hnsw]\nfactory = "HSNW32"', 2, "HSNW32"),
    "a wrong dtype": ('[encode]\ndtype = "int3"', 2, "choose one of float16, float32"),
    "an unknown field of the encoder": ("[encode.spec]\npoolling = 'cls'", 2, "poolling"),
    "no TOML": ("[chunk\n", 2, "is not TOML"),
}


@pytest.mark.parametrize(("text", "code", "message"), RECIPES.values(), ids=RECIPES.keys())
def test_invalid_recipe_is_rejected(
    text: str, code: int, message: str, tmp_path: Path, unchanged_store: Path, reindex: Any
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    result = reindex(unchanged_store, recipe=recipe)
    assert result.code == code, result.err
    assert message in result.complaint


def test_store_below_a_file_is_rejected(tmp_path: Path, reindex: Any) -> None:
    (tmp_path / "file").touch()
    result = reindex(tmp_path / "file" / "store")
    assert result.code == 1
    assert str(tmp_path / "file" / "store") in result.complaint


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["search", "Who?", "-k", "248"], 2, "k is 248 but the snapshot holds 247 passages"),
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
def test_invalid_request_is_rejected(argv: list[str], code: int, message: str, library: Path, bookwheel: Any) -> None:
    result = bookwheel(*argv, "--store", library)
    assert result.code == code, result.err
    assert message.lower() in result.complaint.lower()


def test_question_encoder_of_another_space_is_rejected(library: Path, other_tiny: Path, bookwheel: Any) -> None:
    result = bookwheel("search", "Who?", "--question-encoder", other_tiny, "--store", library)
    assert result.code == 3
    assert "weights differ" in result.complaint


def test_missing_store_is_rejected(tmp_path: Path, bookwheel: Any) -> None:
    for argv in (["search", "Who?"], ["log"], ["show"], ["verify"], ["pull", "latest", tmp_path / "dest"]):
        result = bookwheel(*argv, "--store", tmp_path / "none")
        assert result.code == 1, argv
        assert "there is no bookwheel store" in result.complaint
    assert not list(tmp_path.iterdir())


def test_empty_dump_name_creates_no_store(tmp_path: Path, bookwheel: Any) -> None:
    result = bookwheel("reindex", "--dump", " ", "--store", tmp_path / "new")
    assert result.code == 2
    assert "the name of the dump is empty: give a path, a URL or a glob" in result.complaint
    assert not list(tmp_path.iterdir())


def test_malicious_markup_drops_at_most_its_page(
    tmp_path: Path, reindex: Any, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> None:
    markups = [text * 40_000 for text in ("{{a|", "[[", "<div>", "'''''", "<ref>")] + ["{|\n|\n" * 20_000]
    texts = [f"Page {page} says some words. {markup}" for page, markup in enumerate(["", *markups, ""], 1)]
    pages = [page_xml(page, text) for page, text in enumerate(texts, 1)]
    dump = tmp_path / "deep.xml"
    dump.write_bytes(export_xml(*pages))
    result = reindex(tmp_path / "store", dump=dump)
    assert result.code == 0, result.err
    counts = result.json["counts"]
    assert counts["articles"] + sum(counts["dropped"].values()) == len(pages)
    assert counts["articles"] >= 2, "the pages without markup are kept"
