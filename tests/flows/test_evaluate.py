"""`bookwheel evaluate --model` over a real snapshot: metrics, files, reused answers, and rejected options."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.scripted_server import ANSWER_EVENTS, make_event, make_token, send, serve_script
from tests.fixtures.strict_html import assert_harmless, parse_balanced
from tests.fixtures.tiny_rag import save_tiny_rag
from tests.fixtures.tiny_spans import save_span_model
from tests.flows.conftest import Bookwheel

QUESTIONS = [
    {"id": "p", "question": "Who wrote What is Property?", "answers": ["Proudhon"]},
    {"id": "a", "question": "What is autism?", "answers": ["disorder", "developmental"]},
    {"id": "n", "question": "Où est 東京 🗼?", "answers": ["qzx"]},
]


@pytest.fixture(scope="module")
def tiny_rag(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), tiny)


@pytest.fixture(scope="module")
def store(library: Path, tiny_rag: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with two models, one of which only retrieves."""
    folder = shutil.copytree(library, tmp_path_factory.mktemp("models") / "store")
    put_model(Store.open(str(folder)), tiny_rag, ModelMetadata("rag-sequence", None, {}), "reader")
    put_model(Store.open(str(folder)), tiny, ModelMetadata("dpr", None, {}), "retriever")
    return folder


def count_answer_files(store: Path) -> int:
    return len(list((store / "memo" / "answer").glob("*.json")))


def test_model_is_evaluated_and_its_answers_are_reused(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    n_files = count_answer_files(store)  # Other tests answer from this store too.
    rows, report, kilt = tmp_path / "rows.jsonl", tmp_path / "page.html", tmp_path / "kilt.jsonl"
    command = [
        "evaluate",
        "--store",
        store,
        "--model",
        "reader",
        "--questions",
        questions,
        "--index",
        "exact",
        "--json",
    ]
    result = bookwheel(*command, "--rows", rows, "--report", report, "--kilt", kilt)
    assert result.code == 0, result.err
    reply = result.json
    assert {"snapshot", "model", "n", "k", "metrics", "intervals", "ranks", "collapse"} <= reply.keys()
    assert (len(reply["model"]), len(reply["snapshot"]), reply["n"], reply["k"]) == (64, 64, 3, 3)
    assert list(reply["metrics"])[:5] == ["Success@1", "Success@5", "Success@20", "EM", "F1"]
    assert {"EM-unheld", "supported"} <= set(reply["metrics"])
    assert reply["collapse"]["questions"] == 3
    retrieval = bookwheel("evaluate", "--store", store, "--questions", questions, "--json", "--index", "exact").json
    assert retrieval["metrics"].items() <= reply["metrics"].items()  # retrieval is the same with and without a model
    assert retrieval["ranks"] == pytest.approx(reply["ranks"], abs=0.01)  # the tiny encoder has near ties

    row_entries = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["id"] for row in row_entries] == ["p", "a", "n"]
    for row in row_entries:
        assert len(row["passages"]) == 3
        for key in ("weight", "posterior"):
            assert sum(passage[key] for passage in row["passages"]) == pytest.approx(1, abs=1e-4)
    assert [json.loads(line)["id"] for line in kilt.read_text().splitlines()] == ["p", "a", "n"]
    assert_harmless(report.read_text())
    assert reply["model"] in parse_balanced(report.read_text()).text
    assert count_answer_files(store) == n_files + 1

    ablated = bookwheel(*command, "--ablations").json
    assert ablated["metrics"] == reply["metrics"]  # ablations retrieve more passages, but metrics use the same k
    assert ablated["ranks"] == reply["ranks"]
    conditions = [row["condition"] for row in ablated["ablations"]]
    k_conditions = [f"open book, k = {k}" for k in (1, 2, 5, 10, 20)]
    expected = ["open book", "closed book", "gold passage", "shuffled passages", *k_conditions, "frozen retriever"]
    assert conditions == expected
    assert [row["k"] for row in ablated["ablations"]] == [3, 0, 1, 3, 1, 2, 5, 10, 20, 3]
    assert count_answer_files(store) == n_files + 10, "nine more; the open-book answers are reused"
    assert "retrieval" in ablated["worth"]
    assert ablated["notes"] == ["the whole corpus was not read: marginal does not read one prompt; add --reader concat"]
    assert reply["worth"] == ""  # closed book was not measured
    assert list(ablated["search"]) == ["question encoder", "exact", "reading of passages"]
    assert list(ablated["stages"]) == [*ablated["search"], "assembly", "generation"]
    (open_book,) = (row for row in ablated["ablations"] if row["condition"] == "open book")
    answer_times = [ablated["stages"][name] for name in ("assembly", "generation")]
    assert sum(answer_times) == pytest.approx(1000 * open_book["costs"]["seconds"]), "stages account for all the time"
    assert list(open_book["stages"].values()) == answer_times
    assert "unchanged" in ablated["collapse"]


def test_readers_are_compared_on_the_same_passages(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    report = tmp_path / "page.html"
    command = [
        "evaluate",
        "--store",
        store,
        "--model",
        "reader",
        "--questions",
        questions,
        "--index",
        "exact",
        "-k",
        "2",
    ]
    command += ["--reader", "marginal", "--beams", "2", "--reader", "concat", "--budget", "120"]
    n_files_before = count_answer_files(store)
    reply = bookwheel(*command, "--json", "--report", report).json
    n_files = count_answer_files(store)
    assert reply["reader"] == "marginal"
    assert n_files > n_files_before
    first_row, second_row = reply["ablations"]
    assert [first_row["condition"], second_row["condition"]] == ["open book", "concat, open book"]
    assert (first_row["k"], first_row["n"]) == (second_row["k"], second_row["n"]) == (2, 3)
    assert set(second_row["against_open"]["F1"]) == {"value", "low", "high", "n"}
    for row in (first_row, second_row):
        assert set(row["costs"]) == {"seconds", "read", "written"}
        assert row["costs"]["read"] > row["costs"]["written"] > 0
    assert reply["costs"] == first_row["costs"]
    report_text = parse_balanced(report.read_text()).text
    assert "concat, open book" in report_text
    stages = ("reading of passages", "assembly", "generation", "all stages, open book")
    assert all(stage in report_text for stage in stages)
    output = bookwheel(*command).out
    assert "by marginal" in output
    assert "minus the first reader: EM +0.000 [+0.000, +0.000]" in output
    assert output.count("tokens read") == 2
    assert count_answer_files(store) == n_files, "all answers are reused"
    other_budget = bookwheel(*command[:-1], "130", "--json")
    assert (other_budget.code, count_answer_files(store)) == (0, n_files + 1), "only the other prompt is answered"
    alone = bookwheel(*command[:-8], "--beams", "2", "--reader", "concat", "--budget", "120", "--json").json
    assert alone["reader"] == "concat"
    assert count_answer_files(store) == n_files + 1
    assert (reply["notes"], alone["notes"]) == ([], [])  # there were no ablations
    ablated = bookwheel(*command, "--ablations", "--json", "--report", report).json
    assert ablated["notes"][0].endswith("use the first reader; the others (concat) answer the open book")
    assert ablated["notes"][1].endswith("do not fit into a prompt of concat")
    assert ablated["notes"][1][1:] in parse_balanced(report.read_text()).text


def test_endpoint_model_is_evaluated_and_asked_once(
    store: Path, questions: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", "--store", store, "--model", "openai:tiny", "--questions", questions, "--index", "exact"]
    with serve_script(send(make_event("Proudhon [1]."), make_event("", "stop"))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        result = bookwheel(*command, "--cite", "--json", "-k", "2")
        assert result.code == 0, result.err
        n_requests = len(server.bodies)
        assert bookwheel(*command, "--cite", "--json", "-k", "2").json["evaluation"] == result.json["evaluation"]
        assert n_requests == len(server.bodies) == len(QUESTIONS)  # the answers are reused
    assert (result.json["model"], result.json["reader"]) == ("openai:tiny", "concat")
    assert (result.json["metrics"]["EM"], result.json["unrecorded"]) == (pytest.approx(1 / 3), "")


def test_missing_answers_are_counted_and_reasoning_is_not_scored(
    store: Path, questions: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reasoned_answer = send(make_event("<think>It is Hegel.</think>"), make_event("Proudhon"), make_event("", "stop"))
    filtered_answer = send(make_event("", "content_filter"))
    rows = tmp_path / "rows.jsonl"
    command = ["evaluate", "--store", store, "--model", "openai:reasons", "--questions", questions, "--index", "exact"]
    complete_answer = send(make_event("A disorder"), make_event("", "stop"))
    with serve_script(reasoned_answer, filtered_answer, filtered_answer, complete_answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("BOOKWHEEL_LLM_CONCURRENCY", "1")
        command += ["--json", "-k", "2", "--max-tokens", "99"]
        result = bookwheel(*command, "--rows", rows)
        assert result.code == 0, result.err
        repeated = bookwheel(*command)
        assert {body["max_tokens"] for body in server.bodies} == {99}
    row_entries = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [row["prediction"] for row in row_entries] == ["Proudhon", "", ""]
    assert [(row["problem"] or {}).get("kind") for row in row_entries] == [None, "filtered", "filtered"]
    assert result.json["notes"] == [
        "2 of 3 answers have the problem `filtered`; the first: the endpoint's content filter stopped the answer"
    ]
    # The next run generates the two missing answers again, and replaces the recorded evaluation.
    assert (len(server.bodies), repeated.json["notes"]) == (5, [])
    assert repeated.json["evaluation"] == result.json["evaluation"]
    content = bookwheel("show", f"evaluation:{repeated.json['evaluation']}", "--store", store, "--json").json["content"]
    assert content["figures"]["exact"]["F1"]["value"] == repeated.json["metrics"]["F1"] != result.json["metrics"]["F1"]


def test_threshold_is_chosen_from_endpoint_likelihoods_and_applied(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "threshold.json"
    command = [
        "evaluate",
        "--store",
        store,
        "--model",
        "openai:sure-of-it",
        "--questions",
        questions,
        "--index",
        "exact",
    ]
    sure, unsure = (send(make_token(*word), make_event("", "stop")) for word in (("Proudhon", -0.5), ("Hegel", -2.5)))
    with serve_script(sure, unsure) as server:
        for name, value in {"OPENAI_BASE_URL": server.url, "BOOKWHEEL_LLM_LOGPROBS": "yes"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("BOOKWHEEL_LLM_CONCURRENCY", "1")  # so that the first question gets the sure answer
        choice = bookwheel(*command, "--abstain", path, "--risk", "0.1")
        assert choice.code == 0, choice.err
        assert "model openai:sure-of-it, " in choice.out
        assert "below -0.5 by likelihood, 33% of the questions are answered, and 0.0% of these wrong" in choice.out
        monkeypatch.delenv("BOOKWHEEL_LLM_LOGPROBS")  # the threshold file says that likelihoods are needed
        abstained = bookwheel(*command, "--abstain-below", path, "--json")
        assert abstained.json["abstaining"]["at"] == {"coverage": pytest.approx(1 / 3), "risk": 0}
        assert len(server.bodies) == len(QUESTIONS)
        path.write_text('{"signal": "passages", "least": 0}')
        mismatch = bookwheel(*command, "--abstain-below", path)
        assert (mismatch.code, "which a threshold for `passages` needs" in mismatch.err) == (2, True)


def read_artifacts(prefix: str) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        reply = client.request("POST", "/artifacts/filter", json={"limit": 200}).json()
    return {artifact["key"]: artifact["data"] for artifact in reply if (artifact["key"] or "").startswith(prefix)}


@pytest.mark.usefixtures("prefect_server")
def test_collapse_is_rejected_after_the_evaluation(
    store: Path, tiny_rag: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    path, report = tmp_path / "same.jsonl", tmp_path / "page.html"
    path.write_text("".join(json.dumps({**QUESTIONS[0], "id": str(n)}) + "\n" for n in range(20)))
    options = ["--store", store, "--model", tiny_rag, "-k", 1, "--questions", path, "--report", report]
    result = bookwheel("evaluate", *options, "--json")
    assert result.code == 3
    assert "retrieval has collapsed: 20 questions got 1 distinct passages" in result.err
    assert result.json["model"] == str(tiny_rag)  # the model is a folder
    assert result.json["metrics"]["EM"] == 0
    assert "Retrieval has collapsed" in parse_balanced(report.read_text()).text
    artifacts = read_artifacts("evaluate-")
    assert {"what": "EM", "value": "0.000 [0.000, 0.000]"} in json.loads(artifacts["evaluate-figures"])
    assert artifacts["evaluate-open-book"] == 100.0
    assert report.name in str(artifacts["evaluate-report"])


@pytest.mark.usefixtures("prefect_server")
def test_report_is_stored_and_linked_without_a_report_option(
    store: Path, tiny_rag: Path, questions: Path, bookwheel: Bookwheel
) -> None:
    options = ["--store", store, "--model", tiny_rag, "-k", 1, "--questions", questions, "--json"]
    replies = [bookwheel("evaluate", *options).json for _ in range(2)]
    for reply in replies:  # the second run reuses the evaluation of the first
        page = Path(reply["report"].removeprefix("file://"))
        assert page == store / "reports" / f"{reply['evaluation']}.html"
        assert reply["snapshot"] in page.read_text()
    with get_client(sync_client=True) as client:
        links = client.request("POST", "/artifacts/filter", json={"artifacts": {"key": {"like_": "evaluate-report"}}})
    assert page.name in links.text
    assert bookwheel("gc", "--store", store, "--grace", "0", "--yes").code == 0
    assert page.exists()


def test_edited_model_folder_is_another_model(
    store: Path, tiny_rag: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    folder = shutil.copytree(tiny_rag, tmp_path / "rag")
    command = ["evaluate", "--store", store, "--model", folder, "-k", 2, "--questions", questions, "--json"]
    first_result = bookwheel(*command)
    assert first_result.code == 0, first_result.err
    n_files = count_answer_files(store)
    (folder / "note.txt").write_text("other")
    assert bookwheel(*command).json["metrics"] == first_result.json["metrics"]
    assert count_answer_files(store) == n_files + 1


@pytest.mark.parametrize(
    ("options", "code", "message"),
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
        (["--model", "retriever"], 2, "give a RAG model"),
        (["--model", "missing"], 1, "missing"),
    ],
)
def test_invalid_options_are_rejected(
    options: list[str], code: int, message: str, store: Path, questions: Path, bookwheel: Bookwheel
) -> None:
    result = bookwheel("evaluate", "--store", store, "--questions", questions, *options)
    assert result.code == code
    assert message in result.complaint


def test_claims_are_labelled_by_one_token(store: Path, tmp_path: Path, bookwheel: Bookwheel) -> None:
    claims, rows = tmp_path / "claims.jsonl", tmp_path / "rows.jsonl"
    labels = ["SUPPORTS", "REFUTES", "NOT ENOUGH INFO"]
    rows_of_claims = [{**claim, "answers": [label]} for claim, label in zip(QUESTIONS, labels, strict=True)]
    claims.write_text("".join(json.dumps(claim) + "\n" for claim in rows_of_claims))
    command = ["evaluate", "--store", store, "--model", "reader", "--questions", claims, "--index", "exact", "--json"]
    label_options = [f"--label={label}={token}" for label, token in zip(labels, ["the", "of", "who"], strict=True)]
    result = bookwheel(*command, "--answers", "labels", *label_options, "--rows", rows)
    assert result.code == 0, result.err
    assert {json.loads(line)["prediction"] for line in rows.read_text().splitlines()} <= set(labels)
    assert result.json["metrics"].keys() >= {"Acc-3way", "Acc-2way", "AC"}


def test_extractive_model_is_evaluated_and_answers_with_spans(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    folder = save_span_model(tmp_path / "spans", "bert")
    common = ["--store", store, "--model", folder, "--reader", "extractive", "--index", "exact", "-k", 2]
    result = bookwheel("evaluate", *common, "--questions", questions, "--ablations", "--json")
    assert result.code in {0, 3}, result.err  # 3: random weights may ignore the passages
    assert result.json["reader"] == "extractive"
    assert {"EM", "supported"} <= result.json["metrics"].keys()
    assert result.json["costs"]["written"] == 0
    answer = bookwheel("answer", "What is autism?", *common, "--json").json["answers"][0]
    assert any(answer["answer"] in passage["text"] for passage in answer["passages"])
    rejected = bookwheel("answer", "Who?", "--store", store, "--model", "reader", "--reader", "extractive")
    assert rejected.code == 1
    assert "no question-answering head" in rejected.err


def test_threshold_is_chosen_evaluated_and_applied(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    path, report = tmp_path / "threshold.json", tmp_path / "page.html"
    common = ["--store", store, "--model", "reader"]
    command = ["evaluate", *common, "--questions", questions, "--answers", "patterns", "--index", "exact"]
    correct = tmp_path / "correct.jsonl"  # any answer matches its patterns
    correct.write_text("".join(json.dumps({**question, "answers": [".*"]}) + "\n" for question in QUESTIONS))
    choice_command = [correct if word is questions else word for word in command]
    choice = bookwheel(*choice_command, "--abstain", path, "--report", report)
    assert choice.code == 0, choice.err
    assert "100% of the questions are answered, and 0.0% of these wrong" in choice.out
    assert "Area under each curve" in parse_balanced(report.read_text()).text
    threshold = json.loads(path.read_text())
    assert threshold["signal"] in {"likelihood", "retrieval", "passages"}
    assert threshold["wanted_risk"] == 0.2

    unreachable = bookwheel(*command, "--abstain", tmp_path / "other.json", "--risk", 0)
    assert unreachable.code == 3
    assert "no threshold keeps the risk at 0 or below, so " in unreachable.err
    assert not (tmp_path / "other.json").exists()

    abstained = bookwheel(*command, "--abstain-below", path, "--json").json
    assert abstained["abstaining"]["at"] == {"coverage": 1, "risk": 1}
    answer_command = ["answer", "What is autism?", *common, "--index", "exact", "--abstain-below"]
    assert bookwheel(*answer_command, path, "--json").json["answers"][0]["abstained"] is False
    abstention = bookwheel(*answer_command, "1")
    assert "(the library does not hold it)" in abstention.out


@pytest.mark.parametrize(("temperature", "n_requests"), [("0", 3), ("0.7", 6)])
def test_endpoint_answers_are_reused_unless_sampled(
    temperature: str,
    n_requests: int,
    store: Path,
    questions: Path,
    bookwheel: Bookwheel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve_script(send(*ANSWER_EVENTS)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("BOOKWHEEL_LLM_TEMPERATURE", temperature)
        command = ["evaluate", "--store", store, "--model", "openai:tiny", "--questions", questions, "--json"]
        first, second = bookwheel(*command), bookwheel(*command)
    assert first.code == second.code == 0, first.err
    assert first.json["metrics"] == second.json["metrics"]
    assert len(server.bodies) == n_requests
    evaluation = first.json["evaluation"]
    assert f"evaluated {evaluation[:12]}: model openai:tiny, " in bookwheel("show", "--store", store).out
    assert "model     openai:tiny (sha256:" in bookwheel("show", f"evaluation:{evaluation}", "--store", store).out


def test_route_is_chosen_evaluated_and_applied(
    store: Path, questions: Path, tmp_path: Path, bookwheel: Bookwheel
) -> None:
    path, rows = tmp_path / "route.json", tmp_path / "rows.jsonl"
    common = ["--store", store, "--model", "reader", "--index", "exact"]
    command = ["evaluate", *common, "--questions", questions, "--reader", "auto", "--json"]
    choice = bookwheel(*command, "--choose-route", path, "--rows", rows, "--answers", "patterns")
    assert choice.code == 0, choice.err
    assert [row["condition"] for row in choice.json["ablations"]] == ["open book", "marginal, open book", "closed book"]
    routing = choice.json["routing"]
    # The tiny model is never right, so its weights are never the better source.
    assert (routing["answered_from_weights"], routing["reading_skipped"], routing["chosen"]) == (0, 0, True)
    assert choice.json["notes"][0].startswith("chosen route: passages answer every question: 0% of the questions")
    route = json.loads(path.read_text())
    assert (route["signal"], route["reader"], route["n"]) == ("weights", "marginal", 3)
    assert (route["evaluation"], route["model"]) == (choice.json["evaluation"], choice.json["model"])
    assert {json.loads(line)["memory"] for line in rows.read_text().splitlines()} <= {"passages", None}

    n_files = count_answer_files(store)
    for source in (path, f"evaluation:{choice.json['evaluation'][:20]}"):
        routed = bookwheel(*command, "--route", source, "--answers", "patterns").json
        assert routed["routing"] == {**routing, "chosen": False}
        answer = bookwheel("answer", "What is autism?", *common, "--reader", "auto", "--route", source)
        assert "  from passages:" in answer.out
    assert count_answer_files(store) == n_files  # both answers of each question are reused
    path.write_text(json.dumps({**route, "least": -99}))
    answer = bookwheel("answer", "What is autism?", *common, "--reader", "auto", "--route", path)
    assert "  from the model's weights, without passages" in answer.out
    default = bookwheel(*command)
    assert default.json["routing"]["route"] == {"signal": "difference", "least": 0, "model": "", "reader": ""}

    path.write_text(json.dumps({**route, "model": "another"}))
    mismatch = bookwheel("answer", "What is autism?", *common, "--reader", "auto", "--route", path)
    assert (mismatch.code, "chosen for a model other than" in mismatch.err) == (2, True)
    for options, reason in (
        (["--route", path], "give --reader auto too"),
        (["--choose-route", path], "give --reader auto too"),
        (["--reader", "auto", "--route", "evaluation:0000"], "evaluation"),
        (["--reader", "auto", "--route", tmp_path / "no"], "cannot be read"),
    ):
        mismatch = bookwheel("evaluate", *common, "--questions", questions, *options)
        assert (mismatch.code in (1, 2), reason in mismatch.err) == (True, True), mismatch.err
