"""`bookwheel evaluate --model` over a real snapshot: figures, files, answers made once, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.scripted_server import WHOLE, event, likely, scripted, streams
from tests.fixtures.strict_html import assert_harmless, parsed
from tests.fixtures.tiny_rag import save_tiny_rag
from tests.fixtures.tiny_spans import save_span_model

QUESTIONS = [
    {"id": "p", "question": "Who wrote What is Property?", "answers": ["Proudhon"]},
    {"id": "a", "question": "What is autism?", "answers": ["disorder", "developmental"]},
    {"id": "n", "question": "Où est 東京 🗼?", "answers": ["qzx"]},
]


@pytest.fixture(scope="module")
def tiny_rag(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), tiny)


@pytest.fixture(scope="module")
def shelf(library: Path, tiny_rag: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of its own with the small snapshot and two models, one of which only retrieves."""
    url = shutil.copytree(library, tmp_path_factory.mktemp("shelf") / "store")
    store = Store.open(str(url))
    put_model(store, tiny_rag, ModelMetadata("rag-sequence", None, {}), "reader")
    put_model(store, tiny, ModelMetadata("dpr", None, {}), "finder")
    return url


def kept(store: Path) -> int:
    return len(list((store / "memo" / "answer").glob("*.json")))


def test_a_model_is_measured_and_its_answers_are_made_once(
    shelf: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    before = kept(shelf)  # other tests answer from it, too
    rows, page, kilt = tmp_path / "rows.jsonl", tmp_path / "page.html", tmp_path / "kilt.jsonl"
    given = ["evaluate", "--store", shelf, "--model", "reader", "--questions", questions, "--json", "--index", "exact"]
    result = bookwheel(*given, "--rows", rows, "--report", page, "--kilt", kilt)
    assert result.code == 0, result.err
    reply = result.json
    assert {"snapshot", "model", "n", "k", "metrics", "intervals", "ranks", "collapse"} <= reply.keys()
    assert (len(reply["model"]), len(reply["snapshot"]), reply["n"], reply["k"]) == (64, 64, 3, 3)
    assert list(reply["metrics"])[:5] == ["Success@1", "Success@5", "Success@20", "EM", "F1"]
    assert {"EM-unheld", "supported"} <= set(reply["metrics"])
    assert reply["collapse"]["questions"] == 3
    searched = bookwheel("evaluate", "--store", shelf, "--questions", questions, "--json", "--index", "exact").json
    assert searched["metrics"].items() <= reply["metrics"].items()  # retrieval is the same with and without a model
    assert searched["ranks"] == pytest.approx(
        reply["ranks"], abs=0.01
    )  # near ties of the tiny encoder may change places

    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["id"] for row in written] == ["p", "a", "n"]
    for row in written:
        assert len(row["passages"]) == 3
        for key in ("weight", "posterior"):
            assert sum(passage[key] for passage in row["passages"]) == pytest.approx(1, abs=1e-4)
    assert [json.loads(line)["id"] for line in kilt.read_text().splitlines()] == ["p", "a", "n"]
    assert_harmless(page.read_text())
    assert reply["model"] in parsed(page.read_text()).text
    assert kept(shelf) == before + 1

    again = bookwheel(*given, "--ablations").json
    assert again["metrics"] == reply["metrics"]  # retrieved deeper, measured as deep
    assert again["ranks"] == reply["ranks"]
    names = [row["condition"] for row in again["ablations"]]
    swept = [f"open book, k = {k}" for k in (1, 2, 5, 10, 20)]
    assert names == ["open book", "closed book", "gold passage", "shuffled passages", *swept, "frozen retriever"]
    assert [row["k"] for row in again["ablations"]] == [3, 0, 1, 3, 1, 2, 5, 10, 20, 3]
    assert kept(shelf) == before + 10  # nine more; the open book's are those of before
    assert "retrieval" in again["worth"]
    assert again["notes"] == ["the whole corpus was not read: marginal does not read one prompt; add --reader concat"]
    assert reply["worth"] == ""  # closed book was not measured
    assert list(again["search"]) == ["question encoder", "exact", "reading of passages"]
    assert list(again["stages"]) == [*again["search"], "assembly", "generation"]
    (book,) = (row for row in again["ablations"] if row["condition"] == "open book")
    answering = [again["stages"][name] for name in ("assembly", "generation")]
    assert sum(answering) == pytest.approx(1000 * book["costs"]["seconds"])  # no time between two stages is lost
    assert list(book["stages"].values()) == answering
    assert "unchanged" in again["collapse"]


def test_readers_are_compared_on_the_same_passages(
    shelf: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    page = tmp_path / "page.html"
    given = ["evaluate", "--store", shelf, "--model", "reader", "--questions", questions, "--index", "exact", "-k", "2"]
    given += ["--reader", "marginal", "--beams", "2", "--reader", "concat", "--budget", "120"]
    before = kept(shelf)
    reply = bookwheel(*given, "--json", "--report", page).json
    once = kept(shelf)
    assert reply["reader"] == "marginal"
    assert once > before
    first, other = reply["ablations"]
    assert [first["condition"], other["condition"]] == ["open book", "concat, open book"]
    assert (first["k"], first["n"]) == (other["k"], other["n"]) == (2, 3)
    assert set(other["against_open"]["F1"]) == {"value", "low", "high", "n"}
    for row in (first, other):
        assert set(row["costs"]) == {"seconds", "read", "written"}
        assert row["costs"]["read"] > row["costs"]["written"] > 0
    assert reply["costs"] == first["costs"]
    shown = parsed(page.read_text()).text
    assert "concat, open book" in shown
    assert all(name in shown for name in ("reading of passages", "assembly", "generation", "all stages, open book"))
    output = bookwheel(*given).out
    assert "by marginal" in output
    assert "minus the first reader: EM +0.000 [+0.000, +0.000]" in output
    assert output.count("tokens read") == 2
    assert kept(shelf) == once  # nothing was answered again
    other_budget = bookwheel(*given[:-1], "130", "--json")
    assert (other_budget.code, kept(shelf)) == (0, once + 1)  # another prompt is another answer; the first is kept
    alone = bookwheel(*given[:-8], "--beams", "2", "--reader", "concat", "--budget", "120", "--json").json
    assert alone["reader"] == "concat"
    assert kept(shelf) == once + 1
    assert (reply["notes"], alone["notes"]) == ([], [])  # nothing was ablated
    ablated = bookwheel(*given, "--ablations", "--json", "--report", page).json
    assert ablated["notes"][0].endswith("use the first reader; the others (concat) answer the open book")
    assert ablated["notes"][1].endswith("do not fit into a prompt of concat")
    assert ablated["notes"][1][1:] in parsed(page.read_text()).text


def test_a_model_behind_an_endpoint_is_measured(
    shelf: Path, questions: Path, bookwheel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["evaluate", "--store", shelf, "--model", "openai:tiny", "--questions", questions, "--index", "exact"]
    with scripted(streams(event("Proudhon [1]."), event("", "stop"))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        result = bookwheel(*given, "--cite", "--json", "-k", "2")
        assert result.code == 0, result.err
        asked = len(server.bodies)
        assert bookwheel(*given, "--cite", "--json", "-k", "2").json["evaluation"] == result.json["evaluation"]
        assert asked == len(server.bodies) == len(QUESTIONS)  # the answers were kept
    assert (result.json["model"], result.json["reader"]) == ("openai:tiny", "concat")
    assert (result.json["metrics"]["EM"], result.json["unrecorded"]) == (pytest.approx(1 / 3), "")


def test_answers_that_are_missing_are_counted_and_reasoning_is_not_scored(
    shelf: Path, questions: Path, bookwheel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    thought = streams(event("<think>It is Hegel.</think>"), event("Proudhon"), event("", "stop"))
    refused = streams(event("", "content_filter"))
    rows = tmp_path / "rows.jsonl"
    given = ["evaluate", "--store", shelf, "--model", "openai:reasons", "--questions", questions, "--index", "exact"]
    with scripted(thought, refused) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("BOOKWHEEL_LLM_CONCURRENCY", "1")
        result = bookwheel(*given, "--json", "-k", "2", "--max-tokens", "99", "--rows", rows)
        assert result.code == 0, result.err
        assert {body["max_tokens"] for body in server.bodies} == {99}
    written = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [row["prediction"] for row in written] == ["Proudhon", "", ""]
    assert [(row["problem"] or {}).get("kind") for row in written] == [None, "filtered", "filtered"]
    assert result.json["notes"] == [
        "2 of 3 answers have the problem `filtered`; the first: the endpoint's content filter stopped the answer"
    ]


def test_an_endpoint_s_answers_choose_a_threshold_and_are_measured_by_it(
    shelf: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "threshold.json"
    given = ["evaluate", "--store", shelf, "--model", "openai:sure-of-it", "--questions", questions, "--index", "exact"]
    told = [(likely("Proudhon", -0.5), event("", "stop")), (likely("nobody", -2.5), event("", "stop"))]
    with scripted(streams(*told[0]), streams(*told[1])) as server:
        for name, value in {"OPENAI_BASE_URL": server.url, "BOOKWHEEL_LLM_LOGPROBS": "yes"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("BOOKWHEEL_LLM_CONCURRENCY", "1")  # so that the first question gets the sure answer
        chosen = bookwheel(*given, "--abstain", path, "--risk", "0.1")
        assert chosen.code == 0, chosen.err
        assert "model openai:sure-of-it, " in chosen.out
        assert "below -0.5 by likelihood, 33% of the questions are answered, and 0.0% of these wrong" in chosen.out
        monkeypatch.delenv("BOOKWHEEL_LLM_LOGPROBS")  # the threshold says what to ask for
        measured = bookwheel(*given, "--abstain-below", path, "--json")
        assert measured.json["abstaining"]["at"] == {"coverage": pytest.approx(1 / 3), "risk": 0}
        assert len(server.bodies) == len(QUESTIONS)
        path.write_text('{"signal": "passages", "least": 0}')
        refused = bookwheel(*given, "--abstain-below", path)
        assert (refused.code, "which a threshold for `passages` needs" in refused.err) == (2, True)


def artifacts(prefix: str) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        reply = client.request("POST", "/artifacts/filter", json={"limit": 200}).json()
    return {artifact["key"]: artifact["data"] for artifact in reply if (artifact["key"] or "").startswith(prefix)}


@pytest.mark.usefixtures("prefect_server")
def test_a_collapse_is_refused_when_all_is_measured(
    shelf: Path, tiny_rag: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    path, page = tmp_path / "same.jsonl", tmp_path / "page.html"
    path.write_text("".join(json.dumps({**QUESTIONS[0], "id": str(n)}) + "\n" for n in range(20)))
    given = ["--store", shelf, "--model", tiny_rag, "-k", 1, "--questions", path, "--report", page]
    result = bookwheel("evaluate", *given, "--json")
    assert result.code == 3
    assert "retrieval has collapsed: 20 questions got 1 distinct passages" in result.err
    assert result.json["model"] == str(tiny_rag)  # a folder
    assert result.json["metrics"]["EM"] == 0
    assert "Retrieval has collapsed" in parsed(page.read_text()).text
    seen = artifacts("evaluate-")
    assert {"what": "EM", "value": "0.000 [0.000, 0.000]"} in json.loads(seen["evaluate-figures"])
    assert seen["evaluate-open-book"] == 100.0
    assert page.name in str(seen["evaluate-report"])


@pytest.mark.usefixtures("prefect_server")
def test_the_report_is_in_the_store_and_linked_also_when_no_file_is_named(
    shelf: Path, tiny_rag: Path, questions: Path, bookwheel: Callable[..., Any]
) -> None:
    given = ["--store", shelf, "--model", tiny_rag, "-k", 1, "--questions", questions, "--json"]
    reports = [bookwheel("evaluate", *given).json for _ in range(2)]
    for report in reports:  # the second finds the evaluation of the first
        page = Path(report["report"].removeprefix("file://"))
        assert page == shelf / "reports" / f"{report['evaluation']}.html"
        assert report["snapshot"] in page.read_text()
    with get_client(sync_client=True) as client:
        links = client.request("POST", "/artifacts/filter", json={"artifacts": {"key": {"like_": "evaluate-report"}}})
    assert page.name in links.text
    assert bookwheel("gc", "--store", shelf, "--grace", "0", "--yes").code == 0
    assert page.exists()


def test_an_edited_model_folder_is_another_model(
    shelf: Path, tiny_rag: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    folder = shutil.copytree(tiny_rag, tmp_path / "rag")
    given = ["evaluate", "--store", shelf, "--model", folder, "-k", 2, "--questions", questions, "--json"]
    first = bookwheel(*given)
    assert first.code == 0, first.err
    before = kept(shelf)
    (folder / "note.txt").write_text("other")
    assert bookwheel(*given).json["metrics"] == first.json["metrics"]
    assert kept(shelf) == before + 1


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        (["--ablations"], 2, "--ablations needs a model"),
        (["--reader", "concat"], 2, "--reader needs a model"),
        (["--model", "reader", "--reader", "concat", "--reader", "concat"], 2, "name each reader once"),
        (["--model", "reader", "--cite"], 2, "--cite only applies to a reader with one prompt for all passages"),
        (["--kilt", "page.jsonl"], 2, "--kilt needs a model"),
        (["--abstain", "t.json"], 2, "--abstain needs a model"),
        (["--label", "SUPPORTS=true"], 2, "--label needs a model"),
        (["--model", "reader", "--label", "SUPPORTS"], 2, "give one such as SUPPORTS=true"),
        (["--model", "reader", "--label", "A=the", "--label", "B=of"], 2, "add --answers labels"),
        (["--model", "reader", "--risk", "0.1"], 2, "give --abstain too"),
        (["--model", "reader", "--abstain-below", "nowhere.json"], 1, "nowhere.json contains no threshold"),
        (["--model", "reader", "--retriever", "hnsw", "--retriever", "exact"], 2, "a model answers from one retriever"),
        (["--judge", "passages"], 2, "question 'p' names no passages"),
        (["--model", "reader", "--judge", "pages"], 2, "question 'p' names no pages"),
        (["--retriever", "hnsw", "--retriever", "hnsw"], 2, "the retriever hnsw is given twice"),
        (["--model", "reader", "--trec", "run"], 2, "--trec only applies to retrieval without a model"),
        (["--model", "reader", "--answers", "labels"], 2, "no question has one of the labels"),
        (["--model", "reader", "-k", "0"], 2, "at least 1"),
        (["-k", "0"], 2, "at least 1"),
        (["--model", "finder"], 2, "give a RAG model"),
        (["--model", "nobody"], 1, "nobody"),
    ],
)
def test_what_can_not_be_asked(
    given: list[str], code: int, told: str, shelf: Path, questions: Path, bookwheel: Callable[..., Any]
) -> None:
    result = bookwheel("evaluate", "--store", shelf, "--questions", questions, *given)
    assert result.code == code
    assert told in result.complaint


def test_claims_are_labelled_by_one_token(shelf: Path, tmp_path: Path, bookwheel: Callable[..., Any]) -> None:
    claims, rows = tmp_path / "claims.jsonl", tmp_path / "rows.jsonl"
    labels = ["SUPPORTS", "REFUTES", "NOT ENOUGH INFO"]
    claims.write_text(
        "".join(json.dumps({**one, "answers": [label]}) + "\n" for one, label in zip(QUESTIONS, labels, strict=True))
    )
    given = ["evaluate", "--store", shelf, "--model", "reader", "--questions", claims, "--index", "exact", "--json"]
    words = [word for pair in zip(labels, ["the", "of", "who"], strict=True) for word in ("--label", "=".join(pair))]
    result = bookwheel(*given, "--answers", "labels", *words, "--rows", rows)
    assert result.code == 0, result.err
    assert {json.loads(line)["prediction"] for line in rows.read_text().splitlines()} <= set(labels)
    assert result.json["metrics"].keys() >= {"Acc-3way", "Acc-2way", "AC"}


def test_a_model_of_spans_is_a_baseline(
    shelf: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    folder = save_span_model(tmp_path / "spans", "bert")
    common = ["--store", shelf, "--model", folder, "--reader", "extractive", "--index", "exact", "-k", 2]
    result = bookwheel("evaluate", *common, "--questions", questions, "--ablations", "--json")
    assert result.code in {0, 3}, result.err  # 3: random weights may ignore the passages
    assert result.json["reader"] == "extractive"
    assert {"EM", "supported"} <= result.json["metrics"].keys()
    assert result.json["costs"]["written"] == 0
    answered = bookwheel("answer", "What is autism?", *common, "--json").json["answers"][0]
    assert any(answered["answer"] in one["text"] for one in answered["passages"])
    refused = bookwheel("answer", "Who?", "--store", shelf, "--model", "reader", "--reader", "extractive")
    assert refused.code == 1
    assert "no question-answering head" in refused.err


def test_a_threshold_is_chosen_measured_and_used(
    shelf: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    path, page = tmp_path / "threshold.json", tmp_path / "page.html"
    common = ["--store", shelf, "--model", "reader"]
    given = ["evaluate", *common, "--questions", questions, "--answers", "patterns", "--index", "exact"]
    every = tmp_path / "every.jsonl"  # any answer matches
    every.write_text("".join(json.dumps({**one, "answers": [".*"]}) + "\n" for one in QUESTIONS))
    chosen = bookwheel(*[every if one is questions else one for one in given], "--abstain", path, "--report", page)
    assert chosen.code == 0, chosen.err
    assert "100% of the questions are answered, and 0.0% of these wrong" in chosen.out
    assert "Area under each curve" in parsed(page.read_text()).text
    kept_one = json.loads(path.read_text())
    assert kept_one["signal"] in {"likelihood", "retrieval", "passages"}
    assert kept_one["wanted_risk"] == 0.2

    none = bookwheel(*given, "--abstain", tmp_path / "other.json", "--risk", 0)
    assert none.code == 3
    assert f"no threshold keeps the risk at 0 or below, so {tmp_path / 'other.json'} is not written" in none.err
    assert not (tmp_path / "other.json").exists()

    measured = bookwheel(*given, "--abstain-below", path, "--json").json
    assert measured["abstaining"]["at"] == {"coverage": 1, "risk": 1}
    answered = bookwheel(
        "answer", "What is autism?", *common, "--index", "exact", "--abstain-below", path, "--json"
    ).json
    assert answered["answers"][0]["abstained"] is False
    silent = bookwheel("answer", "What is autism?", *common, "--index", "exact", "--abstain-below", "1")
    assert "(the library does not hold it)" in silent.out


@pytest.mark.parametrize(("temperature", "asked"), [("0", 3), ("0.7", 6)])
def test_an_endpoints_answers_are_kept_unless_they_are_drawn(
    temperature: str,
    asked: int,
    shelf: Path,
    questions: Path,
    bookwheel: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted(streams(*WHOLE)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("BOOKWHEEL_LLM_TEMPERATURE", temperature)
        given = ["evaluate", "--store", shelf, "--model", "openai:tiny", "--questions", questions, "--json"]
        first, second = bookwheel(*given), bookwheel(*given)
    assert first.code == second.code == 0, first.err
    assert first.json["metrics"] == second.json["metrics"]
    assert len(server.bodies) == asked
    kept = first.json["evaluation"]
    assert f"evaluated {kept[:12]}: model openai:tiny, " in bookwheel("show", "--store", shelf).out
    assert "model     openai:tiny (sha256:" in bookwheel("show", f"evaluation:{kept}", "--store", shelf).out


def test_a_route_is_chosen_measured_and_used(
    shelf: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    path, rows = tmp_path / "route.json", tmp_path / "rows.jsonl"
    common = ["--store", shelf, "--model", "reader", "--index", "exact"]
    given = ["evaluate", *common, "--questions", questions, "--reader", "auto", "--json"]
    chosen = bookwheel(*given, "--choose-route", path, "--rows", rows, "--answers", "patterns")
    assert chosen.code == 0, chosen.err
    assert [row["condition"] for row in chosen.json["ablations"]] == ["open book", "marginal, open book", "closed book"]
    routing = chosen.json["routing"]
    # The tiny model never answers right, so that nothing speaks for its weights.
    assert (routing["answered_from_weights"], routing["reading_skipped"], routing["chosen"]) == (0, 0, True)
    assert chosen.json["notes"][0].startswith("chosen route: passages answer every question: 0% of the questions")
    written = json.loads(path.read_text())
    assert (written["signal"], written["reader"], written["n"]) == ("weights", "marginal", 3)
    assert (written["evaluation"], written["model"]) == (chosen.json["evaluation"], chosen.json["model"])
    assert {json.loads(line)["memory"] for line in rows.read_text().splitlines()} <= {"passages", None}

    once = kept(shelf)
    for source in (path, f"evaluation:{chosen.json['evaluation'][:20]}"):
        measured = bookwheel(*given, "--route", source, "--answers", "patterns").json
        assert measured["routing"] == {**routing, "chosen": False}
        said = bookwheel("answer", "What is autism?", *common, "--reader", "auto", "--route", source)
        assert "  from passages:" in said.out
    assert kept(shelf) == once  # both answers of each question are kept
    path.write_text(json.dumps({**written, "least": -99}))
    said = bookwheel("answer", "What is autism?", *common, "--reader", "auto", "--route", path)
    assert "  from the model's weights, without passages" in said.out
    bare = bookwheel(*given)
    assert bare.json["routing"]["route"] == {"signal": "difference", "least": 0, "model": "", "reader": ""}

    path.write_text(json.dumps({**written, "model": "another"}))
    refused = bookwheel("answer", "What is autism?", *common, "--reader", "auto", "--route", path)
    assert (refused.code, "chosen for a model other than" in refused.err) == (2, True)
    for words, reason in (
        (["--route", path], "give --reader auto too"),
        (["--choose-route", path], "give --reader auto too"),
        (["--reader", "auto", "--route", "evaluation:0000"], "evaluation"),
        (["--reader", "auto", "--route", tmp_path / "no"], "cannot be read"),
    ):
        refused = bookwheel("evaluate", *common, "--questions", questions, *words)
        assert (refused.code in (1, 2), reason in refused.err) == (True, True), refused.err
