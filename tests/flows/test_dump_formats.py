"""A dump format of another package is recognized, planned and chunked on Beam's workers, by a chunker of a third."""

import os
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.dump_formats.dump_format import FORMATS
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.mail_dump import install
from tests.fixtures.window_chunker import offer, save_tokenizer

MESSAGE = (
    "From {i}@y.org Thu Jan  1 00:00:00 2026\nMessage-ID: <m{i}@y.org>\nSubject: Letter {i}\n\nDear {i}, hello.\n\n"
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "archive.mbox"
    path.write_text("".join(MESSAGE.format(i=i) for i in range(40)))
    return path


@pytest.mark.slow
def test_a_mail_archive_becomes_a_snapshot(
    tmp_path: Path, archive: Path, reindex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "mail")
    offer(tmp_path / "chunker")
    root = Path(__file__).parents[2]  # folder of `tests`, which contains the modules of both
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(tmp_path / "mail"), str(tmp_path / "chunker")]))
    monkeypatch.syspath_prepend(tmp_path / "mail")
    monkeypatch.syspath_prepend(tmp_path / "chunker")
    save_tokenizer(tmp_path / "tokenizer.json", "[UNK]")
    chunk = f'chunker = "overlapping"\nsettings = {{ tokens = 60, tokenizer = "{tmp_path}/tokenizer.json" }}'
    own = tmp_path / "recipe.toml"
    own.write_text(f'[index.bm25]\nfactory = "BM25"\nover = "text"\n[chunk]\n{chunk}\n')  # a graph takes more jobs
    monkeypatch.setattr(FORMATS, "_loaded", {})
    first = reindex(tmp_path / "store", dump=archive, recipe=own, beam=["--direct_num_workers=1"])
    assert first.code == 0, first.err
    with Snapshot.open(str(tmp_path / "store")) as snapshot:
        assert snapshot.n == 40
        titles = {passage.title for passage in snapshot.passages(range(40))}
        assert titles == {f"Letter {i}" for i in range(40)}
        assert snapshot.manifest.content.corpus["kind"] == "documents"
        assert snapshot.manifest.content.recipe["chunk"]["chunker"] == "overlapping"
    again = reindex(tmp_path / "store", dump=archive, recipe=own)
    assert again.json["snapshot"] == first.json["snapshot"]


def test_without_the_package_the_accepted_dumps_are_listed(tmp_path: Path, archive: Path, reindex: Any) -> None:
    refused = reindex(tmp_path / "store", dump=archive)
    assert refused.code == 2
    assert "archive.mbox is not a dump of a known format: give documents as JSONL (.jsonl, .ndjson)" in refused.err
