"""`bookwheel evaluate` without a model: several retrievers beside each other, their stages, groups, files and page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.strict_html import assert_harmless, parsed
from tests.fixtures.tiny import save_cross_encoder

NAMES = ["hnsw", "rrf(hnsw, exact:30)", "exact"]
Bookwheel = Callable[..., Any]


@pytest.fixture(scope="module")
def questions(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence of some passages each, with the passage's id, and a source by turns."""
    path = tmp_path_factory.mktemp("asked") / "questions.jsonl"
    with Snapshot.open(str(library)) as snapshot, path.open("w") as file:
        for place, passage in enumerate(snapshot.passages(range(0, snapshot.n, 20))):
            words = passage.text.split()
            told = {"question": " ".join(words[:8]), "answers": [" ".join(words[3:6])], "passages": [passage.id]}
            file.write(json.dumps({"id": passage.id, "source": ("odd", "even")[place % 2], **told}) + "\n")
    return path


def given(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--retriever", name)]


def test_several_retrievers_are_measured_in_one_run(
    library: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    page, run, rows = tmp_path / "page.html", tmp_path / "run.trec", tmp_path / "rows.jsonl"
    words = ["evaluate", "--store", library, "--questions", questions, "--json"]
    result = bookwheel(*words, *given(NAMES), "--report", page, "--trec", run, "--rows", rows)
    assert result.code == 0, result.err
    reply = result.json
    assert list(reply["retrievers"]) == NAMES
    n = len(questions.read_text().splitlines())
    assert (reply["judged_by"], reply["measure"], reply["n"]) == ("passages", "nDCG@10", n)
    names = ["Success@1", "Success@5", "Success@20", "nDCG@10", "R@20", "RR@10"]
    for name in NAMES:
        alone = bookwheel(*words, "--retriever", name).json
        told = reply["compared"][name]
        assert "retrievers" not in alone
        assert reply["retrievers"][name] == told["metrics"] == alone["metrics"]
        assert list(alone["metrics"]) == names
        assert list(told["intervals"]) == names
        assert told["milliseconds"] > 0
        assert told["timed"] == n
        assert list(told["groups"]) == ["source odd", "source even"] or "at most 2 shared stems" in told["groups"]
        assert (told.get("differences") is None) == (name == "hnsw")
    assert reply["metrics"] == reply["retrievers"]["hnsw"]
    fused = reply["compared"]["rrf(hnsw, exact:30)"]
    assert [stage["stage"] for stage in fused["stages"]] == ["hnsw", "exact", "rrf(hnsw, exact)"]
    assert fused["stages"][0]["metrics"] == reply["retrievers"]["hnsw"]
    manifest = bookwheel("show", "--store", library, "--json").json["content"]["files"]
    assert fused["stages"][0]["bytes"] == manifest["index/hnsw.faiss"]["size"]
    assert "fits a prompt" in reply["advice"]
    written = ["run.1-hnsw.trec", "run.2-rrf-hnsw-exact-30.trec", "run.3-exact.trec"]
    assert sorted(path.name for path in tmp_path.glob("*.trec")) == written
    assert (tmp_path / written[2]).read_text().splitlines()[0].endswith(" 3-exact")
    assert len((tmp_path / "rows.1-hnsw.jsonl").read_text().splitlines()) == n
    assert_harmless(page.read_text())
    assert "by its id" in parsed(page.read_text()).text


@pytest.mark.usefixtures("prefect_server")
def test_the_figures_are_an_artifact_of_the_run(library: Path, questions: Path, bookwheel: Bookwheel) -> None:
    assert bookwheel("evaluate", "--store", library, "--questions", questions, *given(NAMES[:2])).code == 0
    with get_client(sync_client=True) as client:
        asked = {"artifacts": {"key": {"like_": "compare-figures"}}, "sort": "CREATED_DESC", "limit": 1}
        (artifact,) = client.request("POST", "/artifacts/filter", json=asked).json()
    rows = json.loads(artifact["data"])
    assert [(row["retriever"], row["of"]) for row in rows if row["of"] == "all"] == [
        (name, "all") for name in NAMES[:2]
    ]
    assert {"stage hnsw", "stage exact", "stage rrf(hnsw, exact)"} <= {row["of"] for row in rows}
    assert "judged by passages" in artifact["description"]


def test_people_read_tables(library: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel) -> None:
    cross = save_cross_encoder(tmp_path / "cross")
    names = ["hnsw", f"rerank(hnsw:9, {cross}, 9)"]
    result = bookwheel(
        "evaluate", "--store", library, "--questions", questions, "-k", 5, "--judge", "answers", *given(names)
    )
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].endswith("judged by answers, retriever hnsw")
    assert any(line.startswith("  minus hnsw") for line in lines)
    assert any(line.startswith(f"{names[1]}: question encoder") for line in lines)
    assert any(line.startswith("source odd") for line in lines)
    assert lines[-2].startswith("advice ")
    assert Path(lines[-1].partition("file://")[2]).is_file(), "the report in the store"


def test_a_setting_may_name_one(
    library: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["evaluate", "--store", library, "--questions", questions, "--json"]
    monkeypatch.setenv("BOOKWHEEL_RETRIEVER", "rrf(hnsw, exact)")
    assert bookwheel(*words).json["retriever"] == "rrf(hnsw, exact)"
    assert bookwheel(*words, "--index", "exact").json["retriever"] == "exact"
    monkeypatch.delenv("BOOKWHEEL_RETRIEVER")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text('retriever = "rrf(exact, hnsw)"\n')
    assert bookwheel(*words).json["retriever"] == "rrf(exact, hnsw)"


def test_passages_of_another_corpus_are_one_sentence(library: Path, tmp_path: Path, bookwheel: Bookwheel) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Who?", "passages": ["nq-1"]}\n')
    result = bookwheel("evaluate", "--store", library, "--questions", path)
    assert result.code == 1
    assert "has none of the 1 passages that the questions name, such as 'nq-1'" in result.complaint


@pytest.mark.parametrize("retriever", ["bm25", "exact"])
def test_a_question_does_not_find_itself(
    tmp_path: Path, tiny: Path, reindex: Bookwheel, bookwheel: Bookwheel, retriever: str
) -> None:
    """As in BEIR's ArguAna; the first question is so long that its document has several passages."""
    long_text = "Zoos protect endangered animals from extinction by breeding them. " * 60
    folder, recipe = tmp_path / "beir", tmp_path / "recipe.toml"
    (folder / "qrels").mkdir(parents=True)
    texts = {"q1": long_text, "c1": "Breeding in captivity does not save animals from extinction.", "q2": "Homework"}
    queries = "".join(json.dumps({"_id": name, "text": texts[name]}) + "\n" for name in ("q1", "q2"))
    (folder / "queries.jsonl").write_text(queries)
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tc1\t1\nq2\tc1\t1\n")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"_id": name, "title": "", "text": text}) + "\n" for name, text in texts.items())
    )
    recipe.write_text('[index.bm25]\nfactory = "BM25"\n[index.hnsw]\nfactory = "HNSW8"\n')
    built = reindex(tmp_path / "store", dump=corpus, recipe=recipe)
    assert built.code == 0, built.err
    assert built.json["counts"]["passages"] > 4
    words = ["evaluate", "--store", tmp_path / "store", "--questions", folder, "--retriever", retriever]
    rows = tmp_path / "rows.jsonl"
    result = bookwheel(*words, "-k", 1, "--rows", rows, "--json")
    assert result.code == 0, result.err
    first, _ = map(json.loads, rows.read_text().splitlines())
    assert [hit["page_id"] for hit in first["hits"]] == ["c1"]
