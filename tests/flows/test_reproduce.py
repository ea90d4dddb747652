"""`reproduce`, which compares measured values with a published table."""

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flows.reproduce import ReproductionPlan, sample_data
from flows.reproduction import TableRow, list_built_in, read_reproduction
from rag_model.encoders.encoder import Encoder
from rag_model.evaluation.reports.reproduction import (
    ReproductionReport,
    ReproductionRow,
    Verdict,
    render_reproduction_page,
)
from rag_model.process import CORES_VARIABLE
from rag_model.store.store import Store
from tests.fixtures.forked_processes import ForkedCommand
from tests.fixtures.hub import Hub
from tests.fixtures.published_data import write_published
from tests.fixtures.tiny_rag import save_tiny_rag

WORDS = [
    "river",
    "king",
    "music",
    "war",
    "theory",
    "city",
    "passage",
    "query",
    "letter",
    "number",
    "winter",
    "summer",
    "stone",
    "iron",
    "glass",
]
TABLE = """
title = "Small table"

[data.documents]
path = "documents.jsonl"

[data.dev]
{dev}

[library.small]
dump = "documents"
encoder = "{encoder}"

[library.small.recipe.index.hnsw]
factory = "HNSW8"

[library.small.recipe.index.bm25]
factory = "BM25"

[[row]]
name = "BM25"
library = "small"
retriever = "bm25"
source = "the test"
published.dev = {{ "Success@1" = 40.0, "Success@5" = 100.0 }}
tolerance = 1

[[row]]
name = "exact"
library = "small"
data = ["dev"]
measures = ["Success@5"]

[[row]]
name = "hnsw"
library = "small"
retriever = "hnsw"
data = ["dev"]
measures = ["Success@5"]
"""
ANSWER = """
[[row]]
name = "RAG"
library = "small"
command = "answer"
model = "{model}"
retriever = "bm25"
k = 2
data = ["dev"]
measures = ["EM"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with documents and questions about them."""
    rows = [
        {"id": str(i), "title": f"{WORDS[i % 15]} {i}", "text": f"The {WORDS[i % 15]} of number{i} is value{i}."}
        for i in range(60)
    ]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = [
        {"question": f"What is the {WORDS[i % 15]} of number{i}?", "answers": [f"value{i}"]} for i in range(40)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return tmp_path


def write_table(folder: Path, encoder: Path, dev: str = 'path = "questions.jsonl"', rows: str = "") -> Path:
    path = folder / "small.toml"
    path.write_text(TABLE.format(encoder=encoder, dev=dev) + rows)
    return path


def test_table_has_values_of_evaluate_and_is_reused(folder: Path, tiny: Path, bookwheel: Any, tmp_path: Path) -> None:
    model = save_tiny_rag(tmp_path / "models", tiny)
    table, store = write_table(folder, tiny, rows=ANSWER.format(model=model)), folder / "store"
    result = bookwheel("reproduce", table, "--store", store, "--json")
    assert result.code == 3  # Every first hit of BM25 has the answer, but the table says that 40 % have it.
    assert "1 value of 5 differ from the published ones" in result.err
    assert "such as Success@1 of BM25 on dev: 100.00, published 40.00" in result.err
    lines = {(line["row"], line["measure"]): line for line in result.json["lines"]}
    verdicts = [line["verdict"] for line in result.json["lines"]]
    assert verdicts == ["higher", "reproduced", "no published value", "no published value", "no published value"]
    assert lines["BM25", "Success@1"]["difference"] == 60.0
    assert lines["hnsw", "Success@5"]["value"] == lines["exact", "Success@5"]["value"]
    for line in result.json["lines"]:  # The printed command returns the recorded evaluation with the value.
        reply = bookwheel(*shlex.split(line["command"])[1:], "--json").json
        value, evaluation = reply["metrics"][line["measure"]], reply["evaluation"]
        assert (100 * value, evaluation) == (pytest.approx(line["value"]), line["evaluation"])
    second = bookwheel("reproduce", table, "--store", store, "--json")
    assert (second.json["new"], second.json["evaluation"]) == (0, result.json["evaluation"])
    assert second.json["lines"] == result.json["lines"]
    exported = folder / "exported"
    assert bookwheel("export", f"evaluation:{result.json['evaluation'][:12]}", exported, "--store", store).code == 0
    markdown, page = (exported / "report.md").read_text(), (exported / "report.html").read_text()
    assert "| BM25 | dev | Success@1 | 40.00 ± 1 | 100.00 | +60.00 | 100.00 to 100.00 | higher | the test |" in markdown
    assert "+60.00" in page
    assert bookwheel("show", "small-small", "--store", store).out.count("evaluated ") == 5
    selected = bookwheel("reproduce", table, "--store", store, "--rows", "e*act", "--json").json
    assert [line["row"] for line in selected["lines"]] == ["exact"]
    assert list(Store.open(str(store)).snapshots.get(selected["snapshots"]["small"]).content.indexes) == []


FAILING_ROWS = """
[library.small.recipe.index.cells]
factory = "IVF16,Flat"
search = {{ nprobe = 1 }}

[library.small.recipe.gate.floors]
cells = {{ mean = 1.0, p5 = 1.0 }}

[[row]]
name = "cells"
library = "small"
retriever = "cells"
data = ["dev"]
measures = ["Success@5"]

[[row]]
name = "RAG"
library = "small"
retriever = "bm25"
command = "answer"
model = "{encoder}"
k = 2
data = ["dev"]
measures = ["EM"]

[data.damaged]
path = "damaged.jsonl"

[library.damaged]
dump = "damaged"
encoder = "{encoder}"

[[row]]
name = "damaged"
library = "damaged"
data = ["dev"]
measures = ["Success@5"]
"""


def test_failed_row_is_reported_and_others_continue(folder: Path, tiny: Path, bookwheel: Any) -> None:
    table, store = write_table(folder, tiny), folder / "store"
    table.write_text(table.read_text().replace("40.0", "100.0") + FAILING_ROWS.format(encoder=tiny))
    (folder / "damaged.jsonl").write_text("{")
    result = bookwheel("reproduce", table, "--store", store, "--json")
    assert result.code == 1
    assert "3 rows of 6 failed, such as cells on dev: " in result.err
    verdicts = {line["row"]: line["verdict"] for line in result.json["lines"]}
    other_verdicts = {"BM25": "reproduced", "exact": "no published value", "hnsw": "no published value"}
    assert verdicts == other_verdicts | dict.fromkeys(("cells", "RAG", "damaged"), "failed")
    reasons = {line["row"]: line["failure"] for line in result.json["lines"] if line["failure"]}
    for row, reason in {"cells": "recall", "RAG": str(tiny), "damaged": "damaged.jsonl"}.items():
        assert reason in reasons[row]
        assert f"{row} on dev failed: {reasons[row]}." in result.json["notes"]
    assert set(result.json["snapshots"]) == {"small"}
    assert set(Store.open(str(store)).snapshots.get(result.json["snapshots"]["small"]).content.indexes) == {
        "hnsw",
        "bm25",
    }
    second = bookwheel("reproduce", table, "--store", store, "--json")
    assert (second.code, second.json["new"], second.json["evaluation"]) == (1, 0, result.json["evaluation"])
    second = bookwheel("reproduce", table, "--store", store, "--rows", "cells", "--json")
    assert (second.code, [line["verdict"] for line in second.json["lines"]]) == (1, ["failed"])
    damaged = bookwheel("reproduce", table, "--store", store, "--rows", "damaged", "--json")
    assert (damaged.code, damaged.json["error"]) == (1, reasons["damaged"])


@pytest.mark.usefixtures("prefect_server")
def test_sample_runs_every_row_without_comparison(folder: Path, tiny: Path, bookwheel: Any) -> None:
    table = write_table(folder, tiny)
    arguments = "reproduce", table, "--store", folder / "store", "--fraction", ".5"
    declared = table.read_text().replace('path = "documents.jsonl"', 'path = "documents.jsonl"\nrecords = 21015324')
    table.write_text(declared)
    plan = bookwheel(*arguments, "--dry-run", "--json")
    assert plan.code == 0
    assert plan.json["passages"]["small"] <= 1_000, "a fraction of the local file, not of the declared records"
    assert not (folder / "store").exists()
    result = bookwheel(*arguments, "--json")
    assert result.code == 0
    assert {line["verdict"] for line in result.json["lines"]} == {"not compared"}
    assert {line["questions"] for line in result.json["lines"]} == {20}
    command_words = shlex.split(result.json["lines"][0]["command"])
    assert command_words[command_words.index("--questions") + 1] == str(folder / "questions.jsonl")
    assert any("do not compare" in note for note in result.json["notes"])
    assert "do not compare" in result.err


def test_samples_of_data_sets_with_equal_file_names_are_separate(tmp_path: Path) -> None:
    files = {name: tmp_path / name / "test.jsonl" for name in ("nq", "trivia")}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text(f"{name} 1\n{name} 2\n")
    row = TableRow("row", "wikipedia", measures=("Success@20",), data=tuple(files))
    plan = ReproductionPlan(read_reproduction("dpr"), (row,), {}, tmp_path, 0.5)
    (tmp_path / "samples").mkdir()
    paths = sample_data(plan, {name: str(file) for name, file in files.items()}, tmp_path / "samples")
    assert {name: Path(path).read_text()[: len(name)] for name, path in paths.items()} == {name: name for name in files}
    assert {Path(path).name for path in paths.values()} == {"test.jsonl"}


@pytest.fixture
def server_url(folder: Path) -> Iterator[str]:
    """The URL of a server for the files of the folder."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *arguments: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_missing_data_is_downloaded_and_verified(folder: Path, tiny: Path, bookwheel: Any, server_url: str) -> None:
    digits, data = hashlib.sha256((folder / "questions.jsonl").read_bytes()).hexdigest(), folder / "data"
    dev = f'url = "{server_url}/questions.jsonl"\nbytes = 5000\nlicence = "CC BY"\nchecksum = "sha256:%s"'
    arguments = "reproduce", write_table(folder, tiny, dev % digits), "--store", folder / "store", "--data", data
    arguments += ("--rows", "exact")
    plan = bookwheel(*arguments, "--dry-run", "--json").json
    assert (plan["download"], plan["licences"]) == ({"dev": 5000}, {"CC BY": ["dev"]})
    assert bookwheel(*arguments).code == 0
    assert (data / "questions.jsonl").read_bytes() == (folder / "questions.jsonl").read_bytes()
    (data / "questions.jsonl").write_text("{}")
    changed = bookwheel(*arguments)
    assert (changed.code, changed.out) == (1, "")
    assert f"{data / 'questions.jsonl'} is not the published dev: its sha256 is" in changed.err
    (data / "questions.jsonl").unlink()
    write_table(folder, tiny, dev % ("0" * 64))
    assert "does not match its sha256 and was deleted" in bookwheel(*arguments).err
    assert not (data / "questions.jsonl").exists()
    write_table(folder, tiny, f'path = "questions.jsonl"\nchecksum = "sha256:{"0" * 64}"')
    assert "give the right file, or correct `checksum`" in bookwheel(*arguments).err
    no_folder = bookwheel(*arguments[:4], "--dry-run", "--data", "/dev/null")
    assert (no_folder.code, "--data /dev/null is not a folder" in no_folder.complaint) == (2, True)


def test_hub_files_are_downloaded_and_sample_takes_first_file(
    folder: Path, tiny: Path, bookwheel: Any, hub: Hub
) -> None:
    lines = (folder / "documents.jsonl").read_text().splitlines(keepends=True)
    pieces = {f"data/part-{i}.jsonl": "".join(lines[20 * i : 20 * i + 20]).encode() for i in range(3)}
    hub.add("datasets/me/pieces", {**pieces, "README.md": b"pieces"})
    url = 'url = "hf://datasets/me/pieces@main/data/*.jsonl"\nrecords = 60'
    table = write_table(folder, tiny)
    table.write_text(table.read_text().replace('path = "documents.jsonl"', url, 1))
    arguments = "reproduce", table, "--store", folder / "store", "--rows", "exact", "--json"
    sample = bookwheel(*arguments, "--data", folder / "some", "--fraction", ".3")
    assert sample.code == 0, sample.err
    first_files = "me-pieces-main-data-first-0.3"
    assert [path.name for path in (folder / "some" / first_files).glob("*.jsonl")] == ["part-0.jsonl"]
    result = bookwheel(*arguments, "--data", folder / "some")  # It downloads the other files.
    assert result.code == 0, result.err
    assert any("has 60 passages" in note for note in result.json["notes"])
    table.write_text(table.read_text().replace("@main", "@nope"))
    no_revision = bookwheel(*arguments, "--data", folder / "other")
    assert (no_revision.code, "could not be downloaded (me/pieces has no revision nope)" in no_revision.err) == (
        1,
        True,
    )
    table.write_text(table.read_text().replace("@nope", "@main"))
    shutil.rmtree(folder / "some" / first_files)
    linked = bookwheel(*arguments, "--data", folder / "some", "--fraction", ".3").json
    assert linked["snapshots"] == sample.json["snapshots"]
    assert (folder / "some" / first_files / "part-0.jsonl").is_symlink()


@pytest.mark.parametrize(
    ("before", "after", "code", "message"),
    [
        ('title = "Small', 'titel = "Small', 2, "has no setting 'titel': did you mean 'title'?"),
        ("tolerance = 1", 'tolerance = "1"', 2, "row, item 1, tolerance must be a number, not '1'"),
        ('retriever = "bm25"', 'command = "serach"', 2, "command is 'serach': choose one of retrieve, answer"),
        ('source = "the test"\n', "", 2, "row 'BM25' has published values and no `source`"),
        (
            'library = "small"\nretriever = "bm25"',
            'library = "big"',
            2,
            "names the library 'big', which is not defined",
        ),
        ("published.dev", "published.test", 2, "names the data set 'test', which is not defined"),
        ("40.0", "140.0", 2, "values and tolerance must be 0 to 100 percent"),
        ('"Success@5" = 100.0', '"Sucess@5" = 100.0', 2, "row 'BM25' on dev: 'Sucess@5'"),
        ('measures = ["Success@5"]', 'measures = ["Success@0"]', 2, "row 'exact' on dev: "),
        (
            'path = "questions.jsonl"',
            'path = "questions.jsonl"\nanswers = "patterns"',
            1,
            "row 'BM25' on dev: the answer '(' is not a regular expression",
        ),
        ('title = "Small table"', f"title = {'[' * 5_000}", 2, "nested too deep"),
        ('measures = ["Success@5"]', 'measures = ["R-precision"]', 2, "R-precision"),
        ('retriever = "hnsw"', 'retriever = "hnws"', 2, "has no index 'hnws'"),
        ('path = "questions.jsonl"', 'path = "nothing.jsonl"', 1, "nothing.jsonl"),
        ('path = "questions.jsonl"', 'url = "http://127.0.0.1:1/q.jsonl"', 1, "put it into"),
        ('path = "questions.jsonl"', 'url = "http://127.0.0.1/..%2f"', 2, "cannot name a local copy"),
        ('path = "questions.jsonl"', 'url = "http://a/q"\nchecksum = "md5:1"', 2, "the checksum 'md5:1' is invalid"),
        ('path = "questions.jsonl"', 'url = "http://me:secret@a/q"', 2, "secret"),
        ('encoder = "', 'encoder = "nobody/', 1, "may also be put into"),
    ],
)
def test_invalid_table_is_refused_before_build(
    before: str, after: str, code: int, message: str, folder: Path, tiny: Path, bookwheel: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    table = write_table(folder, Path("encoder") if before == 'encoder = "' else tiny)
    if "patterns" in after:
        (folder / "questions.jsonl").write_text('{"question": "who?", "answers": ["("]}\n')
    text = table.read_text()
    assert before in text
    table.write_text(text.replace(before, after, 1))
    result = bookwheel("reproduce", table, "--store", folder / "store")
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "bookwheel: " in result.err
    assert not list((folder / "store").glob("snapshots/*.json"))


def test_unknown_reproduction_and_row_are_refused(folder: Path, tiny: Path, bookwheel: Any) -> None:
    unknown = bookwheel("reproduce", "dqr", "--store", folder / "store")
    message = "there is no reproduction 'dqr': give dpr, rag, or a TOML file"
    assert (unknown.code, unknown.complaint) == (2, message)
    row = bookwheel("reproduce", write_table(folder, tiny), "--rows", "bm25", "--dry-run")
    assert (row.code, row.complaint) == (2, "no row matches 'bm25': choose from BM25, exact, hnsw")


def test_file_name_becomes_ref_name(folder: Path, tiny: Path) -> None:
    table = write_table(folder, tiny)
    for stem, name in (("Own_table (2)", "own-table-2"), ("__", "own"), ("a" * 39 + "_b", "a" * 39)):
        assert read_reproduction(str(table.rename(folder / f"{stem}.toml"))).name == name
        table = folder / f"{stem}.toml"


@pytest.mark.xdist_group("processes")
def test_killed_run_continues(folder: Path, tiny: Path, bookwheel: Any) -> None:
    table, store = write_table(folder, tiny), folder / "store"
    arguments = ["reproduce", str(table), "--store", str(store)]
    process = ForkedCommand(arguments, folder)
    try:
        while process.poll() is None and not list(store.glob("evaluations/*.json")):
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    finished = {path.name: path.read_bytes() for path in store.glob("evaluations/*.json")}
    assert 1 <= len(finished) <= 4
    result = bookwheel(*arguments, "--json")
    assert result.json["new"] == 3 - len(finished)
    assert all((store / "evaluations" / name).read_bytes() == manifest for name, manifest in finished.items())


@pytest.mark.parametrize("name", list_built_in())
def test_built_in_table_is_planned_without_data(
    name: str, bookwheel: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "1")
    reproduction = read_reproduction(name)
    assert all(file.licence and file.records for file in reproduction.data.values())
    assert {row.library for row in reproduction.row} == set(reproduction.library)
    for row in reproduction.row:
        indexes = set(reproduction.select_indexes(row.library, [row]))
        assert indexes or row.retriever == "exact"
    plan = bookwheel("reproduce", name, "--dry-run", "--data", folder / "data", "--json").json
    assert plan["cores"] == 1, "hours are estimated for the cores that this process may use"
    assert plan["hours"] > 1
    assert plan["disk_bytes"] > 50e9
    total = sum([*plan["row_hours"].values(), *plan["library_hours"].values()])
    assert plan["hours"] == pytest.approx(total, abs=0.2)
    assert plan["row_hours"].keys() == {row.name for row in reproduction.row}
    if name == "dpr":
        hours = plan["row_hours"]
        assert hours["DPR multi, exact, against the paper"] == 0 < hours["DPR multi, exact"], "one evaluation for both"
        assert 0 < hours["ColBERTv2 reranks BM25"] < hours["DPR multi, exact"]
        assert plan["disk_bytes"] > 2 * 128 * 120 * 21_015_324, "the token vectors are stored"
    printed = bookwheel("reproduce", name, "--print-file").out
    (folder / "mine.toml").write_text(printed)
    assert read_reproduction(str(folder / "mine.toml")) == reproduction


FIVE = ("nq", "trivia", "webq", "curatedtrec", "squad")
TOP = ("Success@20", "Success@100")
PYSERINI = "Pyserini 0a0be29, docs/experiments-dpr.md"
TOPICS = "Pyserini 0a0be29, pyserini/2cr/odqa_nq.yaml"
DPR_PAPER, RAG_PAPER = "Karpukhin et al. 2020, as printed", "Lewis et al. 2020, table 1"
MULTI = "79.5 86.1 78.9 84.8 75.1 83.0 88.8 93.4 52.0 67.7"
SINGLE = "68.61 80.58 86.68"
# Each row with published values: data sets, measures, values, tolerance and source.
PUBLISHED = {
    "dpr": {
        "DPR multi, exact": (FIVE, TOP, MULTI, 0.2, PYSERINI),
        "DPR multi, HNSW": (FIVE, TOP, MULTI, 0.5, f"{PYSERINI}, exact search"),
        "DPR multi, IVF-PQ with Refine": (FIVE, TOP, MULTI, 0.5, f"{PYSERINI}, exact search"),
        "DPR multi, exact, against the paper": (
            FIVE,
            TOP,
            "79.4 86.0 78.8 84.7 75.0 82.9 89.1 93.9 51.6 67.6",
            0.2,
            DPR_PAPER,
        ),
        "BM25": (FIVE, TOP, "62.9 78.3 76.4 83.2 62.4 75.5 80.7 89.9 71.1 81.8", 0.7, PYSERINI),
        "BM25, against the paper": (("nq",), TOP, "59.1 73.7", 0.7, DPR_PAPER),
        "BM25, with tables and lists": (
            ("nq-topics", "trivia"),
            TOP,
            "66.65 81.66 78.32 84.82",
            0.7,
            "Pyserini 0a0be29, docs/experiments-wiki-corpora.md",
        ),
        "hybrid, nq": (("nq",), TOP, "82.6 88.6", 0.5, PYSERINI),
        "hybrid, trivia": (("trivia",), TOP, "82.6 86.6", 0.5, PYSERINI),
        "hybrid, webq": (("webq",), TOP, "77.1 84.4", 0.5, PYSERINI),
        "hybrid, curatedtrec": (("curatedtrec",), TOP, "90.1 95.0", 0.5, PYSERINI),
        "hybrid, squad": (("squad",), TOP, "75.1 84.4", 0.5, PYSERINI),
        "DPR single, exact": (("nq-topics",), ("Success@5", *TOP), SINGLE, 0.2, TOPICS),
        "DPR single, HNSW": (("nq-topics",), ("Success@5", *TOP), SINGLE, 0.5, f"{TOPICS}, exact search"),
        "DPR single, IVF-PQ with Refine": (
            ("nq-topics",),
            ("Success@5", *TOP),
            SINGLE,
            0.5,
            f"{TOPICS}, exact search",
        ),
        "DPR single, exact, against the paper": (("nq",), TOP, "78.4 85.4", 0.2, DPR_PAPER),
        "BM25, second topics": (("nq-topics",), ("Success@5", *TOP), "44.82 63.99 79.20", 0.7, TOPICS),
        "hybrid single, second topics": (("nq-topics",), TOP, "83.43 89.03", 0.5, TOPICS),
    },
    "rag": {
        "RAG-Sequence, k = 5": (("nq",), ("EM",), "42.58", 1.6, "a user's rerun"),
        "RAG-Sequence, k = 10": (("nq",), ("EM",), "43.49", 1.6, "a user's rerun"),
        "RAG-Sequence, k = 50": (("nq",), ("EM",), "44.5", 1.6, RAG_PAPER),
        "RAG-Token, k = 15": (("nq",), ("EM",), "44.1", 1.6, RAG_PAPER),
    },
}


@pytest.mark.parametrize("name", list_built_in())
def test_built_in_table_has_published_values(name: str) -> None:
    rows = {row.name: row for row in read_reproduction(name).row if row.published}
    assert rows.keys() == PUBLISHED[name].keys()
    for row_name, (datasets, measures, text, tolerance, source) in PUBLISHED[name].items():
        row, values = rows[row_name], iter(map(float, text.split()))
        assert row.published == {data: {measure: next(values) for measure in measures} for data in datasets}, row_name
        assert (row.tolerance, row.source) == (tolerance, source), row_name


def test_built_in_rows_are_measured_from_local_copies(
    tmp_path: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, store = tmp_path / "data", tmp_path / "store"
    texts = [f"The {WORDS[i % 15]} of number{i} is value{i}." for i in range(120)]
    passages = [(str(i + 1), f"{WORDS[i % 15]} {i}", text) for i, text in enumerate(texts)]
    numbered_questions = [(i, f"What is the {WORDS[i % 15]} of number{i}?") for i in range(0, 120, 24)]
    questions = [(question, [f"value{i}"], str(i + 1)) for i, question in numbered_questions]
    folder.mkdir()
    write_published(folder, passages, questions)
    values: dict[tuple[str, str, str], float] = {}
    for name in list_built_in():
        table = tmp_path / f"{name}.toml"
        lines = bookwheel("reproduce", name, "--print-file").out.splitlines(keepends=True)
        table.write_text("".join(line for line in lines if not line.startswith("checksum = ")))
        result = bookwheel("reproduce", table, "--store", store, "--data", folder, "--json")
        assert result.code == 3, result.err  # The values of tiny models differ from the published ones.
        expected = [
            (row.name, data, measure)
            for row in read_reproduction(name).row
            for data in row.list_data()
            for measure in row.list_measures(data)
        ]
        row_values = {(line["row"], line["data"], line["measure"]): line["value"] for line in result.json["lines"]}
        assert list(row_values) == expected
        values.update(row_values)
    assert values["BM25", "nq", "Success@5"] == 100.0
    assert values["BM25, with tables and lists", "trivia", "Success@20"] == 100.0
    dataset = folder / "facebook-wiki_dpr-main-data-psgs_w100-nq"
    columns = [pq.read_table(path)["embeddings"].to_numpy() for path in sorted(dataset.iterdir())]
    vectors = np.stack(np.concatenate(columns))
    encoder = Encoder.load(folder / "facebook/dpr-question_encoder-single-nq-base")
    scores = encoder.encode_questions([question for question, _, _ in questions]) @ vectors.T
    gold = [int(passage) - 1 for _, _, passage in questions]
    ranks = [int((scores[i] > scores[i, row]).sum()) for i, row in enumerate(gold)]
    for measure, k in (("Success@5", 5), ("Success@20", 20)):
        share = 100 * np.mean(np.array(ranks) < k)
        assert values["DPR single, exact", "nq-topics", measure] == pytest.approx(share)


@pytest.mark.parametrize(
    ("value", "published", "half_width", "is_sample", "verdict"),
    [
        (79.4, 79.5, 1.0, False, "reproduced"),
        (79.3, 79.5, 1.0, False, "reproduced"),
        (78.6, 79.5, 1.0, False, "undecided"),
        (78.2, 79.5, 1.0, False, "lower"),
        (80.8, 79.5, 1.0, False, "higher"),
        (79.5, None, 1.0, False, "no published value"),
        (79.5, 79.5, 1.0, True, "not compared"),
    ],
)
def test_verdict_follows_from_tolerance_and_interval(
    value: float, published: float | None, half_width: float, is_sample: bool, verdict: Verdict
) -> None:
    line = ReproductionRow(
        "r", "d", "m", published, 0.2, value, value - half_width, value + half_width, "", "", "", 9, is_sample
    )
    assert line.verdict == verdict
    page = render_reproduction_page(ReproductionReport("t", "2026", [line], [], {}))
    assert ('class="verdict"' in page, 'class="verdict no"' in page) == (
        verdict == "reproduced",
        verdict in {"higher", "lower"},
    )


def test_reproduce_and_serve_import_neither_training_nor_transformers() -> None:
    program = "import sys, flows.reproduce, flows.verbs.serve, rag_model.serving.run, flows.compare;"
    program += "print({'flows.finetune', 'transformers'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


def test_supervisor_of_workers_imports_neither_torch_nor_faiss() -> None:
    """They take half a gigabyte, and read variables when they are imported, which `serve` sets first."""
    program = "import sys, flows.verbs.serve; print({'torch', 'faiss'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
