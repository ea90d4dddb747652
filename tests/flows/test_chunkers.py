"""A chunker of another package cuts a dump; its settings and the content of its tokenizer file are part of the key."""

import bz2
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.chunk import VERSION
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.plugin_package import install_package
from tests.fixtures.window_chunker import save_tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the import path that offers the chunker."""
    install_package(tmp_path / "site", "chunkers", "overlapping = tests.fixtures.window_chunker:OverlappingWindows")
    monkeypatch.syspath_prepend(tmp_path / "site")


class ChunkRecords:
    """The chunk records of a store, read as runs add them."""

    def __init__(self, store: Path) -> None:
        self._store, self._known = store, set[str]()

    def read_new(self) -> list[tuple[int, int]]:
        """Return the articles and the reused articles of each part that was chunked since the last call."""
        paths = {path.name: path for path in (self._store / "memo" / "chunk").iterdir()}
        facts = [json.loads(paths[name].read_text())["facts"] for name in sorted({*paths} - self._known)]
        self._known = {*paths}
        return [(fact["articles"], fact["inherited"]) for fact in facts]


def test_chunker_of_another_package_and_its_settings_determine_reuse(
    package: None, tmp_path: Path, reindex: Any, bookwheel: Any, recipe: Path, mini_dump: Path
) -> None:
    store, tokenizer = tmp_path / "store", tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, "[UNK]")
    records, text = ChunkRecords(store), recipe.read_text()

    def run(overlap: int, file: Path = tokenizer, *flags: str, **options: Any) -> Any:
        recipe_file = tmp_path / "recipe.toml"
        chunk_settings = f'tokens = 300, overlap = {overlap}, tokenizer = "{file}"'
        recipe_file.write_text(f'{text}\n[chunk]\nchunker = "overlapping"\nsettings = {{ {chunk_settings} }}\n')
        result = reindex(store, *flags, recipe=recipe_file, **options)
        assert result.code == 0, result.err
        return result.json

    first = run(20)
    assert sorted(records.read_new()) == [(1, 0), (2, 0)]
    with Snapshot.open(str(store)) as snapshot:
        settings = snapshot.manifest.content.recipe["chunk"]["settings"]
        blob = Store.open(str(store)).blobs.put_file(tokenizer)
        assert settings == {"tokens": 300, "overlap": 20, "tokenizer": blob.id}
        passage, neighbour = snapshot.passages([0, 1])
    last_words = passage.text.split()[-5:]
    assert last_words == [word for word in neighbour.text.split() if word in last_words][:5]
    assert neighbour.start_word < passage.start_word + passage.n_words, "neighbours overlap"

    moved_tokenizer = Path(shutil.copy(tokenizer, tmp_path / "moved.json"))
    assert run(20, moved_tokenizer)["snapshot"] == first["snapshot"]
    assert records.read_new() == []
    edited = tmp_path / "edited.xml.bz2"
    edited.write_bytes(bz2.compress(bz2.decompress(mini_dump.read_bytes()).replace(b"'''Autism'''", b"Edited", 1)))
    run(20, dump=edited)
    assert sorted(records.read_new()) == [(2, 1)], "the unchanged article is reused"
    run(18)
    assert sorted(records.read_new()) == [(1, 0), (2, 0)], "another overlap needs another key"
    save_tokenizer(tokenizer, "[OTHER]")
    run(18)
    assert sorted(records.read_new()) == [(1, 0), (2, 0)], "the key depends on the content of the tokenizer file"
    stages = {row["stage"]: row for row in run(18, tokenizer, "--explain")["stages"]}
    assert (stages["chunk"]["recorded"], stages["chunk"]["changed"]) == (2, {})


def test_new_code_version_reuses_no_articles_but_keeps_snapshot_id(
    tmp_path: Path, reindex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    records, first = ChunkRecords(store), reindex(store)
    assert sorted(records.read_new()) == [(1, 0), (2, 0)], first.err
    for module in ("rag_model.corpus.chunk", "beam_jobs.chunk"):
        monkeypatch.setattr(f"{module}.VERSION", VERSION + 1)
    assert reindex(store).json["snapshot"] == first.json["snapshot"]
    assert sorted(records.read_new()) == [(1, 0), (2, 0)]
