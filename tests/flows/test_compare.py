"""`bookwheel evaluate` without a model: compares retrievers and writes their stages, groups, files and report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.strict_html import assert_harmless, parse_balanced
from tests.fixtures.tiny import save_cross_encoder

RETRIEVERS = ["hnsw", "rrf(hnsw, exact:30)", "exact"]
Bookwheel = Callable[..., Any]


@pytest.fixture(scope="module")
def questions(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions made of the first words of passages, with the passage's id; their sources alternate."""
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    with Snapshot.open(str(library)) as snapshot, path.open("w") as file:
        for i, passage in enumerate(snapshot.passages(range(0, snapshot.n, 20))):
            words = passage.text.split()
            row = {"id": passage.id, "source": ("odd", "even")[i % 2], "passages": [passage.id]}
            row |= {"question": " ".join(words[:8]), "answers": [" ".join(words[3:6])]}
            file.write(json.dumps(row) + "\n")
    return path


def build_options(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--retriever", name)]


def test_several_retrievers_are_measured_in_one_run(
    library: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    report, run_file, rows = tmp_path / "page.html", tmp_path / "run.trec", tmp_path / "rows.jsonl"
    command = ["evaluate", "--store", library, "--questions", questions, "--json"]
    file_options = ["--report", report, "--trec", run_file, "--rows", rows]
    result = bookwheel(*command, *build_options(RETRIEVERS), *file_options)
    assert result.code == 0, result.err
    reply = result.json
    assert list(reply["retrievers"]) == RETRIEVERS
    n = len(questions.read_text().splitlines())
    assert (reply["judged_by"], reply["measure"], reply["n"]) == ("passages", "nDCG@10", n)
    measures = ["Success@1", "Success@5", "Success@20", "nDCG@10", "R@20", "RR@10"]
    for name in RETRIEVERS:
        alone = bookwheel(*command, "--retriever", name).json
        comparison = reply["compared"][name]
        assert "retrievers" not in alone
        assert reply["retrievers"][name] == comparison["metrics"] == alone["metrics"]
        assert list(alone["metrics"]) == measures
        assert list(comparison["intervals"]) == measures
        assert comparison["milliseconds"] > 0
        assert comparison["timed"] == n
        groups = comparison["groups"]
        assert list(groups) == ["source odd", "source even"] or "at most 2 shared stems" in groups
        assert (comparison.get("differences") is None) == (name == "hnsw")
    assert reply["metrics"] == reply["retrievers"]["hnsw"]
    fused = reply["compared"]["rrf(hnsw, exact:30)"]
    assert [stage["stage"] for stage in fused["stages"]] == ["hnsw", "exact", "rrf(hnsw, exact:30)"]
    assert fused["stages"][0]["metrics"] == reply["retrievers"]["hnsw"]
    files = bookwheel("show", "--store", library, "--json").json["content"]["files"]
    assert fused["stages"][0]["bytes"] == files["index/hnsw.faiss"]["size"]
    assert "fits a prompt" in reply["advice"]
    run_names = ["run.1-hnsw.trec", "run.2-rrf-hnsw-exact-30.trec", "run.3-exact.trec"]
    assert sorted(path.name for path in tmp_path.glob("*.trec")) == run_names
    assert (tmp_path / run_names[2]).read_text().splitlines()[0].endswith(" 3-exact")
    assert len((tmp_path / "rows.1-hnsw.jsonl").read_text().splitlines()) == n
    assert_harmless(report.read_text())
    assert "by its id" in parse_balanced(report.read_text()).text


@pytest.mark.usefixtures("prefect_server")
def test_figures_are_an_artifact_of_the_flow_run(library: Path, questions: Path, bookwheel: Bookwheel) -> None:
    assert bookwheel("evaluate", "--store", library, "--questions", questions, *build_options(RETRIEVERS[:2])).code == 0
    with get_client(sync_client=True) as client:
        query = {"artifacts": {"key": {"like_": "compare-figures"}}, "sort": "CREATED_DESC", "limit": 1}
        (artifact,) = client.request("POST", "/artifacts/filter", json=query).json()
    rows = json.loads(artifact["data"])
    assert [row["retriever"] for row in rows if row["of"] == "all"] == RETRIEVERS[:2]
    assert {"stage hnsw", "stage exact", "stage rrf(hnsw, exact:30)"} <= {row["of"] for row in rows}
    assert "judged by passages" in artifact["description"]


def test_text_output_has_tables(library: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel) -> None:
    cross_encoder = save_cross_encoder(tmp_path / "cross")
    retrievers = ["hnsw", f"rerank(hnsw:9, {cross_encoder}, 9)"]
    command = ["evaluate", "--store", library, "--questions", questions, "-k", 5, "--judge", "answers"]
    result = bookwheel(*command, *build_options(retrievers))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].endswith("judged by answers, retriever hnsw")
    assert any(line.startswith("  minus hnsw") for line in lines)
    assert any(line.startswith(f"{retrievers[1]}: question encoder") for line in lines)
    assert any(line.startswith("source odd") for line in lines)
    assert lines[-2].startswith("advice ")
    assert Path(lines[-1].partition("file://")[2]).is_file(), "the report in the store"


def test_settings_name_the_retriever(
    library: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", "--store", library, "--questions", questions, "--json"]
    monkeypatch.setenv("BOOKWHEEL_RETRIEVER", "rrf(hnsw, exact)")
    assert bookwheel(*command).json["retriever"] == "rrf(hnsw, exact)"
    assert bookwheel(*command, "--index", "exact").json["retriever"] == "exact"
    monkeypatch.delenv("BOOKWHEEL_RETRIEVER")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text('retriever = "rrf(exact, hnsw)"\n')
    assert bookwheel(*command).json["retriever"] == "rrf(exact, hnsw)"


def test_relevant_passages_of_another_corpus_are_rejected(library: Path, tmp_path: Path, bookwheel: Bookwheel) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Who?", "passages": ["nq-1"]}\n')
    result = bookwheel("evaluate", "--store", library, "--questions", path)
    assert result.code == 1
    assert "has none of the 1 passages that the questions name, such as 'nq-1'" in result.complaint


@pytest.mark.parametrize("retriever", ["bm25", "exact"])
def test_query_does_not_retrieve_its_own_document(
    tmp_path: Path, tiny: Path, reindex: Bookwheel, bookwheel: Bookwheel, retriever: str
) -> None:
    """As in BEIR's ArguAna, queries are documents of the corpus; the first one is long enough for several passages."""
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
    build = reindex(tmp_path / "store", dump=corpus, recipe=recipe)
    assert build.code == 0, build.err
    assert build.json["counts"]["passages"] > 4
    command = ["evaluate", "--store", tmp_path / "store", "--questions", folder, "--retriever", retriever]
    rows = tmp_path / "rows.jsonl"
    result = bookwheel(*command, "-k", 1, "--rows", rows, "--json")
    assert result.code == 0, result.err
    first, _ = map(json.loads, rows.read_text().splitlines())
    assert [hit["page_id"] for hit in first["hits"]] == ["c1"]
