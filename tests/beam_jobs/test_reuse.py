"""A rebuild parses and encodes only what changed in a dump, and gives the same snapshot as a full build."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beam_jobs.embed import EmbedTask, embed, run
from beam_jobs.job_settings import JobSettings
from beam_jobs.workers import CPU_FLOAT32, detect_precision
from rag_model.corpus.chunk import ChunkRecipe
from rag_model.encoders.model import choose_fastest_dtype
from rag_model.errors import StoreError
from rag_model.snapshots.content import build_provenance, describe_mixed_precisions, list_precisions
from rag_model.snapshots.encoding import EncodeRecipe
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.stage_results import EmbedResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import articles_path, embeddings_path, passages_path
from tests.fixtures import monthly_dumps
from tests.fixtures.monthly_dumps import OLD, RECIPE, BuildResult, Dumps, Page, build
from tests.fixtures.tiny import save_bert


def test_a_rebuild_parses_and_encodes_only_changes(
    store: Store, month: BuildResult, dumps: Dumps, tiny: Path, tmp_path: Path
) -> None:
    parent_hashes = {passage.hash for passage in month.rows}
    rebuild = build(store, dumps.new, tiny)
    new_passages = [passage for passage in rebuild.rows if passage.hash not in parent_hashes]
    assert {passage.page_id for passage in new_passages} == {"60", "250", "260", "270", "280"}
    assert rebuild.n_parsed == 5
    assert rebuild.counts["embedded"] == len(new_passages)
    assert rebuild.counts["reused"] == len(rebuild.rows) - len(new_passages)

    full = build(Store.open(str(tmp_path / "full"), create=True), dumps.new, tiny)
    assert (full.n_reused, full.counts["reused"]) == (0, 0)
    assert full.rows == rebuild.rows
    np.testing.assert_allclose(rebuild.vectors, full.vectors, atol=1e-3)


def test_parts_keep_their_ranges_and_new_pages_fill_the_last(
    store: Store, month: BuildResult, dumps: Dumps, tiny: Path
) -> None:
    rebuild = build(store, dumps.new, tiny)
    assert len(month.ranges) == 3
    assert rebuild.ranges[:2] == month.ranges[:2]
    assert rebuild.ranges[-1][1] == 280
    (unchanged_part,) = {"part-00000", "part-00001"} - {
        part.name for part in month.content.parts if contains_page(part, 60, 90)
    }
    for path in (passages_path(unchanged_part), embeddings_path(unchanged_part), articles_path(unchanged_part)):
        assert rebuild.content.files[path] == month.content.files[path], "a part without a change is the same file"


def contains_page(part: Any, *pages: int) -> bool:
    return any(part.first_page <= page <= part.last_page for page in pages)


def test_reused_passages_and_articles_equal_new_ones(store: Store, dumps: Dumps, tiny: Path, tmp_path: Path) -> None:
    stripped_store = Store.open(str(shutil.copytree(store.files.local_path(""), tmp_path / "bare")))
    parent = Parent.from_ref(stripped_store, "latest").manifest
    assert parent is not None
    for path, blob in parent.content.files.items():  # same parent and ranges, but no results to reuse
        if path.startswith(("articles/", "embeddings/")):
            stripped_store.files.local_path(blob.path).unlink(missing_ok=True)
    actual, reference = build(store, dumps.new, tiny), build(stripped_store, dumps.new, tiny)
    assert actual.n_reused > 0
    assert (reference.n_reused, reference.counts["reused"]) == (0, 0)
    assert actual.content.parts == reference.content.parts
    for part in actual.content.parts:
        for path in (passages_path(part.name), articles_path(part.name)):
            assert actual.content.files[path] == reference.content.files[path]
    np.testing.assert_allclose(actual.vectors, reference.vectors, atol=1e-3)


def test_articles_are_reused_with_their_salient_spans_or_parsed_again(dumps: Dumps, tiny: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, chunk=ChunkRecipe(words=10, spans=True))
    store = Store.open(str(tmp_path / "spans"), create=True)
    month = build(store, dumps.old, tiny, recipe)
    bare_store = Store.open(str(shutil.copytree(store.files.local_path(""), tmp_path / "bare")))
    for path, blob in month.content.files.items():
        if path.startswith("spans/"):
            bare_store.files.local_path(blob.path).unlink(missing_ok=True)
    assert build(store, dumps.new, tiny, recipe).n_parsed == 5
    assert build(bare_store, dumps.new, tiny, recipe).n_parsed > 5


def test_text_that_changed_under_its_old_revision_is_noticed(
    store: Store, write_dump: Callable[[Sequence[Page]], str], tiny: Path
) -> None:
    rebuild = build(store, write_dump([*OLD[:-1], replace(OLD[-1], lead="Edited by hand.")]), tiny)
    assert rebuild.n_parsed == 1
    assert any(passage.text.startswith("Edited by hand.") for passage in rebuild.rows)


def test_a_second_build_of_the_same_dump_gives_the_same_snapshot(store: Store, dumps: Dumps, tiny: Path) -> None:
    first, second = build(store, dumps.new, tiny), build(store, dumps.new, tiny)
    assert first.content == second.content
    assert (second.n_reused, second.n_parsed, second.counts["embedded"]) == (0, 0, 0)
    assert store.refs.list_numbers("latest") == [1, 2]


def test_vectors_of_an_interrupted_run_are_not_encoded_again(
    store: Store, month: BuildResult, dumps: Dumps, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []

    def embed_one_part(task: EmbedTask, store: Store) -> Any:
        if reports:
            raise KeyboardInterrupt
        reports.append(embed(task, store))
        return reports[0]

    with monkeypatch.context() as patch:
        patch.setattr(monthly_dumps, "embed", embed_one_part)
        with pytest.raises(KeyboardInterrupt):
            build(store, dumps.new, tiny)
    rebuild = build(store, dumps.new, tiny)
    parent_hashes = {passage.hash for passage in month.rows}
    n_new = sum(passage.hash not in parent_hashes for passage in rebuild.rows)
    assert 0 < reports[0]["encoded"] < n_new
    assert rebuild.counts["embedded"] == n_new - reports[0]["encoded"]


def test_a_part_without_passages_leaves_no_gap(
    write_dump: Callable[[Sequence[Page]], str], tiny: Path, tmp_path: Path
) -> None:
    """Redirects fill whole parts; the next build must number and divide the other pages as this one did."""
    store = Store.open(str(tmp_path), create=True)
    redirect_ids = {10, 20, 30, 40, 100, 110, 120, 130, 140, 150, 160, 170, 180, 230, 240}
    pages = [replace(page, redirect="Page 50") if page.page_id in redirect_ids else page for page in OLD]
    small_recipe = replace(RECIPE, part_bytes=400)
    first = build(store, write_dump(pages), tiny, small_recipe)
    assert first.ranges[0][0] == 0
    assert all(previous[1] + 1 == following[0] for previous, following in pairwise(first.ranges))
    second = build(store, write_dump(pages), tiny, small_recipe)
    assert second.content == first.content
    assert second.counts["embedded"] == 0


@pytest.mark.parametrize(
    ("setting", "encoded"),
    [
        ({"chunk": ChunkRecipe(words=10, quarantine_floor=30)}, False),
        ({"encode": EncodeRecipe(dtype="float32")}, True),
        ({"encode": EncodeRecipe(spec={"max_length": 32})}, True),
    ],
)
def test_a_setting_invalidates_only_dependent_stages(
    store: Store, dumps: Dumps, tiny: Path, setting: dict[str, Any], encoded: bool
) -> None:
    rebuild = build(store, dumps.old, tiny, replace(RECIPE, **setting))
    assert rebuild.n_parsed == 0
    assert rebuild.counts["embedded"] == (rebuild.counts["passages"] if encoded else 0)


def test_another_passage_length_parses_again_and_equal_passages_keep_their_vectors(
    store: Store, month: BuildResult, dumps: Dumps, tiny: Path
) -> None:
    rebuild = build(store, dumps.old, tiny, replace(RECIPE, chunk=ChunkRecipe(words=20)))
    parent_hashes = {passage.hash for passage in month.rows}
    new_passages = [passage for passage in rebuild.rows if passage.hash not in parent_hashes]
    assert (rebuild.n_reused, rebuild.n_parsed) == (0, len(OLD))
    assert 0 < rebuild.counts["embedded"] == len(new_passages) < len(rebuild.rows)


def test_parts_of_another_size_reuse_results(store: Store, month: BuildResult, dumps: Dumps, tiny: Path) -> None:
    rebuild = build(store, dumps.old, tiny, replace(RECIPE, part_bytes=3_500))
    assert (rebuild.n_parsed, rebuild.counts["embedded"]) == (0, 0)
    assert rebuild.rows == month.rows
    assert len(rebuild.ranges) < len(month.ranges)


def test_another_encoder_encodes_all_and_a_renamed_one_nothing(
    store: Store, month: BuildResult, dumps: Dumps, tiny: Path, tmp_path: Path
) -> None:
    renamed = Path(shutil.copytree(tiny, tmp_path / "renamed"))
    rebuild = build(store, dumps.old, renamed)
    assert (rebuild.content, rebuild.counts["embedded"]) == (month.content, 0)
    other_build = build(store, dumps.new, save_bert(tmp_path / "other", seed=2))
    assert other_build.counts["reused"] == 0
    assert other_build.n_parsed == 5


def test_unchanged_documents_keep_their_vectors(tiny: Path, tmp_path: Path) -> None:
    store, dump = Store.open(str(tmp_path / "store"), create=True), tmp_path / "documents.jsonl"
    documents = [{"id": str(number), "title": f"T{number}", "text": f"words of {number}"} for number in range(60)]
    dump.write_text("".join(json.dumps(document) + "\n" for document in documents))
    first = build(store, str(dump), tiny, replace(RECIPE, part_bytes=200))
    documents[7]["text"] = "other words"
    more_documents = [
        *documents,
        *({"id": f"n{number}", "title": "New", "text": f"new {number}"} for number in range(20)),
    ]
    dump.write_text("".join(json.dumps(document) + "\n" for document in more_documents))
    rebuild = build(store, str(dump), tiny, replace(RECIPE, part_bytes=200))
    assert len(rebuild.ranges) > 1
    assert rebuild.ranges == first.ranges
    assert (rebuild.counts["embedded"], rebuild.counts["reused"]) == (21, 59)


def test_a_new_ref_reuses_results_of_latest(store: Store, dumps: Dumps, tiny: Path) -> None:
    rebuild = build(store, dumps.new, tiny, ref="candidate")
    assert (rebuild.n_parsed, rebuild.counts["reused"] > 0) == (5, True)


def test_a_damaged_file_is_named_and_not_reused(store: Store, month: BuildResult, dumps: Dumps, tiny: Path) -> None:
    blob = month.content.files[embeddings_path("part-00000")]
    damaged_file = store.files.local_path(blob.path)
    data = bytearray(damaged_file.read_bytes())
    data[-1] ^= 1
    damaged_file.write_bytes(data)
    with pytest.raises(StoreError, match=blob.id):
        build(store, dumps.new, tiny)
    damaged_file.unlink()
    assert build(store, dumps.new, tiny).counts["embedded"] > 0


def test_a_rebuild_removes_a_page_that_was_taken_down(
    store: Store, month: BuildResult, dumps: Dumps, tiny: Path
) -> None:
    """Only the part of the page changes, and nothing is parsed or encoded."""
    store.takedowns.add("enwiki", ["60"], "", "")
    store.takedowns.add("dewiki", ["70"], "", "")
    rebuild = build(store, dumps.old, tiny)
    assert {passage.page_id for passage in month.rows} - {passage.page_id for passage in rebuild.rows} == {"60"}
    assert rebuild.counts["dropped"] == {**month.counts["dropped"], "taken_down": 1}
    assert (rebuild.n_parsed, rebuild.counts["embedded"]) == (0, 0)
    (part,) = (part for part in month.content.parts if contains_page(part, 60))
    for path, ref in month.content.files.items():
        assert (rebuild.content.files[path] == ref) == (part.name not in path), path


@pytest.fixture
def embed_tasks(store: Store, dumps: Dumps, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> list[EmbedTask]:
    """The embed tasks of a rebuild, which have run with this machine's precision."""
    tasks: list[EmbedTask] = []
    with monkeypatch.context() as patch:
        patch.setattr(monthly_dumps, "embed", lambda task, store: tasks.append(task) or embed(task, store))
        build(store, dumps.new, tiny)
    assert {task.precision for task in tasks} == {detect_precision()}
    return tasks


def test_vectors_of_another_device_are_not_reused(
    store: Store, embed_tasks: list[EmbedTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = next(task for task in embed_tasks if task.new_passages)
    assert not embed(task, store)["is_new"]
    monkeypatch.setattr("beam_jobs.embed.describe_precision", lambda encoder: "cuda bfloat16")
    gpu_task = replace(task, precision="cuda bfloat16")
    assert [embed(gpu_task, store)["is_new"] for _ in range(2)] == [True, False]
    assert not embed(task, store)["is_new"]


def test_a_gpu_that_torch_cannot_use_gives_vectors_of_the_cpu(store: Store, embed_tasks: list[EmbedTask]) -> None:
    """The task expects a GPU, because the driver's files exist, but the encoder runs on the CPU."""
    task = next(task for task in embed_tasks if task.new_passages)
    report = embed(task, store)
    assert embed(replace(task, precision="cuda bfloat16"), store) == report
    assert report["arithmetic"] == task.precision


def test_a_record_of_an_older_version_with_another_arithmetic_is_not_used(
    store: Store, embed_tasks: list[EmbedTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(next(task for task in embed_tasks if task.new_passages), precision=CPU_FLOAT32, rows_digest="old")
    monkeypatch.setattr("beam_jobs.embed.describe_precision", lambda encoder: CPU_FLOAT32)
    vectors = store.blobs.put_bytes(b"old")
    for arithmetic, is_used in (("bfloat16", False), ("float32", True), ("", True)):
        older_task = replace(task, rows_digest=f"old {arithmetic}")
        stats = {"rows": 1, "encoded": 1, "device": "cpu", "arithmetic": arithmetic}
        store.memo.write_record("embed", store.memo.compute_key(older_task.inputs()), {"embeddings": vectors}, stats)
        assert (embed(older_task, store)["vectors"] == vectors.to_json()) == is_used


def test_workers_elsewhere_start_unless_they_recorded_all_parts(
    store: Store, embed_tasks: list[EmbedTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = JobSettings(store.url, "run", flags=("--runner=FlinkRunner", "--flink_master=nowhere:1"))
    monkeypatch.setattr("beam_jobs.embed.describe_precision", lambda encoder: "cuda bfloat16")
    started_precisions: list[Any] = []

    def run_on_workers(stage: str, function: Any, tasks: Sequence[EmbedTask], *arguments: Any) -> list[Any]:
        started_precisions.append([task.precision for task in tasks])
        return [embed(replace(task, precision="cuda bfloat16"), store) for task in tasks]

    monkeypatch.setattr("beam_jobs.pipeline.run_on_workers", run_on_workers)
    monkeypatch.setattr(JobSettings, "is_too_small", lambda job_settings, seconds: False)
    embed(replace(embed_tasks[0], precision="cuda bfloat16"), store)  # one part is recorded
    new_tasks = [replace(task, rows_digest=f"new {task.rows_digest}") for task in embed_tasks]
    results = run(new_tasks, remote)
    assert started_precisions == [[""] * len(new_tasks)]  # the workers' own devices decide
    assert run(new_tasks, remote) == [replace(result, is_new=False) for result in results]
    assert len(started_precisions) == 1


def test_detected_precision_is_the_one_that_torch_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        dtype = choose_fastest_dtype(torch.device("cpu"))
        assert detect_precision() == f"cpu {dtype}".replace("torch.", "")
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr("beam_jobs.workers.count_gpus", lambda: 0)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    for flags, expected in (("avx2 avx512_bf16 amx_tile", "cpu bfloat16"), ("avx2 avx512_bf16x", "cpu float32")):
        info.write_text(f"flags : {flags}\n")
        assert detect_precision(info) == expected
    assert detect_precision(tmp_path / "none") == "cpu float32"
    info.write_text("flags : avx512_bf16\n")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert detect_precision(info) == "cpu float32"
    monkeypatch.setattr("beam_jobs.workers.count_gpus", lambda: 2)
    assert detect_precision(info) == "cuda bfloat16"


def test_a_mixture_of_arithmetics_is_a_note_of_the_snapshot() -> None:
    ref = BlobRef(f"sha256:{0:064}", 1)
    new_result, recorded_result = EmbedResult(ref, 5, 5, arithmetic="cpu float32"), EmbedResult(ref, 5, 0)
    parent = {"arithmetic": ["cuda bfloat16"]}
    assert list_precisions({"embeddings": [new_result]}, parent) == ["cpu float32"]
    precisions = list_precisions({"embeddings": [new_result, recorded_result]}, parent)
    assert precisions == ["cpu float32", "cuda bfloat16"]
    (note,) = arithmetic_notes = describe_mixed_precisions({"embeddings": [new_result, recorded_result]}, parent)
    assert note.startswith("vectors of embeddings were computed with cpu float32 and cuda bfloat16")
    assert build_provenance("dump", "encoder", [], {}, precisions, arithmetic_notes)["notes"] == [note]
    remote_result = EmbedResult(ref, 5, 5, arithmetic="endpoint float32")
    assert describe_mixed_precisions({"embeddings": [new_result], "remote": [remote_result]}, parent) == []
