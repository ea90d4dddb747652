"""Beam's workers chunk a dump whose format and chunker come from two other packages."""

import os
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.dump_formats.dump_format import FORMATS
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.plugin_package import install_package
from tests.fixtures.window_chunker import save_tokenizer

MESSAGE = (
    "From {i}@y.org Thu Jan  1 00:00:00 2026\nMessage-ID: <m{i}@y.org>\nSubject: Letter {i}\n\nDear {i}, hello.\n\n"
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "archive.mbox"
    path.write_text("".join(MESSAGE.format(i=i) for i in range(40)))
    return path


@pytest.mark.slow
def test_mail_archive_is_built_by_workers(
    tmp_path: Path, archive: Path, reindex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path / "mail", "dump_formats", "mail = tests.fixtures.mail_dump:FORMAT")
    install_package(tmp_path / "chunker", "chunkers", "overlapping = tests.fixtures.window_chunker:OverlappingWindows")
    root = Path(__file__).parents[2]  # Both packages import modules of `tests`.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(tmp_path / "mail"), str(tmp_path / "chunker")]))
    monkeypatch.syspath_prepend(tmp_path / "mail")
    monkeypatch.syspath_prepend(tmp_path / "chunker")
    save_tokenizer(tmp_path / "tokenizer.json", "[UNK]")
    chunk_settings = f'chunker = "overlapping"\nsettings = {{ tokens = 60, tokenizer = "{tmp_path}/tokenizer.json" }}'
    recipe = tmp_path / "recipe.toml"
    # A graph would need more jobs than a BM25 index.
    recipe.write_text(f'[index.bm25]\nfactory = "BM25"\nover = "text"\n[chunk]\n{chunk_settings}\n')
    monkeypatch.setattr(FORMATS, "_loaded", {})
    first_build = reindex(tmp_path / "store", dump=archive, recipe=recipe, beam=["--direct_num_workers=1"])
    assert first_build.code == 0, first_build.err
    with Snapshot.open(str(tmp_path / "store")) as snapshot:
        assert snapshot.n == 40
        titles = {passage.title for passage in snapshot.passages(range(40))}
        assert titles == {f"Letter {i}" for i in range(40)}
        assert snapshot.manifest.content.corpus["kind"] == "documents"
        assert snapshot.manifest.content.recipe["chunk"]["chunker"] == "overlapping"
    second_build = reindex(tmp_path / "store", dump=archive, recipe=recipe)
    assert second_build.json["snapshot"] == first_build.json["snapshot"]


def test_unknown_format_is_rejected_with_the_accepted_formats(tmp_path: Path, archive: Path, reindex: Any) -> None:
    result = reindex(tmp_path / "store", dump=archive)
    assert result.code == 2
    assert "archive.mbox is not a dump of a known format: give documents as JSONL (.jsonl, .ndjson)" in result.err
