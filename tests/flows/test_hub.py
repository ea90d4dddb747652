"""Stores, dumps and exports on the Hub through the command: verbs that read do, those that write say where to go."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.hub import OWNER, Hub

URL = "hf://datasets/me/library"
READERS = ("log", "show", "verify")
WRITERS = (
    ("gc",),
    ("expire", "--older-than", "1d"),
    ("tag", "latest", "new"),
    ("takedown", "1", "--yes"),
    ("add-index", "latest", "--recipe", "recipe.toml"),
    ("import", "p.tsv", "v.npy", "--encoder", "tiny"),
    ("finetune", "rag-token", "--train", "a.jsonl", "--dev", "a.jsonl"),
)


@pytest.fixture
def there(hub: Hub, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, with the library in it."""
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    hub.add_folder("datasets/me/library", library)
    return hub


def test_a_library_there_is_read(there: Hub, library: Path, bookwheel: Any, tmp_path: Path) -> None:
    def results(*words: object, store: object) -> Any:
        result = bookwheel(*words, "--store", store, "--json")
        assert result.code == 0, result.err
        return result.json

    for verb in READERS:
        assert results(verb, store=URL) == results(verb, store=library)
    asked = ("search", "Who wrote it?")
    assert results(*asked, store=URL)["results"] == results(*asked, store=library)["results"]
    pulled = results("pull", "latest", tmp_path / "pulled", store=URL)
    assert (Path(pulled["path"]) / "index" / "hnsw.faiss").is_file()
    (finding,) = [
        one for one in bookwheel("doctor", "--store", URL, "--json").json["findings"] if "store" in one["what"]
    ]
    assert finding["ok"]
    assert "stores of this kind are never written" in finding["found"]
    assert len(there.repositories["datasets/me/library"].commits) == 1


@pytest.mark.parametrize("words", WRITERS, ids=lambda words: words[0])
def test_a_verb_that_writes_says_where_to_go(
    words: tuple[str, ...], there: Hub, tiny: Path, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text('[index.small]\nfactory = "Flat"\n')
    Path("a.jsonl").write_text('{"question": "Who?", "answers": ["One"], "context": "One."}\n')
    Path("tiny").symlink_to(tiny)
    result = bookwheel(*words, "--store", URL)
    assert result.code == 1
    assert f"{URL} can be read as a store, but not written" in result.complaint
    assert len(there.repositories["datasets/me/library"].commits) == 1


def test_a_build_refuses_before_it_begins(there: Hub, reindex: Any) -> None:
    there.add("datasets/me/empty", {})
    for url in (URL, "hf://datasets/me/empty"):
        result = reindex(url)
        assert "`bookwheel export --layout store` to a new place" in result.complaint
        assert len(result.err.splitlines()) == 1


def test_it_is_exported_there_and_read_again(
    there: Hub, library: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    given = ("--layout", "store", "--store", library)
    made = bookwheel("export", "latest", "hf://datasets/me/new", *given, "--json")
    assert (made.code, made.json["path"]) == (0, "hf://datasets/me/new")
    assert bookwheel("verify", "--store", "hf://datasets/me/new").code == 0
    again = bookwheel("export", "latest", "hf://datasets/me/new", *given)
    assert (again.code, "is not empty" in again.complaint) == (2, True)
    assert bookwheel("export", "latest", "hf://datasets/me/more", *given, "--no-embeddings").code == 2
    assert bookwheel("export", "latest", "hf://me/wiki", "--store", library).code == 2
    assert set(there.repositories) == {"datasets/me/library", "datasets/me/new"}


def test_a_branch_that_moved_does_not_change_the_encoder(
    hub: Hub, tiny: Path, other_tiny: Path, reindex: Any, bookwheel: Any, tmp_path: Path
) -> None:
    repository = hub.add_folder("models/me/tiny", tiny)
    first = reindex(tmp_path / "store", encoder="me/tiny")
    assert first.code == 0, first.err
    commit = repository.branches["main"]
    repository.commit({path.name: path.read_bytes() for path in other_tiny.iterdir()})
    again = reindex(tmp_path / "store", encoder="me/tiny")
    assert (again.code, again.json["snapshot"]) == (0, first.json["snapshot"])
    shown = bookwheel("show", "latest", "--store", tmp_path / "store", "--json").json
    assert shown["provenance"]["commits"] == {"me/tiny": f"me/tiny@{commit}"}
    text = bookwheel("show", "latest", "--store", tmp_path / "store").out
    assert f"commit    me/tiny: me/tiny@{commit}" in text
    moved = reindex(tmp_path / "store", encoder="me/tiny@main")
    assert (moved.code, "encoder space" in moved.err) == (3, True)
    prefix = reindex(tmp_path / "store", encoder=f"me/tiny@{commit[:8]}")
    assert (prefix.code, prefix.json["snapshot"]) == (0, first.json["snapshot"])
    text = bookwheel("show", "latest", "--store", tmp_path / "store").out
    assert f"me/tiny@{commit}\n" in text
    missing = reindex(tmp_path / "store", encoder="me/tiny@v9")
    assert (missing.code, "model me/tiny has no revision v9 on the hub" in missing.complaint) == (1, True)


def test_what_is_exported_there_is_a_dump(
    there: Hub, library: Path, reindex: Any, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    exported = bookwheel(
        "export", "latest", "hf://datasets/me/texts", "--layout", "jsonl", "--store", library, "--json"
    )
    made = reindex(tmp_path / "store", dump="hf://datasets/me/texts/corpus.jsonl")
    assert made.code == 0, made.err
    assert made.json["counts"]["passages"] >= exported.json["passages"] > 0
    there.add("datasets/me/asked", {"questions.jsonl": json.dumps({"question": "Who?", "answers": ["One"]}).encode()})
    given = ("--questions", "hf://datasets/me/asked/questions.jsonl", "--store", tmp_path / "store", "--json")
    assert bookwheel("evaluate", *given).code == 0
