"""Evaluations are versioned: recorded once, listed, shown, verified, compared, and deleted with their snapshot."""

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
    return copy_library(library, tmp_path / "store")


def copy_library(library: Path, target: Path) -> Path:
    """Copy the library without the evaluations that other tests left there."""
    return Path(shutil.copytree(library, target, ignore=shutil.ignore_patterns("evaluations")))


@pytest.fixture(scope="module")
def tiny_rag(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), tiny)


def list_evaluations(store: Path) -> list[str]:
    return Store.open(str(store)).evaluations.list_ids()


def test_evaluation_of_retrieval_is_recorded_once_shown_and_verified(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    command = ["evaluate", "--store", store, "--questions", questions]
    first = bookwheel(*command, "--json").json
    (evaluation,) = list_evaluations(store)
    assert (first["evaluation"], first["unrecorded"]) == (evaluation, "")
    copied_file = tmp_path / "again.jsonl"
    copied_file.write_text(questions.read_text().replace('", "', '",   "'))
    repeated = bookwheel("evaluate", "--store", store, "--questions", copied_file, "--retriever", "hnsw")
    assert f"evaluation   {evaluation[:12]}" in repeated.out.splitlines()
    assert list_evaluations(store) == [evaluation]
    second_id = bookwheel(*command, "-k", 5, "--retriever", "exact", "--retriever", "hnsw", "--json").json["evaluation"]
    assert sorted([evaluation, second_id]) == list_evaluations(store)

    manifest = bookwheel("show", "--store", store, "--json").json
    summaries = {summary["id"]: summary for summary in manifest["evaluations"]}
    assert {*summaries} == {evaluation, second_id}
    assert (summaries[evaluation]["model"], summaries[evaluation]["n"]) == (None, 3)
    assert summaries[evaluation]["figures"]["hnsw"] == {**first["metrics"], **first["ranks"]}
    prefix = f"\nevaluated {evaluation[:12]}: retrieval, 3 questions of questions.jsonl, "
    assert prefix in bookwheel("show", "--store", store).out

    manifest = bookwheel("show", f"evaluation:{evaluation[:8]}", "--store", store, "--json").json
    assert manifest["content"]["subject"]["snapshot"] == first["snapshot"]
    without_recipe = bookwheel("show", f"evaluation:{evaluation}", "--recipe-only", "--store", store)
    assert (without_recipe.code, "has no recipe: leave --recipe-only out" in without_recipe.complaint) == (2, True)
    files = manifest["content"]["files"]
    assert set(files) == {"outcome.json", "report.html", "rows.jsonl", "values.json"}
    texts = {name: (store / "blobs" / file["id"][7:9] / file["id"][7:]).read_text() for name, file in files.items()}
    assert [json.loads(line)["id"] for line in texts["rows.jsonl"].splitlines()] == ["p", "a", "n"]
    assert json.loads(texts["outcome.json"])["metrics"] == first["metrics"]
    values = json.loads(texts["values.json"])
    assert (values["questions"], len(set(values["digests"]))) == (["p", "a", "n"], 3)
    assert sum(values["retrievers"]["hnsw"]["Success@20"]) / 3 == pytest.approx(first["metrics"]["Success@20"])
    assert f"evaluation {evaluation}" in bookwheel("show", f"evaluation:{evaluation}", "--store", store).out
    assert "rows.1-exact.jsonl" in bookwheel("show", f"evaluation:{second_id}", "--store", store).out

    assert bookwheel("verify", f"evaluation:{evaluation}", "--store", store).code == 0
    rows = store / "blobs" / files["rows.jsonl"]["id"][7:9] / files["rows.jsonl"]["id"][7:]
    rows.write_text(rows.read_text().upper())
    result = bookwheel("verify", f"evaluation:{evaluation}", "--store", store)
    (problem,) = [line for line in result.err.splitlines() if "its bytes do not match its name" in line]
    assert (result.code, "rows.jsonl" in problem, rows.name in problem) == (3, True, True)


def test_evaluation_of_a_model_depends_on_the_model_not_the_ref(
    store: Path, questions: Path, tiny_rag: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    library_store = Store.open(str(store))
    model = put_model(library_store, tiny_rag, ModelMetadata("rag-sequence", None, {}), "reader").model
    command = ["evaluate", "--store", store, "--questions", questions, "--index", "exact", "--json", "--model"]
    first = bookwheel(*command, "reader").json
    assert bookwheel(*command, model).json["evaluation"] == first["evaluation"]
    (summary,) = bookwheel("show", "model:reader", "--store", store, "--json").json["evaluations"]
    assert (summary["id"], summary["model"], summary["snapshot"]) == (first["evaluation"], model, first["snapshot"])
    assert summary["figures"]["exact"].keys() >= {"Success@20", "EM", "F1", "RR@20"}
    (snapshot_summary,) = bookwheel("show", "--store", store, "--json").json["evaluations"]
    assert snapshot_summary == summary
    content = bookwheel("show", f"evaluation:{first['evaluation']}", "--store", store, "--json").json["content"]
    assert set(content["files"]) == {"kilt.jsonl", "outcome.json", "report.html", "rows.jsonl", "values.json"}
    put_model(library_store, tiny_rag, ModelMetadata("rag-sequence", None, {"another": 1}), "reader")
    second = bookwheel(*command, "reader").json
    assert second["evaluation"] != first["evaluation"]
    by_folder = bookwheel(*command, tiny_rag).json
    assert len({first["evaluation"], second["evaluation"], by_folder["evaluation"], *list_evaluations(store)}) == 3


def test_read_only_store_is_evaluated_without_a_record(
    library: Path, questions: Path, build_disk_prefix: Any, tmp_path: Path, executable: Path
) -> None:
    store = copy_library(library, tmp_path / "store")
    command = build_disk_prefix("1m", tmp_path / "unused")
    read_only_mount = f"mount --bind '{store}' '{store}' && mount -o remount,bind,ro '{store}' && "
    command[-1] = read_only_mount + command[-1]
    command += [str(executable), "evaluate", "--store", str(store), "--questions", str(questions)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "evaluation   not recorded: not allowed to write" in result.stdout
    assert "Success@20" in result.stdout
    assert list_evaluations(store) == []


def test_unknown_evaluation_fails_with_one_sentence(store: Path, bookwheel: Bookwheel) -> None:
    for verb in ("show", "verify"):
        result = bookwheel(verb, "evaluation:abcd", "--store", store)
        assert (result.code, "no evaluation or ref 'abcd'" in result.complaint) == (1, True)


def test_diff_compares_two_evaluations_by_question(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    command = ["evaluate", "--store", store, "--questions", questions, "--json"]
    first, second = (bookwheel(*command, "-k", k).json for k in (5, 20))
    pair = [f"evaluation:{reply['evaluation'][:12]}" for reply in (first, second)]
    reply = bookwheel("diff", *pair, "--store", store, "--json").json
    pairs = reply["retrievers"]["hnsw"]
    assert list(pairs) == ["Success@1", "Success@5"]
    assert pairs["Success@5"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert pairs["Success@5"]["n"] == 3
    assert reply["settings"] == {"k": [5, 20]}
    text = bookwheel("diff", *pair, "--store", store).out
    assert "setting   k: 5 -> 20\n" in text
    assert "+0.000 [+0.000, +0.000] over 3 questions" in text
    mismatch = bookwheel("diff", pair[0], "latest", "--store", store)
    assert (mismatch.code, "compared with another one" in mismatch.complaint) == (2, True)
    exported = bookwheel("export", pair[1], tmp_path / "out", "--store", store, "--json").json
    assert exported["evaluation"] == second["evaluation"]
    names = ["outcome.json", "report.html", "rows.jsonl", "values.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    expired = bookwheel("expire", "--store", store, "--keep", 1, "--older-than", "0d", "--json").json
    assert expired["evaluations"] == []
