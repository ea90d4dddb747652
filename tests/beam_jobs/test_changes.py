"""A rebuild of an index of words: parts with few new passages take over the parent's pieces; the bytes are equal."""

from pathlib import Path

from beam_jobs import index
from beam_jobs.launch import Launch
from rag_model.corpus.records import Passage
from rag_model.index import stages
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.kind import KIND
from rag_model.index.recipe import IndexRecipe
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.training.data.examples import passage_of
from tests.fixtures.words import write_parts

BEFORE = [passage_of("", f"passage {number} of w{number % 9}") for number in range(60)]
AFTER = [*BEFORE[:10], passage_of("", "inserted"), *BEFORE[10:40], *BEFORE[41:]]


def parts(store: Store, passages: list[Passage], folder: Path) -> list[BlobRef]:
    folder.mkdir()
    return [store.blobs.put_file(path) for path in write_parts(passages, [30], folder)]


def built(store: Store, plan: IndexPlan, rows: list[BlobRef], earlier: list[list[tuple[int, BlobRef]]]) -> bytes:
    launch = Launch.new(store.url, ["--runner=FnApiRunner"])
    builds = [index.start(store, "bm25", plan, rows, None, earlier)]
    for job in (index.train, index.scatter, index.build_shards):
        builds = job(builds, launch)
    return store.blobs.read(index.merge(builds, launch)[0].blob)


def test_a_rebuild_takes_over_pieces_that_are_there(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    plan = KIND.plan(IndexRecipe("BM25"), 60, 0)
    before, after = (parts(store, some, tmp_path / name) for name, some in (("old", BEFORE), ("new", AFTER)))
    built(store, plan, before, [])
    known = [[(0, before[0])], [(0, before[0]), (1, before[1])]]
    taken = built(store, plan, after, known)
    (tmp_path / "work").mkdir()
    stages.build(plan, sorted((tmp_path / "new").iterdir()), tmp_path / "whole", tmp_path / "work")
    assert taken == (tmp_path / "whole").read_bytes()


def test_parts_whose_pieces_are_gone_are_counted(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    plan = KIND.plan(IndexRecipe("BM25"), 60, 0)
    before, after = (parts(store, some, tmp_path / name) for name, some in (("old", BEFORE), ("new", AFTER)))
    assert built(store, plan, after, [[(0, before[0])], [(1, before[1])]])
