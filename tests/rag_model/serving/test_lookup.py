"""A passage is located by its id, for every kind of source."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import NotFoundError
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.monthly_dumps import OLD, RECIPE, build
from tests.fixtures.tiny import save_bert

SMALL = replace(RECIPE, part_bytes=500)
SOURCES = ["dump.xml", "documents.jsonl", "passages.tsv"]


@pytest.fixture(scope="module", params=SOURCES)
def library(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    page_xml: Callable[..., str],
    export_xml: Callable[..., bytes],
    make_multistream: Callable[..., str],
) -> Snapshot:
    """A snapshot of several parts, from each kind of source."""
    folder = tmp_path_factory.mktemp("lookup")
    source = folder / request.param
    kind = source.suffix
    if kind == ".xml":
        source.write_bytes(export_xml(*(page_xml(page.page_id, page.text(), rev_id=page.rev_id) for page in OLD)))
        source = Path(make_multistream(folder, source, pages_a_stream=2))
    elif kind == ".jsonl":
        source.write_text("\n".join(json.dumps({"id": f"a:{page.page_id}", "text": page.text()}) for page in OLD))
    else:
        rows = [f"{page.page_id}\t{' '.join(page.text().split())}\tTitle {page.page_id // 30}" for page in OLD]
        source.write_text("\n".join(["id\ttext\ttitle", *rows]))
    result = build(Store.open(str(folder / "store"), create=True), str(source), save_bert(folder / "tiny"), SMALL)
    return Snapshot.from_manifest(result.store, Manifest(result.content))


def test_every_passage_is_located_with_its_neighbours(library: Snapshot, mcp_server: Any) -> None:
    assert len(library.parts) > 1
    passages = library.passages(range(library.n))
    for row, passage in enumerate(passages):
        located = mcp_server.locate_passage(library, passage.id)
        assert (located.row, located.passage) == (row, passage)
        for step, neighbour_id in ((-1, located.previous), (1, located.next)):
            neighbour = passages[row + step] if 0 <= row + step < library.n else None
            of_page = neighbour is not None and neighbour.page_id == passage.page_id
            assert neighbour_id == (neighbour.id if of_page and neighbour else None)


@pytest.mark.parametrize("identity", ["", ":", "10", "10:999", "9" * 30 + ":0", "²:0", "a:10:-1", "\ud800", "x" * 500])
def test_unknown_id_is_reported(library: Snapshot, identity: str, mcp_server: Any) -> None:
    known_ids = {passage.id for passage in library.passages(range(library.n))}
    if identity in known_ids:  # "10" is the id of a row of the TSV file
        assert mcp_server.locate_passage(library, identity).passage.id == identity
        return
    with pytest.raises(NotFoundError, match="has no passage"):
        mcp_server.locate_passage(library, identity)
