"""The flow, end to end on a small real dump: what it makes, what it reuses, what it refuses."""

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


def artifacts_beside(report: str) -> dict[str, Any]:
    """Return what Prefect shows of the run that made a report, by key."""

    async def read() -> list[Artifact]:
        async with get_client() as client:
            named = ArtifactFilter(key=ArtifactFilterKey(any_=["reindex-report"]))
            reports = await client.read_artifacts(artifact_filter=named, sort=ArtifactSort.CREATED_DESC)
            (run,) = {found.flow_run_id for found in reports if report in str(found.data)}
            return await client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))

    return {str(artifact.key): artifact.data for artifact in asyncio.run(read())}


def records(store: Path) -> dict[str, int]:
    return {stage.name: len(list(stage.iterdir())) for stage in (store / "memo").iterdir()}


def test_a_dump_becomes_a_snapshot_that_a_ref_names(built: Any, bookwheel: Any) -> None:
    library, made = built.store, built.made
    assert made["counts"] == COUNTS
    assert made["metrics"]["hnsw"]["recall@20"] > 0.95
    assert made["gate"]["passed"]
    assert list(made["seconds"]) == STAGES

    (move,) = bookwheel("log", "--store", library, "--json").json
    assert (move["number"], move["snapshot"]) == (1, made["snapshot"])
    assert bookwheel("verify", "--store", library, "--json").json["ok"]
    with Snapshot.open(str(library)) as snapshot:
        assert snapshot.id == made["snapshot"]
        assert snapshot.n == made["counts"]["passages"]
        assert len(snapshot.manifest.content.parts) == 2
        assert {name.partition("/")[0] for name in snapshot.manifest.content.files} == {
            "articles",
            "passages",
            "embeddings",
            "index",
            "encoder",
            "trained",
        }
        effort = snapshot.manifest.content.indexes["hnsw"]["search"]["efSearch"]
        assert 20 <= effort < 128, "the recipe's recall target decides, and not the default"
        assert made["metrics"]["hnsw"] == snapshot.manifest.metrics["hnsw"]
        assert set(made["metrics"]["hnsw"]) >= {"recall@20_p5", "distances", "degree", "unreachable", "repaired"}
        (first,) = snapshot.passages([0])
        assert (first.title, first.page_id) == ("Anarchism", "12")
    assert not list((library / "runs").glob("*")), "a finished run leaves no reports of its elements"


def test_the_report_is_one_page_that_needs_nothing_else(built: Any) -> None:
    made = built.made
    page = Path(made["report"].removeprefix("file://")).read_text()
    assert made["snapshot"] in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:|https://[a-z]+\.wikipedia)""", page)
    for said in ("redirect", "hnsw", "recall", *STAGES):
        assert said in page, said


@pytest.fixture
def run_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a run, which a worker's settings let through."""
    logger = logging.getLogger("prefect.flow_runs")
    with temporary_settings(updates={PREFECT_LOGGING_LEVEL: "INFO"}):  # a run sets the level by the settings
        setup_logging()
        logger.addHandler(caplog.handler)
        yield caplog
        logger.removeHandler(caplog.handler)
    setup_logging()


@pytest.mark.usefixtures("prefect_server")
def test_the_log_of_a_run_and_what_prefect_shows_of_it_say_what_was_built(
    reindex: Any, tmp_path: Path, run_log: pytest.LogCaptureFixture
) -> None:
    made = reindex(tmp_path / "store").json
    said = run_log.messages
    for sentence in (
        f"snapshot {made['snapshot']}: latest@1 names it",
        f"build report: {made['report']}",
    ):
        assert sentence in said
    (counts,) = {line for line in said if line.startswith("counts: ")}
    assert counts.startswith("counts: 3 articles, 247 passages, 247 embedded, ")
    assert counts.endswith("; dropped: 37 redirect")
    (gate,) = {line for line in said if line.startswith("gate: passed: ")}
    assert all(f"{check['name']} is {check['observed']}" in gate for check in made["gate"]["checks"])
    for name in STAGES:
        assert any(line.startswith(f"{name}: done in ") for line in said), name

    seen = artifacts_beside(made["report"])
    table = json.loads(seen["reindex-counts"])
    assert {"what": "passages", "value": "247"} in table
    assert {"what": "dropped: redirect", "value": "37"} in table
    shown = {row["what"]: row["value"] for row in table}
    assert set(shown) >= {f"{stage}, seconds" for stage in STAGES}
    assert shown["index hnsw: recall@20"] == f"{made['metrics']['hnsw']['recall@20']:,}"
    for stage in STAGES:
        assert seen[f"reindex-{stage}"] == 100.0, stage


def test_a_rerun_makes_nothing_and_moves_nothing(tmp_path: Path, reindex: Any, bookwheel: Any) -> None:
    first = reindex(tmp_path).json
    before = records(tmp_path)
    again = reindex(tmp_path).json
    assert again["snapshot"] == first["snapshot"]
    assert again["number"] == first["number"] == 1
    assert again["counts"] == {**COUNTS, "embedded": 0, "reused": 247, "truncated": 0}
    assert records(tmp_path) == before
    assert len(bookwheel("log", "--store", tmp_path, "--json").json) == 1


def test_the_id_is_of_the_content_not_of_names_and_places(
    tmp_path: Path, built: Any, reindex: Any, tiny: Path, mini_dump: Path
) -> None:
    renamed = tmp_path / "another-name"
    renamed.symlink_to(tiny)
    moved = tmp_path / "moved.xml.bz2"
    moved.write_bytes(mini_dump.read_bytes())
    assert reindex(tmp_path / "b", encoder=renamed, dump=moved).json["snapshot"] == built.made["snapshot"]


@pytest.mark.slow
def test_workers_build_the_same_as_one_process_from_a_multistream_dump(
    tmp_path: Path, reindex: Any, mini_dump: Path, make_multistream: Callable[..., str]
) -> None:
    dump, words = make_multistream(tmp_path, mini_dump, pages_a_stream=10), tmp_path / "words.toml"
    words.write_text('part_bytes = 50_000\n[index.bm25]\nfactory = "BM25"\nover = "text"\n')  # a graph takes more jobs
    two = reindex(tmp_path / "2", dump=dump, recipe=words, beam=["--direct_num_workers=2"]).json
    none = reindex(tmp_path / "0", dump=dump, recipe=words).json
    assert two["snapshot"] == none["snapshot"]
    assert two["counts"] == none["counts"] == COUNTS


def test_a_recipe_decides_the_snapshot(tmp_path: Path, store: Path, built: Any, reindex: Any, recipe: Path) -> None:
    words = tmp_path / "words.toml"
    words.write_text(recipe.read_text() + '\n[chunk]\nchunker = "words"\n')
    made, other = built.made, reindex(store, recipe=words, ref="words").json
    assert other["snapshot"] != made["snapshot"]
    assert other["counts"]["passages"] < made["counts"]["passages"]  # no passage ends with its section


def test_a_limit_reads_so_many_articles(tmp_path: Path, reindex: Any) -> None:
    made = reindex(tmp_path, limit=2).json
    assert made["counts"]["articles"] == 2


def test_a_licence_is_shown_with_every_hit(tmp_path: Path, reindex: Any, bookwheel: Any) -> None:
    reindex(tmp_path, limit=2, licence="GFDL 1.3")
    (result,) = bookwheel("search", "A question?", "--store", tmp_path, "--json").json["results"]
    assert all(", GFDL 1.3; excerpt" in hit["licence"] for hit in result["hits"])


def test_a_dry_run_builds_nothing(tmp_path: Path, reindex: Any, bookwheel: Any) -> None:
    result = reindex(tmp_path, "--dry-run")
    assert result.code == 0
    assert result.json["snapshot"] is None
    assert result.json["counts"]["parts"] == 2
    assert not list(tmp_path.iterdir())


def test_without_the_files_of_its_parent_a_build_says_so_and_starts_anew(store: Path, reindex: Any, built: Any) -> None:
    for blob in (path for path in (store / "blobs").rglob("*") if path.is_file()):
        blob.unlink()  # as if it had expired since its manifest was read
    again = reindex(store)
    assert again.code == 0, again.err
    assert f"2 of 2 parts of the parent {built.made['snapshot'][:12]} are gone: they are built again" in again.err
    assert (again.json["snapshot"], again.json["counts"]["reused"]) == (built.made["snapshot"], 0)


def test_explain_says_what_is_there_and_builds_nothing(
    library: Path, reindex: Any, bookwheel: Any, tiny: Path, mini_dump: Path
) -> None:
    before = records(library)
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
    given = ["--dump", mini_dump, "--encoder", tiny, "--store", library]
    table = bookwheel("reindex", *given, "--explain").out.splitlines()
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
    assert records(library) == before


@pytest.fixture
def edited_dump(mini_dump: Path, tmp_path: Path) -> Path:
    """The next month's dump: a sentence more in one article."""
    pages = bz2.decompress(mini_dump.read_bytes())
    heading = re.search(rb"\n== [^=]+ ==\n", pages)  # a section begins a passage, of which the encoder reads the head
    assert heading is not None
    edited = pages[: heading.end()] + b"A sentence was put here, quite new.\n" + pages[heading.end() :]
    path = tmp_path / "next-month.xml.bz2"
    path.write_bytes(bz2.compress(edited))
    return path


def test_the_next_month_keeps_what_was_trained_and_the_pieces_of_what_did_not_change(
    tmp_path: Path, reindex: Any, bookwheel: Any, recipe: Path, edited_dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rag_model.index.lists.kind._MIN_LISTS_TO_REUSE", 4
    )  # or codes of a byte a number are not worth carrying
    two = tmp_path / "two.toml"
    two.write_text(recipe.read_text() + '\n[index.lists]\nfactory = "IVF4,SQ8"\n')
    store, opened = tmp_path / "store", lambda: Snapshot.open(str(tmp_path / "store"))
    first = reindex(store, recipe=two).json["snapshot"]
    made = records(store)
    with opened() as snapshot:
        before = snapshot.manifest.content
    foretold = reindex(store, "--explain", recipe=two, dump=edited_dump).json["stages"]
    assert {row["stage"]: row["reused"] for row in foretold if row["stage"].startswith("train/")} == {
        "train/hnsw": 1,
        "train/lists": 1,
    }
    (graphs,) = [row for row in foretold if row["stage"] == "shard/hnsw"]
    assert (graphs["reused"], graphs["total"], graphs["recorded"], graphs["unit"]) == (1, 1, 0, "to update")
    second = reindex(store, recipe=two, dump=edited_dump).json
    assert 0 < second["counts"]["embedded"] < 20
    metrics = second["metrics"]["hnsw"]
    assert [metrics[name] for name in ("built_cells", "updated_cells", "reused_cells", "generation")] == [0, 1, 0, 1]
    assert 0 < metrics["replaced"] < 0.1
    assert metrics["recall@20"] > 0.95
    now = records(store)
    assert {stage: now[stage] - made[stage] for stage in ("train", "scatter", "shard", "merge")} == {
        "train": 0,
        "scatter": 2,  # of two parts and two indexes
        "shard": 1,
        "merge": 2,
    }
    coded = [json.loads(path.read_text())["facts"].get("encoded") for path in (store / "memo" / "scatter").iterdir()]
    assert second["counts"]["embedded"] in coded, "of the part that changed the new vectors alone"
    with opened() as snapshot:
        after, notes = snapshot.manifest.content, snapshot.manifest.provenance["notes"]
    for path in ("trained/hnsw", "trained/lists"):
        assert after.files[path] == before.files[path]
    assert notes == [f"index {name}: trained as in snapshot {first[:12]}" for name in ("hnsw", "lists")]
    shown = bookwheel("show", "latest", "--store", store).out
    assert "updated_cells 1, reused_cells 0, generation 1" in shown
    assert "cells whose graph was updated" in Path(second["report"].removeprefix("file://")).read_text()

    again = reindex(store, "--rebuild-graphs", recipe=two, dump=edited_dump).json
    assert again["snapshot"] != second["snapshot"]
    assert "generation" not in again["metrics"]["hnsw"]
    assert records(store)["shard"] - now["shard"] == 1

    seeded = tmp_path / "seeded.toml"
    seeded.write_text(two.read_text().replace("[index.lists]", "[index.lists]\nseed = 1"))
    anew = {row["stage"]: row for row in reindex(store, "--explain", recipe=seeded, dump=edited_dump).json["stages"]}
    assert (anew["train/lists"]["reused"], anew["train/lists"]["changed"]) == (0, {"seed": 1})
    assert anew["train/hnsw"]["reused"] == 1


def refused(ran: Any, store: Path, stands: str | None) -> str:
    """Check that a snapshot was published, that `latest` stands where it stood, and return why."""
    assert ran.code == 3
    made = ran.json
    opened = Store.open(str(store))
    assert opened.snapshots.get(made["snapshot"])
    assert made["number"] is None
    now = opened.refs.find_current("latest")
    assert (now.snapshot if now else None) == stands
    (failed, *_) = [check for check in made["gate"]["checks"] if not check["passed"]]
    (said,) = [line for line in ran.err.splitlines() if line.startswith("bookwheel: ")]
    assert f"{failed['name']} is {failed['observed']}, wanted {failed['wanted']}" in said
    assert made["snapshot"][:12] in said
    return str(failed["name"])


def test_the_gate_refuses_an_index_that_misses_too_much(tmp_path: Path, reindex: Any) -> None:
    sparse = tmp_path / "sparse.toml"
    sparse.write_text('[index.hnsw]\nfactory = "HNSW2"\nef_construction = 1\nsearch = { efSearch = 1 }\n')
    store = tmp_path / "store"
    assert refused(reindex(store, recipe=sparse), store, None) == "hnsw recall@20, mean"


def test_the_gate_refuses_what_the_parent_would_not_be_replaced_by(
    store: Path, built: Any, reindex: Any, other_tiny: Path
) -> None:
    parent = built.made["snapshot"]
    assert refused(reindex(store, limit=1), store, parent) == "passages lost since the parent"
    assert refused(reindex(store, encoder=other_tiny), store, parent) == "encoder space"
    assert reindex(store, encoder=other_tiny, ref="candidate").code == 0  # a ref of its own is free
    assert Store.open(str(store)).refs.list_names() == ["candidate", "latest"]


def test_the_gate_refuses_an_older_dump(
    tmp_path: Path, reindex: Any, page_xml: Callable[..., str], export_xml: Callable[..., bytes]
) -> None:
    newer, older = tmp_path / "newer.xml", tmp_path / "older.xml"
    newer.write_bytes(export_xml(*(page_xml(page, f"Page {page} says some words.") for page in range(1, 9))))
    older.write_bytes(newer.read_bytes().replace(b"2026-11-01T", b"2026-10-01T"))
    store = tmp_path / "store"
    parent = reindex(store, dump=newer).json["snapshot"]
    assert refused(reindex(store, dump=older), store, parent) == "newest revision"


def test_the_gate_holds_a_retriever_to_a_floor_on_the_users_questions(
    tmp_path: Path, recipe: Path, reindex: Any
) -> None:
    asked, strict, store = tmp_path / "dev.jsonl", tmp_path / "strict.toml", tmp_path / "store"
    asked.write_text('{"question": "What is autism?", "answers": ["qzx"]}\n{"question": "Who?", "answers": ["of"]}\n')
    table = f'\n[gate.questions.dev]\nfile = "{asked}"\nretriever = "rrf(hnsw, exact)"\nmeasure = "Success@50"\n'
    strict.write_text(f"{recipe.read_text()}{table}floor = 0.6\n")
    told = refused(reindex(store, recipe=strict), store, None)
    assert told == "Success@50 of rrf(hnsw, exact) on the questions dev"
    strict.write_text(f"{recipe.read_text()}{table}floor = 0.5\n")
    result = reindex(store, recipe=strict)
    assert (result.code, result.json["number"]) == (0, 1), result.err
    strict.write_text(f"{recipe.read_text()}{table}floor = 0.5\n".replace("dev.jsonl", "gone.jsonl"))
    result = reindex(tmp_path / "other", recipe=strict)
    assert (result.code, "the gate's questions dev cannot be used" in result.complaint) == (1, True)
    assert not (tmp_path / "other").exists()
