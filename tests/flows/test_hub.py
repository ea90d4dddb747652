"""Stores, dumps and exports on the Hub: reading verbs work, and writing verbs say what to do instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.hub import OWNER, Hub

URL = "hf://datasets/me/library"
READING_VERBS = ("log", "show", "verify")
WRITING_COMMANDS = (
    ("gc",),
    ("expire", "--older-than", "1d"),
    ("tag", "latest", "new"),
    ("takedown", "1", "--yes"),
    ("add-index", "latest", "--recipe", "recipe.toml"),
    ("import", "p.tsv", "v.npy", "--encoder", "tiny"),
    ("finetune", "rag-token", "--train", "a.jsonl", "--dev", "a.jsonl"),
)


@pytest.fixture
def filled_hub(hub: Hub, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub with the library as a repository."""
    monkeypatch.setenv("BOOKWHEEL_CACHE", str(tmp_path / "cache"))
    hub.add_folder("datasets/me/library", library)
    return hub


def test_library_on_the_hub_is_read(filled_hub: Hub, library: Path, bookwheel: Any, tmp_path: Path) -> None:
    def run_json(*arguments: object, store: object) -> Any:
        result = bookwheel(*arguments, "--store", store, "--json")
        assert result.code == 0, result.err
        return result.json

    for verb in READING_VERBS:
        assert run_json(verb, store=URL) == run_json(verb, store=library)
    query = ("search", "Who wrote it?")
    assert run_json(*query, store=URL)["results"] == run_json(*query, store=library)["results"]
    pulled = run_json("pull", "latest", tmp_path / "pulled", store=URL)
    assert (Path(pulled["path"]) / "index" / "hnsw.faiss").is_file()
    findings = bookwheel("doctor", "--store", URL, "--json").json["findings"]
    (finding,) = [finding for finding in findings if "store" in finding["what"]]
    assert finding["ok"]
    assert "stores of this kind are never written" in finding["found"]
    assert len(filled_hub.repositories["datasets/me/library"].commits) == 1


@pytest.mark.parametrize("command", WRITING_COMMANDS, ids=lambda command: command[0])
def test_writing_verb_is_rejected_with_advice(
    command: tuple[str, ...], filled_hub: Hub, tiny: Path, bookwheel: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text('[index.small]\nfactory = "Flat"\n')
    Path("a.jsonl").write_text('{"question": "Who?", "answers": ["One"], "context": "One."}\n')
    Path("tiny").symlink_to(tiny)
    result = bookwheel(*command, "--store", URL)
    assert result.code == 1
    assert f"{URL} can be read as a store, but not written" in result.complaint
    assert len(filled_hub.repositories["datasets/me/library"].commits) == 1


def test_build_into_the_hub_is_rejected_before_it_starts(filled_hub: Hub, reindex: Any) -> None:
    filled_hub.add("datasets/me/empty", {})
    for url in (URL, "hf://datasets/me/empty"):
        result = reindex(url)
        assert "`bookwheel export --layout store` to a new place" in result.complaint
        assert len(result.err.splitlines()) == 1


def test_store_is_exported_to_the_hub_and_read(
    filled_hub: Hub, library: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    options = ("--layout", "store", "--store", library)
    exported = bookwheel("export", "latest", "hf://datasets/me/new", *options, "--json")
    assert (exported.code, exported.json["path"]) == (0, "hf://datasets/me/new")
    assert bookwheel("verify", "--store", "hf://datasets/me/new").code == 0
    second = bookwheel("export", "latest", "hf://datasets/me/new", *options)
    assert (second.code, "is not empty" in second.complaint) == (2, True)
    assert bookwheel("export", "latest", "hf://datasets/me/more", *options, "--no-embeddings").code == 2
    assert bookwheel("export", "latest", "hf://me/wiki", "--store", library).code == 2
    assert set(filled_hub.repositories) == {"datasets/me/library", "datasets/me/new"}


def test_recorded_commit_of_the_encoder_is_used_after_the_branch_moved(
    hub: Hub, tiny: Path, other_tiny: Path, reindex: Any, bookwheel: Any, tmp_path: Path
) -> None:
    repository = hub.add_folder("models/me/tiny", tiny)
    first = reindex(tmp_path / "store", encoder="me/tiny")
    assert first.code == 0, first.err
    commit = repository.branches["main"]
    repository.commit({path.name: path.read_bytes() for path in other_tiny.iterdir()})
    second = reindex(tmp_path / "store", encoder="me/tiny")
    assert (second.code, second.json["snapshot"]) == (0, first.json["snapshot"])
    manifest = bookwheel("show", "latest", "--store", tmp_path / "store", "--json").json
    assert manifest["provenance"]["commits"] == {"me/tiny": f"me/tiny@{commit}"}
    text = bookwheel("show", "latest", "--store", tmp_path / "store").out
    assert f"commit    me/tiny: me/tiny@{commit}" in text
    mismatch = reindex(tmp_path / "store", encoder="me/tiny@main")
    assert (mismatch.code, "encoder space" in mismatch.err) == (3, True)
    prefix = reindex(tmp_path / "store", encoder=f"me/tiny@{commit[:8]}")
    assert (prefix.code, prefix.json["snapshot"]) == (0, first.json["snapshot"])
    text = bookwheel("show", "latest", "--store", tmp_path / "store").out
    assert f"me/tiny@{commit}\n" in text
    error = reindex(tmp_path / "store", encoder="me/tiny@v9")
    assert (error.code, "model me/tiny has no revision v9 on the hub" in error.complaint) == (1, True)


def test_texts_exported_to_the_hub_are_a_dump(
    filled_hub: Hub, library: Path, reindex: Any, bookwheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    layout = ("--layout", "jsonl")
    exported = bookwheel("export", "latest", "hf://datasets/me/texts", *layout, "--store", library, "--json")
    build = reindex(tmp_path / "store", dump="hf://datasets/me/texts/corpus.jsonl")
    assert build.code == 0, build.err
    assert build.json["counts"]["passages"] >= exported.json["passages"] > 0
    filled_hub.add("datasets/me/qa", {"questions.jsonl": json.dumps({"question": "Who?", "answers": ["One"]}).encode()})
    questions = "hf://datasets/me/qa/questions.jsonl"
    assert bookwheel("evaluate", "--questions", questions, "--store", tmp_path / "store").code == 0
