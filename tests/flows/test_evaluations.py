"""Evaluations are versions: recorded once, listed, shown, verified, compared, and deleted with their snapshot."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.tiny_rag import save_tiny_rag

QUESTIONS = [
    {"id": "p", "question": "Who wrote What is Property?", "answers": ["Proudhon"]},
    {"id": "a", "question": "What is autism?", "answers": ["disorder", "developmental"]},
    {"id": "n", "question": "Où est 東京 🗼?", "answers": ["qzx"]},
]
Bookwheel = Callable[..., Any]


@pytest.fixture
def store(library: Path, tmp_path: Path) -> Path:
    return copied(library, tmp_path / "store")


def copied(library: Path, to: Path) -> Path:
    """Copy the library without the evaluations that other tests left there."""
    return Path(shutil.copytree(library, to, ignore=shutil.ignore_patterns("evaluations")))


@pytest.fixture(scope="module")
def tiny_rag(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), tiny)


def recorded(store: Path) -> list[str]:
    return Store.open(str(store)).evaluations.list_ids()


def test_an_evaluation_of_retrieval_is_recorded_once_and_shown(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    words = ["evaluate", "--store", store, "--questions", questions]
    first = bookwheel(*words, "--json").json
    (identity,) = recorded(store)
    assert (first["evaluation"], first["unrecorded"]) == (identity, "")
    renamed = tmp_path / "again.jsonl"
    renamed.write_text(questions.read_text().replace('", "', '",   "'))
    again = bookwheel("evaluate", "--store", store, "--questions", renamed, "--retriever", "hnsw")
    assert f"evaluation   {identity[:12]}" in again.out.splitlines()
    assert recorded(store) == [identity]
    other = bookwheel(*words, "-k", 5, "--retriever", "exact", "--retriever", "hnsw", "--json").json["evaluation"]
    assert sorted([identity, other]) == recorded(store)

    listed = {one["id"]: one for one in bookwheel("show", "--store", store, "--json").json["evaluations"]}
    assert {*listed} == {identity, other}
    assert (listed[identity]["model"], listed[identity]["n"]) == (None, 3)
    assert listed[identity]["figures"]["hnsw"] == {**first["metrics"], **first["ranks"]}
    lines = bookwheel("show", "--store", store).out.splitlines()
    assert any(
        line.startswith(f"evaluated {identity[:12]}: retrieval, 3 questions of questions.jsonl, ") for line in lines
    )

    shown = bookwheel("show", f"evaluation:{identity[:8]}", "--store", store, "--json").json
    assert shown["content"]["subject"]["snapshot"] == first["snapshot"]
    without = bookwheel("show", f"evaluation:{identity}", "--recipe-only", "--store", store)
    assert (without.code, "has no recipe: leave --recipe-only out" in without.complaint) == (2, True)
    files = shown["content"]["files"]
    assert set(files) == {"outcome.json", "report.html", "rows.jsonl", "values.json"}
    kept = {name: (store / "blobs" / its["id"][7:9] / its["id"][7:]).read_text() for name, its in files.items()}
    assert [json.loads(line)["id"] for line in kept["rows.jsonl"].splitlines()] == ["p", "a", "n"]
    assert json.loads(kept["outcome.json"])["metrics"] == first["metrics"]
    values = json.loads(kept["values.json"])
    assert values["questions"] == ["p", "a", "n"]
    assert sum(values["retrievers"]["hnsw"]["Success@20"]) / 3 == pytest.approx(first["metrics"]["Success@20"])
    assert f"evaluation {identity}" in bookwheel("show", f"evaluation:{identity}", "--store", store).out
    assert "rows.1-exact.jsonl" in bookwheel("show", f"evaluation:{other}", "--store", store).out

    assert bookwheel("verify", f"evaluation:{identity}", "--store", store).code == 0
    rows = store / "blobs" / files["rows.jsonl"]["id"][7:9] / files["rows.jsonl"]["id"][7:]
    rows.write_text(rows.read_text().upper())
    broken = bookwheel("verify", f"evaluation:{identity}", "--store", store)
    (named,) = [line for line in broken.err.splitlines() if "its bytes do not match its name" in line]
    assert (broken.code, "rows.jsonl" in named, rows.name in named) == (3, True, True)


def test_an_evaluation_of_a_model_names_it_however_its_ref_moves(
    store: Path, questions: Path, tiny_rag: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    opened = Store.open(str(store))
    model = put_model(opened, tiny_rag, ModelMetadata("rag-sequence", None, {}), "reader").model
    words = ["evaluate", "--store", store, "--questions", questions, "--index", "exact", "--json", "--model"]
    first = bookwheel(*words, "reader").json
    assert bookwheel(*words, model).json["evaluation"] == first["evaluation"]
    (listed,) = bookwheel("show", "model:reader", "--store", store, "--json").json["evaluations"]
    assert (listed["id"], listed["model"], listed["snapshot"]) == (first["evaluation"], model, first["snapshot"])
    assert listed["figures"]["exact"].keys() >= {"Success@20", "EM", "F1", "RR@20"}
    (same,) = bookwheel("show", "--store", store, "--json").json["evaluations"]
    assert same == listed
    shown = bookwheel("show", f"evaluation:{first['evaluation']}", "--store", store, "--json").json["content"]
    assert set(shown["files"]) == {"kilt.jsonl", "outcome.json", "report.html", "rows.jsonl", "values.json"}
    put_model(opened, tiny_rag, ModelMetadata("rag-sequence", None, {"another": 1}), "reader")
    second = bookwheel(*words, "reader").json
    assert second["evaluation"] != first["evaluation"]
    folder = bookwheel(*words, tiny_rag).json
    assert len({first["evaluation"], second["evaluation"], folder["evaluation"], *recorded(store)}) == 3


def test_a_store_that_cannot_be_written_is_evaluated_and_nothing_is_recorded(
    library: Path, questions: Path, on_a_disk_of: Any, tmp_path: Path, executable: Path
) -> None:
    store = copied(library, tmp_path / "store")
    words = on_a_disk_of("1m", tmp_path / "unused")
    bound = f"mount --bind '{store}' '{store}' && mount -o remount,bind,ro '{store}' && "
    words[-1] = bound + words[-1]
    result = subprocess.run(
        [*words, str(executable), "evaluate", "--store", str(store), "--questions", str(questions)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "evaluation   not recorded: not allowed to write" in result.stdout
    assert "Success@20" in result.stdout
    assert recorded(store) == []


def test_what_names_no_evaluation_is_one_sentence(store: Path, bookwheel: Bookwheel) -> None:
    for verb in ("show", "verify"):
        result = bookwheel(verb, "evaluation:abcd", "--store", store)
        assert (result.code, "no evaluation or ref 'abcd'" in result.complaint) == (1, True)


def test_two_evaluations_are_compared_question_by_question(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    words = ["evaluate", "--store", store, "--questions", questions, "--json"]
    first, second = (bookwheel(*words, "-k", k).json for k in (5, 20))
    names = [f"evaluation:{one['evaluation'][:12]}" for one in (first, second)]
    reply = bookwheel("diff", *names, "--store", store, "--json").json
    pairs = reply["retrievers"]["hnsw"]
    assert list(pairs) == ["Success@1", "Success@5"]
    assert pairs["Success@5"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert pairs["Success@5"]["n"] == 3
    assert reply["settings"] == {"k": [5, 20]}
    text = bookwheel("diff", *names, "--store", store).out
    assert "setting   k: 5 -> 20\n" in text
    assert "+0.000 [+0.000, +0.000] over 3 questions" in text
    mixed = bookwheel("diff", names[0], "latest", "--store", store)
    assert (mixed.code, "compared with another one" in mixed.complaint) == (2, True)
    out = bookwheel("export", names[1], tmp_path / "out", "--store", store, "--json").json
    assert out["evaluation"] == second["evaluation"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "outcome.json",
        "report.html",
        "rows.jsonl",
        "values.json",
    }
    expired = bookwheel("expire", "--store", store, "--keep", 1, "--older-than", "0d", "--json").json
    assert expired["evaluations"] == []
