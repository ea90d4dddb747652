"""The flow `reindex` on a small real dump: what it builds, reuses and refuses."""

import asyncio
import bz2
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact
from prefect.client.schemas.sorting import ArtifactSort
from prefect.logging.configuration import setup_logging
from prefect.settings import PREFECT_LOGGING_LEVEL, temporary_settings

from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot

STAGES = ["plan", "chunk", "embed", "train", "scatter", "shard", "merge", "tune", "gate"]
COUNTS = {"articles": 3, "passages": 247, "embedded": 247, "reused": 0, "truncated": 247, "dropped": {"redirect": 37}}


def read_artifacts_of_run(report: str) -> dict[str, Any]:
    """Return the data of the Prefect artifacts of the run that wrote a report, by key."""

    async def read() -> list[Artifact]:
        async with get_client() as client:
            report_filter = ArtifactFilter(key=ArtifactFilterKey(any_=["reindex-report"]))
            reports = await client.read_artifacts(artifact_filter=report_filter, sort=ArtifactSort.CREATED_DESC)
            (run,) = {artifact.flow_run_id for artifact in reports if report in str(artifact.data)}
            return await client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))

    return {str(artifact.key): artifact.data for artifact in asyncio.run(read())}


def count_records(store: Path) -> dict[str, int]:
    return {stage.name: len(list(stage.iterdir())) for stage in (store / "memo").iterdir()}


def test_build_publishes_snapshot_and_moves_ref(library_build: Any, bookwheel: Any) -> None:
    store, reply = library_build.store, library_build.reply
    assert reply["counts"] == COUNTS
    assert reply["metrics"]["hnsw"]["recall@20"] > 0.95
    assert reply["gate"]["passed"]
    assert list(reply["seconds"]) == STAGES

    (move,) = bookwheel("log", "--store", store, "--json").json
    assert (move["number"], move["snapshot"]) == (1, reply["snapshot"])
    assert bookwheel("verify", "--store", store, "--json").json["ok"]
    with Snapshot.open(str(store)) as snapshot:
        assert snapshot.id == reply["snapshot"]
        assert snapshot.n == reply["counts"]["passages"]
        assert len(snapshot.manifest.content.parts) == 2
        folders = {name.partition("/")[0] for name in snapshot.manifest.content.files}
        assert folders == {"articles", "passages", "embeddings", "index", "encoder", "trained"}
        effort = snapshot.manifest.content.indexes["hnsw"]["search"]["efSearch"]
        assert 20 <= effort < 128, "efSearch is tuned for the recall target of the recipe; the default is 128"
        assert reply["metrics"]["hnsw"] == snapshot.manifest.metrics["hnsw"]
        assert set(reply["metrics"]["hnsw"]) >= {"recall@20_p5", "distances", "degree", "unreachable", "repaired"}
        (first,) = snapshot.passages([0])
        assert (first.title, first.page_id) == ("Anarchism", "12")
    assert not list((store / "runs").glob("*")), "a finished run deletes its task results"


def test_report_is_one_self_contained_page(library_build: Any) -> None:
    reply = library_build.reply
    page = Path(reply["report"].removeprefix("file://")).read_text()
    assert reply["snapshot"] in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:|https://[a-z]+\.wikipedia)""", page)
    for word in ("redirect", "hnsw", "recall", *STAGES):
        assert word in page, word


@pytest.fixture
def run_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a run with the log level of a worker."""
    logger = logging.getLogger("prefect.flow_runs")
    with temporary_settings(updates={PREFECT_LOGGING_LEVEL: "INFO"}):
        setup_logging()
        logger.addHandler(caplog.handler)
        yield caplog
        logger.removeHandler(caplog.handler)
    setup_logging()


@pytest.mark.usefixtures("prefect_server")
def test_log_and_prefect_artifacts_describe_build(
    reindex: Any, tmp_path: Path, run_log: pytest.LogCaptureFixture
) -> None:
    reply = reindex(tmp_path / "store").json
    messages = run_log.messages
    assert f"snapshot {reply['snapshot']}: latest@1 names it" in messages
    assert f"build report: {reply['report']}" in messages
    (counts,) = {line for line in messages if line.startswith("counts: ")}
    assert counts.startswith("counts: 3 articles, 247 passages, 247 embedded, ")
    assert counts.endswith("; dropped: 37 redirect")
    (gate,) = {line for line in messages if line.startswith("gate: passed: ")}
    assert all(f"{check['name']} is {check['observed']}" in gate for check in reply["gate"]["checks"])
    for name in STAGES:
        assert any(line.startswith(f"{name}: done in ") for line in messages), name

    artifacts = read_artifacts_of_run(reply["report"])
    table = json.loads(artifacts["reindex-counts"])
    assert {"what": "passages", "value": "247"} in table
    assert {"what": "dropped: redirect", "value": "37"} in table
    shown_values = {row["what"]: row["value"] for row in table}
    assert set(shown_values) >= {f"{stage}, seconds" for stage in STAGES}
    assert shown_values["index hnsw: recall@20"] == f"{reply['metrics']['hnsw']['recall@20']:,}"
    for stage in STAGES:
        assert artifacts[f"reindex-{stage}"] == 100.0, stage


def test_rerun_builds_nothing_and_moves_no_ref(tmp_path: Path, reindex: Any, bookwheel: Any) -> None:
    first = reindex(tmp_path).json
    records_before = count_records(tmp_path)
    second = reindex(tmp_path).json
    assert second["snapshot"] == first["snapshot"]
    assert second["number"] == first["number"] == 1
    assert second["counts"] == {**COUNTS, "embedded": 0, "reused": 247, "truncated": 0}
    assert count_records(tmp_path) == records_before
    assert len(bookwheel("log", "--store", tmp_path, "--json").json) == 1


def test_snapshot_id_depends_on_content_not_on_paths(
    tmp_path: Path, library_build: Any, reindex: Any, tiny: Path, mini_dump: Path
) -> None:
    encoder_link = tmp_path / "another-name"
    encoder_link.symlink_to(tiny)
    copied_dump = tmp_path / "moved.xml.bz2"
    copied_dump.write_bytes(mini_dump.read_bytes())
    assert (
        reindex(tmp_path / "b", encoder=encoder_link, dump=copied_dump).json["snapshot"]
        == library_build.reply["snapshot"]
    )


@pytest.mark.slow
def test_workers_and_one_process_build_equal_snapshots(
    tmp_path: Path, reindex: Any, mini_dump: Path, make_multistream: Callable[..., str]
) -> None:
    dump, recipe = make_multistream(tmp_path, mini_dump, pages_a_stream=10), tmp_path / "bm25.toml"
    # A graph would need more jobs.
    recipe.write_text('part_bytes = 50_000\n[index.bm25]\nfactory = "BM25"\nover = "text"\n')
    with_workers = reindex(tmp_path / "2", dump=dump, recipe=recipe, beam=["--direct_num_workers=2"]).json
    without_workers = reindex(tmp_path / "0", dump=dump, recipe=recipe).json
    assert with_workers["snapshot"] == without_workers["snapshot"]
    assert with_workers["counts"] == without_workers["counts"] == COUNTS


def test_other_chunker_gives_other_snapshot(
    tmp_path: Path, store: Path, library_build: Any, reindex: Any, recipe: Path
) -> None:
    words_recipe = tmp_path / "words.toml"
    words_recipe.write_text(recipe.read_text() + '\n[chunk]\nchunker = "words"\n')
    reply, words_reply = library_build.reply, reindex(store, recipe=words_recipe, ref="words").json
    assert words_reply["snapshot"] != reply["snapshot"]
    assert words_reply["counts"]["passages"] < reply["counts"]["passages"], "passages do not end with sections"


def test_limit_is_number_of_articles_and_licence_is_in_every_hit(tmp_path: Path, reindex: Any, bookwheel: Any) -> None:
    reply = reindex(tmp_path, limit=2, licence="GFDL 1.3").json
    assert reply["counts"]["articles"] == 2
    (result,) = bookwheel("search", "A question?", "--store", tmp_path, "--json").json["results"]
    assert all(", GFDL 1.3; excerpt" in hit["licence"] for hit in result["hits"])


def test_dry_run_builds_nothing(tmp_path: Path, reindex: Any, bookwheel: Any) -> None:
    result = reindex(tmp_path, "--dry-run")
    assert result.code == 0
    assert result.json["snapshot"] is None
    assert result.json["counts"]["parts"] == 2
    assert not list(tmp_path.iterdir())


def test_build_reports_missing_files_of_parent_and_rebuilds(store: Path, reindex: Any, library_build: Any) -> None:
    for blob in (path for path in (store / "blobs").rglob("*") if path.is_file()):
        blob.unlink()
    second = reindex(store)
    assert second.code == 0, second.err
    parent = library_build.reply["snapshot"]
    assert f"2 of 2 parts of the parent {parent[:12]} are gone: they are built again" in second.err
    assert (second.json["snapshot"], second.json["counts"]["reused"]) == (parent, 0)


def test_explain_lists_reusable_work_and_builds_nothing(
    library: Path, reindex: Any, bookwheel: Any, tiny: Path, mini_dump: Path
) -> None:
    records_before = count_records(library)
    reply = reindex(library, "--explain").json
    assert reply["parent"] == Store.open(str(library)).snapshots.resolve("latest")
    stages = {row["stage"]: (row["reused"], row["total"], row["changed"]) for row in reply["stages"]}
    assert stages.pop("plan") == (2, 2, {})
    assert stages == {
        "chunk": (3, 3, {}),
        "embed": (247, 247, {}),
        "train/hnsw": (1, 1, {}),
        "shard/hnsw": (1, 1, {}),
        "index/hnsw": (1, 1, {}),
    }
    options = ["--dump", mini_dump, "--encoder", tiny, "--store", library]
    table = bookwheel("reindex", *options, "--explain").out.splitlines()
    assert [line.split()[0] for line in table] == [
        "parent",
        "stage",
        "plan",
        "chunk",
        "embed",
        "train/hnsw",
        "shard/hnsw",
        "index/hnsw",
        "train/ivfpq",
        "index/ivfpq",
        "train/bm25",
        "index/bm25",
        "forecast",
        "stage",
        *reply["forecast"]["stages"],
        "total",
    ]
    assert count_records(library) == records_before


@pytest.fixture
def edited_dump(mini_dump: Path, tmp_path: Path) -> Path:
    """The dump of the next month, with one more sentence in an article."""
    pages = bz2.decompress(mini_dump.read_bytes())
    heading = re.search(rb"\n== [^=]+ ==\n", pages)  # The encoder reads only the start of a passage.
    assert heading is not None
    edited = pages[: heading.end()] + b"A sentence was put here, quite new.\n" + pages[heading.end() :]
    path = tmp_path / "next-month.xml.bz2"
    path.write_bytes(bz2.compress(edited))
    return path


def test_next_month_reuses_training_and_unchanged_pieces(
    tmp_path: Path, reindex: Any, bookwheel: Any, recipe: Path, edited_dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_model.index.lists.kind._MIN_LISTS_TO_REUSE", 4)
    recipe_path = tmp_path / "two.toml"
    recipe_path.write_text(recipe.read_text() + '\n[index.lists]\nfactory = "IVF4,SQ8"\n')
    store, open_snapshot = tmp_path / "store", lambda: Snapshot.open(str(tmp_path / "store"))
    first = reindex(store, recipe=recipe_path).json["snapshot"]
    records_before = count_records(store)
    with open_snapshot() as snapshot:
        content_before = snapshot.manifest.content
    planned_stages = reindex(store, "--explain", recipe=recipe_path, dump=edited_dump).json["stages"]
    reused = {row["stage"]: row["reused"] for row in planned_stages if row["stage"].startswith("train/")}
    assert reused == {"train/hnsw": 1, "train/lists": 1}
    (graph_stage,) = [row for row in planned_stages if row["stage"] == "shard/hnsw"]
    assert [graph_stage[name] for name in ("reused", "total", "recorded", "unit")] == [1, 1, 0, "to update"]
    second = reindex(store, recipe=recipe_path, dump=edited_dump).json
    assert 0 < second["counts"]["embedded"] < 20
    metrics = second["metrics"]["hnsw"]
    assert [metrics[name] for name in ("built_cells", "updated_cells", "reused_cells", "generation")] == [0, 1, 0, 1]
    assert 0 < metrics["replaced"] < 0.1
    assert metrics["recall@20"] > 0.95
    records_after = count_records(store)
    expected = {"train": 0, "scatter": 2, "shard": 1, "merge": 2}  # One of two parts has changed, for both indexes.
    assert {stage: records_after[stage] - records_before[stage] for stage in expected} == expected
    records = [json.loads(path.read_text()) for path in (store / "memo" / "scatter").iterdir()]
    encoded_counts = [record["facts"].get("encoded") for record in records]
    assert second["counts"]["embedded"] in encoded_counts, "only the new vectors of the changed part"
    with open_snapshot() as snapshot:
        content_after, notes = snapshot.manifest.content, snapshot.manifest.provenance["notes"]
    for path in ("trained/hnsw", "trained/lists"):
        assert content_after.files[path] == content_before.files[path]
    assert notes == [f"index {name}: trained as in snapshot {first[:12]}" for name in ("hnsw", "lists")]
    description = bookwheel("show", "latest", "--store", store).out
    assert "updated_cells 1, reused_cells 0, generation 1" in description
    assert "cells whose graph was updated" in Path(second["report"].removeprefix("file://")).read_text()

    rebuilt = reindex(store, "--rebuild-graphs", recipe=recipe_path, dump=edited_dump).json
    assert rebuilt["snapshot"] != second["snapshot"]
    assert "generation" not in rebuilt["metrics"]["hnsw"]
    assert count_records(store)["shard"] - records_after["shard"] == 1

    seeded = tmp_path / "seeded.toml"
    seeded.write_text(recipe_path.read_text().replace("[index.lists]", "[index.lists]\nseed = 1"))
    stages = {row["stage"]: row for row in reindex(store, "--explain", recipe=seeded, dump=edited_dump).json["stages"]}
    assert (stages["train/lists"]["reused"], stages["train/lists"]["changed"]) == (0, {"seed": 1})
    assert stages["train/hnsw"]["reused"] == 1


def check_refused(result: Any, store: Path, expected_latest: str | None) -> str:
    """Check that a build published its snapshot but did not move `latest`; return the name of the failed check."""
    assert result.code == 3
    reply = result.json
    opened_store = Store.open(str(store))
    assert opened_store.snapshots.get(reply["snapshot"])
    assert reply["number"] is None
    current = opened_store.refs.find_current("latest")
    assert (current.snapshot if current else None) == expected_latest
    (failed, *_) = [check for check in reply["gate"]["checks"] if not check["passed"]]
    (error_line,) = [line for line in result.err.splitlines() if line.startswith("bookwheel: ")]
    assert f"{failed['name']} is {failed['observed']}, wanted {failed['wanted']}" in error_line
    assert reply["snapshot"][:12] in error_line
    return str(failed["name"])


def test_gate_refuses_low_recall(tmp_path: Path, reindex: Any) -> None:
    recipe_path = tmp_path / "sparse.toml"
    recipe_path.write_text('[index.hnsw]\nfactory = "HNSW2"\nef_construction = 1\nsearch = { efSearch = 1 }\n')
    store = tmp_path / "store"
    assert check_refused(reindex(store, recipe=recipe_path), store, None) == "hnsw recall@20, mean"


def test_gate_refuses_lost_passages_and_other_encoder_space(
    store: Path, library_build: Any, reindex: Any, other_tiny: Path
) -> None:
    parent = library_build.reply["snapshot"]
    assert check_refused(reindex(store, limit=1), store, parent) == "passages lost since the parent"
    assert check_refused(reindex(store, encoder=other_tiny), store, parent) == "encoder space"
    assert reindex(store, encoder=other_tiny, ref="candidate").code == 0  # A new ref has no previous snapshot.
    assert Store.open(str(store)).refs.list_names() == ["candidate", "latest"]


def test_gate_refuses_older_dump(
    tmp_path: Path, reindex: Any, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> None:
    newer, older = tmp_path / "newer.xml", tmp_path / "older.xml"
    newer.write_bytes(export_xml(*(page_xml(page, f"Page {page} says some words.") for page in range(1, 9))))
    older.write_bytes(newer.read_bytes().replace(b"2026-11-01T", b"2026-10-01T"))
    store = tmp_path / "store"
    parent = reindex(store, dump=newer).json["snapshot"]
    assert check_refused(reindex(store, dump=older), store, parent) == "newest revision"


def test_gate_checks_floor_on_user_questions(tmp_path: Path, recipe: Path, reindex: Any) -> None:
    questions, recipe_path, store = tmp_path / "dev.jsonl", tmp_path / "strict.toml", tmp_path / "store"
    rows = [{"question": "What is autism?", "answers": ["qzx"]}, {"question": "Who?", "answers": ["of"]}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = f'\n[gate.questions.dev]\nfile = "{questions}"\nretriever = "rrf(hnsw, exact)"\nmeasure = "Success@50"\n'
    recipe_path.write_text(f"{recipe.read_text()}{table}floor = 0.6\n")
    failed_check = check_refused(reindex(store, recipe=recipe_path), store, None)
    assert failed_check == "Success@50 of rrf(hnsw, exact) on the questions dev"
    recipe_path.write_text(f"{recipe.read_text()}{table}floor = 0.5\n")
    result = reindex(store, recipe=recipe_path)
    assert (result.code, result.json["number"]) == (0, 1), result.err
    recipe_path.write_text(f"{recipe.read_text()}{table}floor = 0.5\n".replace("dev.jsonl", "gone.jsonl"))
    result = reindex(tmp_path / "other", recipe=recipe_path)
    assert (result.code, "the gate's questions dev cannot be used" in result.complaint) == (1, True)
    assert not (tmp_path / "other").exists()
