"""A rebuild of an index of words is made of the parent's, with deltas and without; the bytes are those of a build."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from beam_jobs import index
from beam_jobs.launch import Launch
from rag_model.corpus.passage_delta import write_delta
from rag_model.corpus.passages import PASSAGE_SCHEMA, PassageFile
from rag_model.corpus.records import Passage
from rag_model.index import build
from rag_model.index.kind import IndexFiles
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.kind import KIND
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots import parent_index
from rag_model.snapshots.parent_index import ParentIndex, PartMatch
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import TARGET_KEY as AFTER_FACT
from rag_model.store.objects.memo import StageResult
from rag_model.store.pulling.deltas import STAGE, DeltaStep, build_delta
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, PartEntry, passages_path
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import write_parts

INDEX = "index/bm25.postings"
BEFORE = [build_passage("", f"passage {number} of w{number % 9}") for number in range(3000)]
AFTER = [*BEFORE[:10], build_passage("", "inserted one"), *BEFORE[10:2000], *BEFORE[2001:]]


class Work:
    """A store with an index of the passages before, and the parts after."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.beam = folder, list[str]()  # without options of Beam the launcher runs the tasks
        self.store = Store.open(str(folder / "store"), create=True)
        self.before, self.after = self.content(BEFORE, "old"), self.content(AFTER, "new")
        plan = plan_of(BEFORE)
        file = self.built(plan, self.before, None)
        entry = plan.entry() | {"file": INDEX}
        files = {**self.before.files, INDEX: file}
        self.before = Content({}, self.before.parts, files, {}, {}, {"bm25": entry})

    def content(self, passages: list[Passage], name: str) -> Content:
        """Return three parts; the second is equal before and after."""
        (self.folder / name).mkdir()
        cut = passages.index(BEFORE[100])
        paths = write_parts(passages, [cut, 1500], self.folder / name)
        refs = {passages_path(path.stem): self.store.blobs.put_file(path) for path in paths}
        parts = []
        for number, path in enumerate(paths):
            with PassageFile(path) as file:
                parts.append(PartEntry(path.stem, 10 * number, 10 * number + 9, file.n_rows))
        return Content({}, tuple(parts), refs, {}, {}, {})

    def built(self, plan: IndexPlan, content: Content, earlier: ParentIndex | None) -> BlobRef:
        """Run all jobs."""
        launch = Launch.new(self.store.url, self.beam)
        rows = [content.files[passages_path(part.name)] for part in content.parts]
        builds = [index.start_index(self.store, "bm25", plan, rows, None, earlier)]
        for job in (index.derive, index.train, index.scatter, index.build_shards):
            builds = job(builds, launch)
        return index.merge(builds, launch)[0].blob

    def derived(self) -> list[dict[str, object]]:
        """Return the inputs of the indexes that were made of earlier ones."""
        return [dict(found) for found in self.store.memo.iter_inputs("derive")]

    def rebuilt(self, plan: IndexPlan) -> bytes:
        """Build the index of the passages after."""
        earlier = ParentIndex.find(self.store, self.before, self.after, "bm25", plan)
        return self.store.blobs.read(self.built(plan, self.after, earlier))

    def whole(self) -> bytes:
        """Build it in this process, of its passages alone."""
        (self.folder / "work").mkdir(exist_ok=True)
        paths = sorted((self.folder / "new").iterdir())
        build.run_stages(plan_of(AFTER), paths, self.folder / "whole", self.folder / "work")
        return (self.folder / "whole").read_bytes()

    def tell(self, delta: Path) -> None:
        """Record a delta of the first part, whatever it holds."""
        path = passages_path("part-00000")
        step = DeltaStep(self.after.files[path], self.before.files[path], is_passages=True)
        self.store.memo.get_or_create(
            STAGE, step.inputs(), lambda _: StageResult({"delta": delta}, {AFTER_FACT: step.target.id})
        )


def plan_of(passages: list[Passage], **settings: str) -> IndexPlan:
    return KIND.plan(IndexRecipe("BM25", settings=settings), len(passages), 0)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_an_index_is_made_of_the_parents_by_hashes_and_by_deltas(work: Work) -> None:
    whole, work.beam = work.whole(), ["--runner=FnApiRunner"]
    assert work.rebuilt(plan_of(AFTER)) == whole
    assert len(work.derived()) == 1
    assert len(list(work.store.memo.iter_inputs("merge"))) == 1, "of the parent"


def test_a_delta_is_used_where_there_is_one(work: Work) -> None:
    """One that holds another text shows what was read."""
    (folder := work.folder / "other").mkdir()
    other = write_parts([*AFTER[:10], build_passage("", "told by the delta"), *AFTER[11:101]], [], folder)[0]
    write_delta(work.folder / "old" / "part-00000.parquet", other, folder / "delta")
    work.tell(folder / "delta")
    (folder / "index").write_bytes(work.rebuilt(plan_of(AFTER)))
    opened = KIND.open(IndexFiles(folder / "index", list, len(AFTER)), plan_of(AFTER).entry())
    assert (opened.find_missing_terms("told"), opened.find_missing_terms("inserted")) == ([], ["insert"])


@pytest.mark.parametrize("room", [32 << 20, 20_000, 100, 0])
def test_new_texts_are_held_where_there_is_room_and_else_read_again(
    work: Work, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a delta that is small, but whose text is not, are read twice: 20,000 bytes are too few for them."""
    new = [build_passage("", f"{'long ' * 6_000} {number}") for number in range(2)]
    work.after = work.content([*AFTER[:50], *new, *AFTER[50:]], "longer")
    path, plan = passages_path("part-00000"), plan_of([*AFTER, *new])
    step = DeltaStep(work.after.files[path], work.before.files[path], is_passages=True)
    assert build_delta(work.store, step).outputs
    earlier = ParentIndex.find(work.store, work.before, work.after, "bm25", plan)
    assert earlier is not None
    assert bool(PartMatch.find(work.store, earlier.parts[0], room).buffered_texts) == (room > 20_000)
    monkeypatch.setattr(parent_index, "_BUFFERED_BYTES", room)
    assert earlier.derive(work.store, plan, work.folder / "derived")
    build.run_stages(plan, sorted((work.folder / "longer").iterdir()), work.folder / "whole", work.folder / "old")
    assert (work.folder / "derived").read_bytes() == (work.folder / "whole").read_bytes()


@pytest.mark.parametrize("runs", [b"[[0, 40]]", b"[[0, 10], [-1, 99999999], [10, 90]]", b"[[90, 91], [0, 10]]", b""])
def test_a_delta_that_is_none_only_costs_time(work: Work, runs: bytes) -> None:
    bad = work.folder / "bad"
    with pq.ParquetWriter(bad, PASSAGE_SCHEMA) as file:
        file.add_key_value_metadata({"runs": runs})
    work.tell(bad)
    assert work.rebuilt(plan_of(AFTER)) == work.whole()


def test_a_damaged_index_of_the_parent_only_costs_time(work: Work) -> None:
    good = work.store.blobs.read(work.before.files[INDEX])
    for bad in (good[:-9], good[:7000] + b"\xff" * 2000 + good[9000:]):
        changed = {**work.before.files, INDEX: work.store.blobs.put_bytes(bad)}
        work.before = replace(work.before, files=changed)
        assert work.rebuilt(plan_of(AFTER)) == work.whole()
    assert work.derived() == []


def test_another_language_inherits_nothing(work: Work) -> None:
    plan = plan_of(AFTER, language="german")
    assert ParentIndex.find(work.store, work.before, work.after, "bm25", plan) is None
    assert ParentIndex.find(work.store, None, work.after, "bm25", plan_of(AFTER)) is None
