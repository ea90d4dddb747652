"""Two real snapshots of one store: compared, named, rolled back, and pulled in pieces, by the command line."""

import bz2
import shutil
from pathlib import Path
from typing import Any

import pytest

from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot


@pytest.fixture(scope="session")
def edited_dump(mini_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small dump with one sentence of its first article edited."""
    path = tmp_path_factory.mktemp("edited") / "edited.xml.bz2"
    text = bz2.decompress(mini_dump.read_bytes())
    sentence = b"is a [[political philosophy]]"
    assert text.count(sentence) == 1
    path.write_bytes(bz2.compress(text.replace(sentence, b"is an old [[political philosophy]]")))
    return path


@pytest.fixture
def store(library: Path, tmp_path: Path, edited_dump: Path, reindex: Any) -> Path:
    """A copy of the library in which `latest` has moved on to the edited dump."""
    copy = tmp_path / "store"
    shutil.copytree(library, copy)
    result = reindex(copy, dump=edited_dump)
    assert result.code == 0, result.err
    assert 1 <= result.json["counts"]["embedded"] <= 5, "the rest keeps its vectors"
    return copy


def test_versions_are_compared_named_and_rolled_back(store: Path, bookwheel: Any) -> None:
    old, new = (move["snapshot"] for move in bookwheel("log", "--store", store, "--json").json[::-1])
    reply = bookwheel("diff", "latest@1", "latest", "--store", store, "--json").json
    assert (reply["before"], reply["after"]) == (old, new)
    assert reply["articles"] == {"added": 0, "changed": 1, "removed": 0}
    assert [article["title"] for article in reply["examples"]["changed"]] == ["Anarchism"]
    assert 1 <= reply["passages"]["changed"] <= 5
    assert set(reply["pull"]) == {"passages", "embeddings", "encoder", "index/hnsw"}
    assert reply["pull"]["encoder"]["fetched_bytes"] == 0
    words = bookwheel("diff", "latest@1", "latest", "--store", store).out
    assert "changed   Anarchism\n" in words

    tagged = bookwheel("tag", old[:8], "good", "--note", "as in the paper", "--store", store, "--json").json
    assert (tagged["ref"], tagged["number"], tagged["snapshot"], tagged["note"]) == ("good", 1, old, "as in the paper")
    back = bookwheel("rollback", "latest", "--store", store, "--json").json
    assert (back["number"], back["snapshot"], back["previous"], back["note"]) == (3, old, new, "rollback to @1")
    assert bookwheel("rollback", "latest@2", "--store", store).out.startswith("latest@4 is snapshot")
    assert [move["number"] for move in bookwheel("log", "--store", store, "--json").json] == [4, 3, 2, 1]


def test_a_name_is_deleted(store: Path, bookwheel: Any) -> None:
    bookwheel("tag", "latest@1", "good", "--store", store)
    reply = bookwheel("tag", "--delete", "good", "--store", store, "--json").json
    assert (reply["dry_run"], reply["ref"], reply["number"], reply["others"]) == (True, "good", 1, [])
    assert "nothing was changed" in bookwheel("tag", "--delete", "good", "--store", store).out
    assert bookwheel("tag", "--delete", "good", "--yes", "--store", store, "--json").json["number"] == 2
    assert bookwheel("log", "--ref", "good", "--store", store).out.splitlines()[0].startswith("good@2  nothing")
    assert [one["snapshot"] for one in bookwheel("log", "--ref", "good", "--store", store, "--json").json] == [
        None,
        reply["snapshot"],
    ]
    assert bookwheel("tag", "latest", "good", "--store", store, "--json").json["number"] == 3


@pytest.mark.parametrize(
    ("verb", "code", "why"),
    [
        (["rollback", "nothing"], 1, "ref nothing has no history"),
        (["rollback", "latest", "--to", 9], 1, "ref latest has no move 9"),
        (["rollback", "latest", "--to", 1], 2, "already"),
        (["rollback", "latest"], 2, "named no other snapshot"),
        (["tag", "0123456789ab", "v1"], 1, "no snapshot or ref '0123456789ab'"),
        (["tag", "latest", "a/b"], 2, "not a ref name"),
        (["tag", "latest"], 2, "tag takes a snapshot and a ref: `tag latest REF`"),
        (["tag", "--delete", "nothing", "--yes"], 1, "there is no ref 'nothing'"),
        (["tag", "--delete", "latest", "v1"], 2, "`tag --delete v1`"),
        (["diff", "latest", "nothing"], 1, "no snapshot or ref 'nothing'"),
        (["pull", "latest", "dest", "--index", "bm25"], 2, "no index 'bm25' to pull: choose from hnsw, exact"),
        (["pull", "latest", "dest", "--index", "exact", "--no-embeddings"], 2, "pull them too"),
    ],
)
def test_what_cannot_be_is_one_sentence(library: Path, bookwheel: Any, verb: list[Any], code: int, why: str) -> None:
    result = bookwheel(*verb, "--store", library)
    assert (result.code, why in result.complaint) == (code, True)


def test_no_ref_goes_back_to_a_snapshot_that_is_broken(store: Path, bookwheel: Any) -> None:
    opened = Store.open(str(store))
    files = opened.snapshots.get(opened.refs.get_move("latest", 1).snapshot).content.files
    opened.blobs.get_local_path(files["index/hnsw.faiss"]).unlink()
    result = bookwheel("rollback", "latest", "--store", store)
    assert result.code == 3
    assert "index/hnsw.faiss: missing" in result.complaint
    assert opened.refs.list_numbers("latest") == [1, 2]


def test_a_pull_takes_what_is_chosen(library: Path, tmp_path: Path, bookwheel: Any) -> None:
    def pulled(*flags: str) -> set[str]:
        result = bookwheel("pull", "latest", tmp_path, "--store", library, *flags, "--json")
        folder = Path(result.json["path"])
        return {str(path.relative_to(folder)).partition("/")[0] for path in folder.rglob("*") if path.is_file()}

    assert pulled("--passages-only") == {"manifest.json", "passages"}
    assert pulled("--index", "hnsw", "--no-embeddings") == {"manifest.json", "passages", "encoder", "index"}
    assert pulled("--index", "exact") == {"manifest.json", "passages", "encoder", "index", "embeddings"}
    assert Snapshot.from_folder(tmp_path).embeddings("part-00000").shape[1] == Snapshot.from_folder(tmp_path).dim


def test_a_pull_tells_what_was_taken_down_and_keeps_as_many_as_it_is_told(
    store: Path, tmp_path: Path, bookwheel: Any
) -> None:
    first = bookwheel("pull", "latest@1", tmp_path / "dest", "--store", store, "--json").json
    assert (first["pruned"], first["taken_down"]) == ([], [])
    opened = Store.open(str(store))
    opened.takedowns.record_replacement(first["snapshot"], opened.snapshots.resolve("latest"))
    words = bookwheel("pull", "latest", tmp_path / "dest", "--store", store).out
    assert f"taken down since, and still in {tmp_path / 'dest'}: {first['snapshot'][:12]}; pull with --keep" in words
    words = bookwheel("pull", "latest", tmp_path / "dest", "--store", store, "--keep", 9).out
    assert words.endswith("; 1 earlier snapshots deleted\n")
    assert not Path(first["path"]).exists()


def test_the_recipe_that_is_shown_rebuilds_the_snapshot(
    library: Path, tmp_path: Path, bookwheel: Any, reindex: Any
) -> None:
    shown = bookwheel("show", "latest", "--recipe-only", "--store", library)
    (tmp_path / "recipe.toml").write_text(shown.out)
    made = reindex(tmp_path / "store", recipe=tmp_path / "recipe.toml").json
    assert made["snapshot"] == Store.open(str(library)).snapshots.resolve("latest")
    assert "[index.hnsw]" in shown.out
