"""A chunker of another package, with a setting and a file, cuts a dump, and each decides the keys."""

import bz2
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.window_chunker import offer, save_tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the import path that offers the chunker."""
    offer(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")


class Cuts:
    """The parts that the runs on a store have cut, told as it goes."""

    def __init__(self, store: Path) -> None:
        self._store, self._known = store, set[str]()

    def new(self) -> list[tuple[int, int]]:
        """Return articles, and those inherited, of each part cut since the last call."""
        paths = {path.name: path for path in (self._store / "memo" / "chunk").iterdir()}
        facts = [json.loads(paths[name].read_text())["facts"] for name in sorted({*paths} - self._known)]
        self._known = {*paths}
        return [(fact["articles"], fact["inherited"]) for fact in facts]


def test_a_chunker_of_another_package(
    package: None, tmp_path: Path, reindex: Any, bookwheel: Any, recipe: Path, mini_dump: Path
) -> None:
    store, tokenizer = tmp_path / "store", tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, "[UNK]")
    cuts, text = Cuts(store), recipe.read_text()

    def run(overlap: int, file: Path = tokenizer, *flags: str, **options: Any) -> Any:
        own = tmp_path / "recipe.toml"
        settings = f'tokens = 60, overlap = {overlap}, tokenizer = "{file}"'
        own.write_text(f'{text}\n[chunk]\nchunker = "overlapping"\nsettings = {{ {settings} }}\n')
        result = reindex(store, *flags, recipe=own, **options)
        assert result.code == 0, result.err
        return result.json

    first = run(20)
    assert sorted(cuts.new()) == [(1, 0), (2, 0)]
    with Snapshot.open(str(store)) as snapshot:
        kept = snapshot.manifest.content.recipe["chunk"]
        assert kept["settings"] == {
            "tokens": 60,
            "overlap": 20,
            "tokenizer": Store.open(str(store)).blobs.put_file(tokenizer).id,
        }
        one, two = snapshot.passages([0, 1])
    assert one.text.split()[-5:] == [word for word in two.text.split() if word in one.text.split()[-5:]][:5]
    assert two.start_word < one.start_word + one.n_words, "neighbours overlap"

    moved = Path(shutil.copy(tokenizer, tmp_path / "moved.json"))
    assert run(20, moved)["snapshot"] == first["snapshot"]
    assert cuts.new() == []
    edited = tmp_path / "edited.xml.bz2"
    edited.write_bytes(bz2.compress(bz2.decompress(mini_dump.read_bytes()).replace(b"'''Autism'''", b"Edited", 1)))
    run(20, dump=edited)
    assert sorted(cuts.new()) == [(2, 1)], "the article that is as it was"
    run(18)
    assert sorted(cuts.new()) == [(1, 0), (2, 0)], "another overlap"
    save_tokenizer(tokenizer, "[OTHER]")
    run(18)
    assert sorted(cuts.new()) == [(1, 0), (2, 0)], "another tokenizer under the same name"
    explained = {row["stage"]: row for row in run(18, tokenizer, "--explain")["stages"]}
    assert (explained["chunk"]["recorded"], explained["chunk"]["changed"]) == (2, {})
