"""A rebuild derives an inverted index from the parent's, and gives the bytes of a full build."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from beam_jobs import index
from beam_jobs.job_settings import JobSettings
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
from rag_model.store.objects.memo import TARGET_KEY, StageResult
from rag_model.store.pulling.deltas import STAGE, DeltaStep, build_delta
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, PartEntry, passages_path
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import write_parts

INDEX = "index/bm25.postings"
BEFORE = [build_passage("", f"passage {number} of w{number % 9}") for number in range(3000)]
AFTER = [*BEFORE[:10], build_passage("", "inserted one"), *BEFORE[10:2000], *BEFORE[2001:]]


class IndexRebuild:
    """A store with an index of `BEFORE`, and with the parts of `AFTER`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.beam_flags = folder, list[str]()  # without Beam options the launcher runs the tasks
        self.store = Store.open(str(folder / "store"), create=True)
        self.before, self.after = self.add_parts(BEFORE, "old"), self.add_parts(AFTER, "new")
        plan = create_plan(BEFORE)
        file = self.build_index(plan, self.before, None)
        entry = plan.entry() | {"file": INDEX}
        files = {**self.before.files, INDEX: file}
        self.before = Content({}, self.before.parts, files, {}, {}, {"bm25": entry})

    def add_parts(self, passages: list[Passage], name: str) -> Content:
        """Store three parts, of which the second is the same in `BEFORE` and `AFTER`."""
        (self.folder / name).mkdir()
        first_cut = passages.index(BEFORE[100])
        paths = write_parts(passages, [first_cut, 1500], self.folder / name)
        refs = {passages_path(path.stem): self.store.blobs.put_file(path) for path in paths}
        parts = []
        for number, path in enumerate(paths):
            with PassageFile(path) as file:
                parts.append(PartEntry(path.stem, 10 * number, 10 * number + 9, file.n_rows))
        return Content({}, tuple(parts), refs, {}, {}, {})

    def build_index(self, plan: IndexPlan, content: Content, parent: ParentIndex | None) -> BlobRef:
        """Run all index jobs."""
        job_settings = JobSettings.new(self.store.url, self.beam_flags)
        rows = [content.files[passages_path(part.name)] for part in content.parts]
        builds = [index.start_index(self.store, "bm25", plan, rows, None, parent)]
        for job in (index.derive, index.train, index.scatter, index.build_shards):
            builds = job(builds, job_settings)
        return index.merge(builds, job_settings)[0].blob

    def list_derivations(self) -> list[dict[str, object]]:
        """Return the inputs of the indexes that were derived from a parent."""
        return [dict(inputs) for inputs in self.store.memo.iter_inputs("derive")]

    def run(self, plan: IndexPlan) -> bytes:
        """Build the index of `AFTER`, and return its bytes."""
        parent = ParentIndex.find(self.store, self.before, self.after, "bm25", plan)
        return self.store.blobs.read(self.build_index(plan, self.after, parent))

    def build_in_this_process(self) -> bytes:
        """Build the index of `AFTER` in this process, without a parent, and return its bytes."""
        (self.folder / "work").mkdir(exist_ok=True)
        paths = sorted((self.folder / "new").iterdir())
        build.run_stages(create_plan(AFTER), paths, self.folder / "whole", self.folder / "work")
        return (self.folder / "whole").read_bytes()

    def record_delta(self, delta: Path) -> None:
        """Record a file as the delta of the first part."""
        path = passages_path("part-00000")
        step = DeltaStep(self.after.files[path], self.before.files[path], is_passages=True)
        self.store.memo.get_or_create(
            STAGE, step.inputs(), lambda _: StageResult({"delta": delta}, {TARGET_KEY: step.target.id})
        )


def create_plan(passages: list[Passage], **settings: str) -> IndexPlan:
    return KIND.plan(IndexRecipe("BM25", settings=settings), len(passages), 0)


@pytest.fixture
def rebuild(tmp_path: Path) -> IndexRebuild:
    return IndexRebuild(tmp_path)


def test_an_index_is_derived_from_the_parents_without_deltas(rebuild: IndexRebuild) -> None:
    expected, rebuild.beam_flags = rebuild.build_in_this_process(), ["--runner=FnApiRunner"]
    assert rebuild.run(create_plan(AFTER)) == expected
    assert len(rebuild.list_derivations()) == 1
    assert len(list(rebuild.store.memo.iter_inputs("merge"))) == 1, "only the parent's index was merged"


def test_a_recorded_delta_is_read_instead_of_the_passages(rebuild: IndexRebuild) -> None:
    """The delta contains another text than the new part, which shows what was read."""
    (folder := rebuild.folder / "other").mkdir()
    edited_part = write_parts([*AFTER[:10], build_passage("", "told by the delta"), *AFTER[11:101]], [], folder)[0]
    write_delta(rebuild.folder / "old" / "part-00000.parquet", edited_part, folder / "delta")
    rebuild.record_delta(folder / "delta")
    (folder / "index").write_bytes(rebuild.run(create_plan(AFTER)))
    opened_index = KIND.open(IndexFiles(folder / "index", list, len(AFTER)), create_plan(AFTER).entry())
    assert (opened_index.find_missing_terms("told"), opened_index.find_missing_terms("inserted")) == ([], ["insert"])


@pytest.mark.parametrize("buffer_bytes", [32 << 20, 20_000, 100, 0])
def test_new_texts_are_buffered_up_to_a_limit_and_otherwise_read_twice(
    rebuild: IndexRebuild, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small delta may have long texts: 20,000 bytes are too few to buffer them."""
    long_passages = [build_passage("", f"{'long ' * 6_000} {number}") for number in range(2)]
    rebuild.after = rebuild.add_parts([*AFTER[:50], *long_passages, *AFTER[50:]], "longer")
    path, plan = passages_path("part-00000"), create_plan([*AFTER, *long_passages])
    step = DeltaStep(rebuild.after.files[path], rebuild.before.files[path], is_passages=True)
    assert build_delta(rebuild.store, step).outputs
    parent = ParentIndex.find(rebuild.store, rebuild.before, rebuild.after, "bm25", plan)
    assert parent is not None
    assert bool(PartMatch.find(rebuild.store, parent.parts[0], buffer_bytes).buffered_texts) == (buffer_bytes > 20_000)
    monkeypatch.setattr(parent_index, "_BUFFERED_BYTES", buffer_bytes)
    assert parent.derive(rebuild.store, plan, rebuild.folder / "derived")
    paths, folder = sorted((rebuild.folder / "longer").iterdir()), rebuild.folder
    build.run_stages(plan, paths, folder / "whole", folder / "old")
    assert (folder / "derived").read_bytes() == (folder / "whole").read_bytes()


@pytest.mark.parametrize("runs", [b"[[0, 40]]", b"[[0, 10], [-1, 99999999], [10, 90]]", b"[[90, 91], [0, 10]]", b""])
def test_an_invalid_delta_does_not_change_the_index(rebuild: IndexRebuild, runs: bytes) -> None:
    delta = rebuild.folder / "delta"
    with pq.ParquetWriter(delta, PASSAGE_SCHEMA) as file:
        file.add_key_value_metadata({"runs": runs})
    rebuild.record_delta(delta)
    assert rebuild.run(create_plan(AFTER)) == rebuild.build_in_this_process()


def test_a_damaged_parent_index_does_not_change_the_new_index(rebuild: IndexRebuild) -> None:
    intact = rebuild.store.blobs.read(rebuild.before.files[INDEX])
    for damaged in (intact[:-9], intact[:7000] + b"\xff" * 2000 + intact[9000:]):
        files = {**rebuild.before.files, INDEX: rebuild.store.blobs.put_bytes(damaged)}
        rebuild.before = replace(rebuild.before, files=files)
        assert rebuild.run(create_plan(AFTER)) == rebuild.build_in_this_process()
    assert rebuild.list_derivations() == []


def test_an_index_of_another_language_is_not_derived(rebuild: IndexRebuild) -> None:
    plan = create_plan(AFTER, language="german")
    assert ParentIndex.find(rebuild.store, rebuild.before, rebuild.after, "bm25", plan) is None
    assert ParentIndex.find(rebuild.store, None, rebuild.after, "bm25", create_plan(AFTER)) is None
