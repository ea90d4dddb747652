"""The verbs `diff`, `tag`, `rollback` and `pull` on a store with two snapshots."""

import bz2
import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot


@pytest.fixture(scope="module")
def two_versions(
    library: Path, mini_dump: Path, tiny: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A store whose `latest` has moved from the small dump to one with an edited sentence; tests only read it."""
    folder, out = tmp_path_factory.mktemp("versions"), io.StringIO()
    text, sentence = bz2.decompress(mini_dump.read_bytes()), b"is a [[political philosophy]]"
    assert text.count(sentence) == 1
    dump = folder / "edited.xml.bz2"
    dump.write_bytes(bz2.compress(text.replace(sentence, b"is an old [[political philosophy]]")))
    store = Path(shutil.copytree(library, folder / "store"))
    options = ["--dump", dump, "--encoder", tiny, "--recipe", recipe, "--store", store]
    with redirect_stdout(out):
        assert cli.run(["reindex", *map(str, options), "--json"]) == 0
    assert 1 <= json.loads(out.getvalue())["counts"]["embedded"] <= 5, "unchanged passages keep their vectors"
    return store


@pytest.fixture
def store(two_versions: Path, tmp_path: Path) -> Path:
    """A copy of the store with two versions."""
    return Path(shutil.copytree(two_versions, tmp_path / "store"))


def test_versions_are_compared_tagged_and_rolled_back(store: Path, bookwheel: Any) -> None:
    old_snapshot, new_snapshot = (move["snapshot"] for move in bookwheel("log", "--store", store, "--json").json[::-1])
    reply = bookwheel("diff", "latest@1", "latest", "--store", store, "--json").json
    assert (reply["before"], reply["after"]) == (old_snapshot, new_snapshot)
    assert reply["articles"] == {"added": 0, "changed": 1, "removed": 0}
    assert [article["title"] for article in reply["examples"]["changed"]] == ["Anarchism"]
    assert 1 <= reply["passages"]["changed"] <= 5
    assert set(reply["pull"]) == {"passages", "embeddings", "encoder", "index/hnsw"}
    assert reply["pull"]["encoder"]["fetched_bytes"] == 0
    output = bookwheel("diff", "latest@1", "latest", "--store", store).out
    assert "changed   Anarchism\n" in output

    result = bookwheel("tag", old_snapshot[:8], "good", "--note", "as in the paper", "--store", store, "--json")
    fields = {"ref": "good", "number": 1, "snapshot": old_snapshot, "note": "as in the paper"}
    assert result.json.items() >= fields.items()
    result = bookwheel("rollback", "latest", "--store", store, "--json")
    fields = {"number": 3, "snapshot": old_snapshot, "previous": new_snapshot, "note": "rollback to @1"}
    assert result.json.items() >= fields.items()
    assert bookwheel("rollback", "latest@2", "--store", store).out.startswith("latest@4 is snapshot")
    assert [move["number"] for move in bookwheel("log", "--store", store, "--json").json] == [4, 3, 2, 1]


def test_ref_is_deleted(store: Path, bookwheel: Any) -> None:
    bookwheel("tag", "latest@1", "good", "--store", store)
    reply = bookwheel("tag", "--delete", "good", "--store", store, "--json").json
    assert (reply["dry_run"], reply["ref"], reply["number"], reply["others"]) == (True, "good", 1, [])
    assert "nothing was changed" in bookwheel("tag", "--delete", "good", "--store", store).out
    assert bookwheel("tag", "--delete", "good", "--yes", "--store", store, "--json").json["number"] == 2
    assert bookwheel("log", "--ref", "good", "--store", store).out.splitlines()[0].startswith("good@2  nothing")
    moves = bookwheel("log", "--ref", "good", "--store", store, "--json").json
    assert [move["snapshot"] for move in moves] == [None, reply["snapshot"]]
    assert bookwheel("tag", "latest", "good", "--store", store, "--json").json["number"] == 3


@pytest.mark.parametrize(
    ("command", "code", "message"),
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
def test_wrong_arguments_are_refused(
    library: Path, bookwheel: Any, command: list[Any], code: int, message: str
) -> None:
    result = bookwheel(*command, "--store", library)
    assert (result.code, message in result.complaint) == (code, True)


def test_rollback_to_damaged_snapshot_is_refused(store: Path, bookwheel: Any) -> None:
    opened_store = Store.open(str(store))
    files = opened_store.snapshots.get(opened_store.refs.get_move("latest", 1).snapshot).content.files
    opened_store.blobs.get_local_path(files["index/hnsw.faiss"]).unlink()
    result = bookwheel("rollback", "latest", "--store", store)
    assert result.code == 3
    assert "index/hnsw.faiss: missing" in result.complaint
    assert opened_store.refs.list_numbers("latest") == [1, 2]


def test_pull_takes_selected_files(library: Path, tmp_path: Path, bookwheel: Any) -> None:
    def pull_folders(*flags: str) -> set[str]:
        result = bookwheel("pull", "latest", tmp_path, "--store", library, *flags, "--json")
        folder = Path(result.json["path"])
        return {str(path.relative_to(folder)).partition("/")[0] for path in folder.rglob("*") if path.is_file()}

    assert pull_folders("--passages-only") == {"manifest.json", "passages"}
    assert pull_folders("--index", "hnsw", "--no-embeddings") == {"manifest.json", "passages", "encoder", "index"}
    assert pull_folders("--index", "exact") == {"manifest.json", "passages", "encoder", "index", "embeddings"}
    assert Snapshot.from_folder(tmp_path).embeddings("part-00000").shape[1] == Snapshot.from_folder(tmp_path).dim


def test_pull_reports_taken_down_snapshot_and_prunes_it(store: Path, tmp_path: Path, bookwheel: Any) -> None:
    first = bookwheel("pull", "latest@1", tmp_path / "dest", "--store", store, "--json").json
    assert (first["pruned"], first["taken_down"]) == ([], [])
    opened_store = Store.open(str(store))
    opened_store.takedowns.record_replacement(first["snapshot"], opened_store.snapshots.resolve("latest"))
    output = bookwheel("pull", "latest", tmp_path / "dest", "--store", store).out
    assert f"taken down since, and still in {tmp_path / 'dest'}: {first['snapshot'][:12]}; pull with --keep" in output
    output = bookwheel("pull", "latest", tmp_path / "dest", "--store", store, "--keep", 9).out
    assert output.endswith("; 1 earlier snapshots deleted\n")
    assert not Path(first["path"]).exists()


def test_shown_recipe_rebuilds_snapshot(library: Path, tmp_path: Path, bookwheel: Any, reindex: Any) -> None:
    description = bookwheel("show", "latest", "--recipe-only", "--store", library)
    (tmp_path / "recipe.toml").write_text(description.out)
    reply = reindex(tmp_path / "store", recipe=tmp_path / "recipe.toml").json
    assert reply["snapshot"] == Store.open(str(library)).snapshots.resolve("latest")
    assert "[index.hnsw]" in description.out
