"""What is wrong with an input is told in one sentence, with the right exit code, and nothing is half published."""

import bz2
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


def corrupt(folder: Path, dump: Path) -> Path:
    data = bytearray(dump.read_bytes())
    data[len(data) // 2] ^= 0xFF
    (folder / "corrupt.xml.bz2").write_bytes(data)
    return folder / "corrupt.xml.bz2"


def empty(folder: Path, dump: Path) -> Path:
    (folder / "empty.xml.bz2").touch()
    return folder / "empty.xml.bz2"


def empty_inside(folder: Path, dump: Path) -> Path:
    (folder / "inside.xml.bz2").write_bytes(bz2.compress(b""))
    return folder / "inside.xml.bz2"


def without_pages(folder: Path, dump: Path) -> Path:
    head = bz2.decompress(dump.read_bytes()).split(b"  <page>")[0]
    (folder / "none.xml").write_bytes(head + b"</mediawiki>\n")
    return folder / "none.xml"


def other_xml(folder: Path, dump: Path) -> Path:
    (folder / "feed.xml").write_text("<rss><channel><title>News</title></channel></rss>")
    return folder / "feed.xml"


def not_xml(folder: Path, dump: Path) -> Path:
    (folder / "words.xml").write_text("These are words and no markup.\n" * 99)
    return folder / "words.xml"


def absent(folder: Path, dump: Path) -> Path:
    return folder / "absent.xml.bz2"


def of_no_kind(folder: Path, dump: Path) -> Path:
    (folder / "photo.png").write_bytes(b"\x89PNG")
    return folder / "photo.png"


DUMPS: list[tuple[Write, int, str]] = [
    (truncated, 1, "cut.xml.bz2"),
    (corrupt, 1, "corrupt.xml.bz2"),
    (empty, 1, "empty.xml.bz2"),
    (empty_inside, 1, "inside.xml.bz2"),
    (without_pages, 1, "none.xml"),
    (other_xml, 1, "feed.xml"),
    (not_xml, 1, "words.xml"),
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_encoder_that_lacks_a_file(name: str, tmp_path: Path, unharmed: Path, tiny: Path, reindex: Any) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    for path in tiny.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)
    result = reindex(unharmed, encoder=folder)
    assert result.code == 1
    assert str(folder) in result.complaint


def test_an_encoder_cut_short(tmp_path: Path, unharmed: Path, tiny: Path, reindex: Any) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = reindex(unharmed, encoder=folder)
    assert result.code == 1
    assert str(weights) in result.complaint


def test_no_encoder_of_that_name(unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, encoder="/nowhere/at-all")
    assert result.code == 1
    assert "/nowhere/at-all" in result.complaint


RECIPES = {
    "a wrong factory": ('[index.hnsw]\nfactory = "HSNW32"', 2, "HSNW32"),
    "a factory that does not fit": ('[index.ivfpq]\nfactory = "IVF4,PQ7"', 2, "PQ7"),
    "a typo in a key": ("[chunk]\nchuncker = 'words'", 2, "did you mean 'chunker'?"),
    "an unknown table": ("[chunks]\nwords = 3", 2, "did you mean 'chunk'?"),
    "a wrong type": ('[chunk]\nwords = "many"', 2, "words must be a whole number, not 'many'"),
    "an unknown chunker": ('[chunk]\nchunker = "verses"', 2, "verses"),
    "a wrong dtype": ('[encode]\ndtype = "int3"', 2, "choose one of float16, float32"),
    "an unknown field of the encoder": ("[encode.spec]\npoolling = 'cls'", 2, "poolling"),
    "no TOML": ("[chunk\n", 2, "is not TOML"),
    "no index": ("[index]\n", 2, "names no index"),
    "a share above 1": ("[gate]\nmax_passage_loss = 3", 2, "max_passage_loss"),
    "parts of no bytes": ("part_bytes = 0", 2, "part_bytes"),
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


@pytest.mark.parametrize("ref", ["../escape", "a/b", "", ".hidden"])
def test_a_name_that_no_ref_can_have_is_told_before_the_work(ref: str, unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, ref=ref)
    assert result.code == 2
    assert "is not a ref name" in result.complaint
    assert "chunk" not in result.err


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_articles(limit: int, unharmed: Path, reindex: Any) -> None:
    result = reindex(unharmed, limit=limit)
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


BOMB = b"""<!DOCTYPE mediawiki [<!ENTITY a "aaaaaaaaaaaaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;&c;&c;">]>"""


def test_entities_are_never_expanded(
    tmp_path: Path, unharmed: Path, reindex: Any, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> None:
    bomb = tmp_path / "bomb.xml"
    bomb.write_bytes(BOMB + export_xml(page_xml(1, "ENTITY").replace("ENTITY", "&d;")))
    result = reindex(unharmed, dump=bomb)
    assert result.code == 1
    assert "bomb.xml" in result.complaint


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
