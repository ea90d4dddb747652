"""The interface of the command line that scripts rely on: JSON keys, exit codes, settings and streams."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from flows.cli import app, handle_interrupts
from flows.verbs.show import format_difference
from rag_model.store.store import Store

VERBS = ["demo", "evaluate", "log", "pull", "reindex", "reproduce", "search", "show", "verify"]
QUESTIONS = [
    {"question": "Who wrote What is Property?", "answers": ["Proudhon"]},
    {"question": "What is autism?", "answers": ["disorder", "developmental"]},
    {"question": "Where is nothing?", "answers": ["qzx"]},
]


def test_escape_codes_are_not_printed_to_the_terminal(bookwheel: Any, library: Path) -> None:
    """Questions, titles and notes may contain escape codes; the output contains none."""
    result = bookwheel("search", "What is \x1b[2Jautism?\x9b2J", "--store", library)
    assert result.code == 0
    assert "What is \\u001b[2Jautism?\\u009b2J" in result.out
    error = bookwheel("show", "\x1b[2J", "--store", library)
    assert error.code != 0
    assert "\x1b" not in result.out + error.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_every_option_has_help(verb: str, bookwheel: Any) -> None:
    result = bookwheel(verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert "--json" in result.out
    assert "--debug" in result.out
    for argument in app[verb].assemble_argument_collection(parse_docstring=True):
        assert argument.parameter.help or not argument.parameter.show, f"{verb} {argument.name} has no help"


@pytest.mark.parametrize(
    ("verb", "flow", "omitted"),
    [
        ("reindex", "reindex:reindex", {"base"}),
        ("release", "release:release", {"settings", "acceptance", "rebuild_graphs"}),
        ("add-index", "add_index:add_index", set()),
        ("import", "import_library:import_library", {"beam_options"}),
        ("takedown", "takedown:takedown", {"pages", "beam_options"}),
        ("finetune", "finetune:finetune", set()),
    ],
)
def test_command_takes_the_parameters_of_its_flow(verb: str, flow: str, omitted: set[str]) -> None:
    module, _, name = flow.partition(":")
    parameters = signature(getattr(import_module(f"flows.{module}"), name).fn).parameters
    collection = app[verb].assemble_argument_collection(parse_docstring=True)
    arguments = {argument.field_info.name: argument for argument in collection}
    expected = {*parameters} - omitted
    assert expected <= {*arguments}
    assert all(arguments[name].parameter.help for name in expected)


@pytest.mark.parametrize(("arguments", "parameter"), [(("search", "a"), "--store"), (("pull", "latest"), "DEST")])
def test_missing_parameter_is_named(arguments: tuple[str, ...], parameter: str, bookwheel: Any) -> None:
    result, verb = bookwheel(*arguments), arguments[0]
    assert result.code == 2
    assert result.err == f"bookwheel: {verb} needs {parameter}: `bookwheel {verb} --help` describes it.\n"


def test_value_with_a_leading_dash_needs_an_equals_sign(bookwheel: Any) -> None:
    result = bookwheel("gc", "--grace", "-1h", "--store", "nowhere")
    assert (result.code, result.err.endswith("Write a value that begins with `-` as --grace=VALUE.\n")) == (2, True)


def test_help_and_version(bookwheel: Any) -> None:
    result = bookwheel("--help")
    assert result.code == 0
    assert all(verb in result.out for verb in VERBS)
    assert "Exit codes: 0 ok, 1 failure, 2 usage, 3" in result.out
    assert bookwheel("--version").out.strip()[0].isdigit()


def test_missing_module_of_a_verb_is_named() -> None:
    program = "import sys; sys.modules['faiss'] = None; from flows.cli import run; sys.exit(run(['search', 'x']))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("bookwheel: faiss is not installed: install bookwheel again, with the extras ")


def test_module_runs_as_a_command() -> None:
    result = subprocess.run([sys.executable, "-m", "flows.cli", "serch"], capture_output=True, text=True, check=False)
    assert (result.returncode, "'serch': did you mean 'search'?" in result.stderr) == (2, True)


def test_reindex_reply_has_documented_keys(library_build: Any) -> None:
    reply = library_build.reply
    assert {"snapshot", "ref", "counts", "metrics"} <= reply.keys()
    assert {"articles", "passages", "embedded", "reused", "dropped"} <= reply["counts"].keys()
    assert len(reply["snapshot"]) == 64
    assert reply["ref"] == "latest"


def test_search_reply_has_documented_keys(library: Path, bookwheel: Any) -> None:
    search_result = bookwheel("search", "Who wrote it?", "What is it?", "-k", 3, "--store", library, "--json")
    assert (search_result.code, search_result.err) == (0, "")
    reply = search_result.json
    assert {"snapshot", "results"} <= reply.keys()
    assert [result["question"] for result in reply["results"]] == ["Who wrote it?", "What is it?"]
    for result in reply["results"]:
        assert [hit["rank"] for hit in result["hits"]] == [1, 2, 3]
        scores = [hit["score"] for hit in result["hits"]]
        assert scores == sorted(scores, reverse=True)
        for hit in result["hits"]:
            assert {"rank", "score", "id", "page_id", "title", "text", "url", "licence"} <= hit.keys()
            assert "oldid=" in hit["url"]
            assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", hit["revised"])
            assert "CC BY-SA" in hit["licence"]


def test_all_indexes_return_the_same_hits_in_a_small_corpus(library: Path, bookwheel: Any) -> None:
    def search_ids(retriever: str) -> list[str]:
        reply = bookwheel("search", "Who wrote it?", "--retriever", retriever, "--store", library, "--json").json
        return [hit["id"] for hit in reply["results"][0]["hits"]]

    assert search_ids("hnsw(efSearch=200)") == search_ids("exact")


def test_evaluate_writes_metrics_and_files(library: Path, questions: Path, tmp_path: Path, bookwheel: Any) -> None:
    trec, dpr, rows = tmp_path / "run.trec", tmp_path / "dpr.json", tmp_path / "rows.jsonl"
    file_options = ["--trec", trec, "--dpr", dpr, "--rows", rows]
    result = bookwheel("evaluate", "--questions", questions, "-k", 20, "--store", library, "--json", *file_options)
    assert result.code == 0, result.err
    reply = result.json
    assert {"snapshot", "n", "metrics"} <= reply.keys()
    assert reply["n"] == 3
    assert list(reply["metrics"]) == ["Success@1", "Success@5", "Success@20"]
    assert sorted(reply["metrics"].values()) == list(reply["metrics"].values())
    assert reply["metrics"]["Success@20"] <= 2 / 3  # no passage answers the third question

    fields = [line.split() for line in trec.read_text().splitlines()]
    assert len(fields) == 60
    assert {len(line) for line in fields} == {6}
    assert [line[1] for line in fields] == ["Q0"] * 60
    dpr_entries = json.loads(dpr.read_text())
    assert [entry["question"] for entry in dpr_entries] == [question["question"] for question in QUESTIONS]
    assert dpr_entries[0].keys() >= {"question", "answers", "ctxs"}
    assert dpr_entries[0]["ctxs"][0].keys() >= {"id", "title", "text", "score", "has_answer"}
    assert len(rows.read_text().splitlines()) == 3


def test_log_lists_moves(library: Path, bookwheel: Any) -> None:
    (move,) = bookwheel("log", "--store", library, "--json").json
    assert {"number", "snapshot", "created_at"} <= move.keys()
    assert bookwheel("log", "--ref", "nightly", "--store", library, "--json").json == []


def test_show_prints_the_manifest_for_any_name_of_a_snapshot(library: Path, bookwheel: Any) -> None:
    (move,) = bookwheel("log", "--store", library, "--json").json
    names = ["latest", "latest@1", move["snapshot"], move["snapshot"][:8]]
    manifests = [bookwheel("show", name, "--store", library, "--json").json for name in names]
    assert all(manifest == manifests[0] for manifest in manifests)
    assert {"content", "metrics", "parents", "provenance"} <= manifests[0].keys()
    assert bookwheel("show", "--store", library, "--json").json == manifests[0]
    text = bookwheel("show", "--store", library).out
    assert move["snapshot"] in text
    assert not re.search(r"\{|'|None|True|False", text), "values are not printed in Python's notation"
    assert re.search(r"search=\(efSearch=[0-9]+\)", text)
    assert "\nrecipe    [index.hnsw] factory=HNSW8, " in text
    k = min(20, manifests[0]["content"]["indexes"]["hnsw"]["n"])
    assert f"\nmeasured  hnsw: recall@{k} " in text
    assert f"\nmeaning   recall@{k}_p5: the same for the worst 5 % of these queries" in text


@pytest.mark.parametrize(
    ("name", "old_value", "new_value", "line"),
    [
        ("indexes.hnsw.n", 12_000, 13_000, "index     hnsw: 12,000 -> 13,000 passages"),
        ("indexes.hnsw.d", 384, 768, "index     hnsw: 384 -> 768 dimensions"),
        ("indexes.hnsw.search.efSearch", 64, 128, "index     hnsw: search.efSearch 64 -> 128"),
        ("indexes.hnsw", {"n": 3, "trained": {"loss": 1}}, None, "index     hnsw: removed, n=3"),
        ("corpus.newest_revision", "2026-10-01", "2026-11-01", "corpus    newest_revision: 2026-10-01 -> 2026-11-01"),
        ("recipe.chunk.words", 100, 120, "setting   recipe.chunk.words: 100 -> 120"),
        ("retriever", "hnsw", "rrf(hnsw, bm25)", "setting   retriever: hnsw -> rrf(hnsw, bm25)"),
        ("indexes.hnsw.trained.losses", {}, {"a": 1.0}, ""),
    ],
)
def test_diff_formats_settings_and_index_changes(name: str, old_value: object, new_value: object, line: str) -> None:
    assert "\n".join(format_difference(name, old_value, new_value)) == line


def test_second_pull_fetches_nothing(library: Path, tmp_path: Path, bookwheel: Any) -> None:
    pulled = bookwheel("pull", "latest", tmp_path / "here", "--store", library, "--json").json
    assert pulled.keys() >= {"snapshot", "path", "fetched_bytes", "reused_bytes"}
    assert Path(pulled["path"]).is_dir()
    assert pulled["fetched_bytes"] > 0
    second = bookwheel("pull", "latest", tmp_path / "here", "--store", library, "--json").json
    assert second["fetched_bytes"] == 0
    assert second["reused_bytes"] == pulled["fetched_bytes"] + pulled["reused_bytes"]


def test_verify_names_the_damaged_file(library: Path, tmp_path: Path, bookwheel: Any) -> None:
    store = Path(shutil.copytree(library, tmp_path / "store"))
    snapshot = bookwheel("log", "--store", store, "--json").json[0]["snapshot"]
    report = {"ok": True, "snapshot": snapshot, "signed": "not signed", "problems": []}
    assert bookwheel("verify", "--store", store, "--json").json == report
    files = bookwheel("show", "--store", store, "--json").json["content"]["files"]
    (blob,) = (store / "blobs").rglob(files["index/hnsw.faiss"]["id"].removeprefix("sha256:"))
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    result = bookwheel("verify", "--store", store, "--json")
    assert result.code == 3
    assert not result.json["ok"]
    assert {problem["blob"] for problem in result.json["problems"]} == {f"sha256:{blob.name}"}
    assert f"index/hnsw.faiss ({blob.relative_to(store)}): " in result.err
    assert result.err.startswith("bookwheel: ")
    assert result.err.count("\n") == 1


def test_flags_override_environment_and_settings_file(
    library: Path, tmp_path: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_hits(*flags: object) -> int:
        result = bookwheel("search", "Who?", *flags, "--json")
        assert result.code == 0, result.err
        return len(result.json["results"][0]["hits"])

    subfolder = tmp_path / "subfolder"
    subfolder.mkdir()
    monkeypatch.chdir(subfolder)
    assert count_hits("--store", library) == 5
    (tmp_path / "bookwheel.toml").write_text(f'store = "{library}"\nk = 1\nencoder_cache = "unknown to search"\n')
    assert count_hits() == 1
    monkeypatch.setenv("BOOKWHEEL_K", "2")
    assert count_hits() == 2
    assert count_hits("-k", 3) == 3
    monkeypatch.setenv("BOOKWHEEL_STORE", str(tmp_path / "none"))
    assert bookwheel("search", "Who?").code == 1
    assert count_hits("--store", library) == 2
    monkeypatch.setenv("BOOKWHEEL_YES", "1")  # only a flag allows a deletion
    assert "give --yes" in bookwheel("gc", "--store", library, "--grace", "0").out
    assert "BOOKWHEEL_YES" not in bookwheel("gc", "--help").out
    assert "BOOKWHEEL_REF" not in bookwheel("tag", "--help").out
    assert "BOOKWHEEL_REF" in bookwheel("log", "--help").out


def test_variables_of_a_service_neither_move_nor_expire_refs(
    store: Path, tmp_path: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are those of a container that serves `latest`."""
    refs = Store.open(str(store)).refs
    snapshot = refs.read_history("latest")[-1].snapshot
    for number in range(1, 5):
        refs.move("latest", snapshot, number, note=f"move {number}")
    moves = refs.read_history("latest")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text("keep = 1\n")
    for name, value in (("REF", "latest"), ("KEEP", "1"), ("CACHE_BYTES", "20000000")):
        monkeypatch.setenv(f"BOOKWHEEL_{name}", value)
    assert bookwheel("tag", snapshot, "--store", store).code == 2
    assert bookwheel("rollback", "--store", store).code == 2
    assert bookwheel("tag", snapshot, "other", "--store", store).code == 0
    assert bookwheel("tag", "--delete", "other", "--yes", "--store", store).code == 0
    assert bookwheel("expire", "--older-than", "0", "--store", store, "--yes").code == 0
    assert refs.read_history("latest") == moves
    assert "--cache-bytes" not in bookwheel("serve", "--folder", tmp_path / "none", "--port", "0").err


def test_invalid_settings_file_fails_with_one_sentence(
    library: Path, tmp_path: Path, bookwheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bookwheel.toml").write_text("store = \n")
    result = bookwheel("log", "--store", library)
    assert result.code == 2
    assert "bookwheel.toml" in result.complaint


def test_options_after_two_dashes_reach_beam(tmp_path: Path, reindex: Any) -> None:
    result = reindex(tmp_path, beam=["--runner=NoSuchRunner"])
    assert result.code in (1, 2)
    assert "NoSuchRunner" in result.complaint


@pytest.mark.parametrize(
    ("dump", "options", "message"),
    [
        ("dump.jsonl", ["1m"], "--every follows a wiki, and dump.jsonl is not a wiki's address"),
        ("mediawiki+https://127.0.0.1:1/", ["0"], "--every is '0', too short a pause for a wiki"),
        ("mediawiki+https://127.0.0.1:1/", ["soon"], "'soon' is not a length of time"),
        ("mediawiki+https://127.0.0.1:1/", ["1m", "--dry-run"], "leave out --dry-run"),
    ],
)
def test_every_needs_a_wiki_and_a_sufficient_interval(
    dump: str, options: list[str], message: str, tmp_path: Path, bookwheel: Any
) -> None:
    result = bookwheel("reindex", "--dump", dump, "--store", tmp_path, "--every", *options)
    assert result.code == 2
    assert message in result.complaint


@pytest.mark.parametrize("word", ["--rnner=FlinkRunner", "stray.xml.bz2"])
def test_unknown_option_or_argument_is_rejected(word: str, tmp_path: Path, bookwheel: Any, mini_dump: Path) -> None:
    result = bookwheel("reindex", "--dump", mini_dump, "--store", tmp_path, word)
    assert result.code == 2
    assert word.partition("=")[0] in result.complaint
    assert not list(tmp_path.iterdir())


def test_structures_need_a_wiki_and_known_names(tmp_path: Path, bookwheel: Any, mini_dump: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"id": "1", "title": "One", "text": "Some words."}\n')
    for dump, names, message in (
        (mini_dump, "tables,infobox", ""),
        (mini_dump, "tables,boxes", "structures has the unknown value 'boxes': choose from tables, infobox, lists"),
        (tmp_path / "d.jsonl", "tables,lists", "has no pages of a wiki, so no lists or tables can be found in it"),
    ):
        options = ("--dump", dump, "--store", tmp_path / "store", "--dry-run", "--structures", names)
        result = bookwheel("reindex", *options, "--structures", "lists")
        assert result.code == (2 if message else 0), result.err
        assert message in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("pull", "latest", "s3://a:sekret@b/x", "--store", "nowhere"),
        ("export", "latest", "s3://a:sekret@b/x", "--store", "nowhere"),
        ("index", "https://a/b.npy?key=sekret", "out.faiss"),
    ],
)
def test_url_in_place_of_a_local_path_is_rejected(arguments: tuple[str, ...], bookwheel: Any) -> None:
    result = bookwheel(*arguments)
    assert result.code == 2
    assert "a URL was given instead of a local path" in result.complaint
    assert "sekret" not in result.err


def test_process_reads_stdin_and_writes_only_json(library: Path, command: Callable[..., Any]) -> None:
    questions = "Who wrote it?\nWhat is it?\n"
    result = command("search", "--questions", "-", "--store", library, "--json", stdin=questions)
    assert (result.code, result.err) == (0, "")
    assert [row["question"] for row in result.json["results"]] == questions.splitlines()


def test_closed_output_pipe_is_no_error(library: Path, executable: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [executable, "show", "--json", "--store", library], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("search", "a", "--store", "nowhere"), 1, "there is no bookwheel store"),
        (("search", "a"), 2, "search needs --store"),
        (("reindex", "--dump", "", "--store", "x"), 2, 'value "" for --dump. Give a value, or omit'),
        (("rollback", "latest", "1", "--store", "nowhere"), 2, "rollback takes no argument '1'"),
    ],
)
def test_failure_with_json_prints_one_document(
    arguments: tuple[str, ...], code: int, message: str, bookwheel: Any
) -> None:
    result = bookwheel(*arguments, "--json")
    assert result.code == result.json["exit_code"] == code
    assert result.json["error"] == result.complaint
    assert message in result.complaint
    assert not bookwheel(*arguments).out


def test_debug_prints_the_traceback(library: Path, bookwheel: Any) -> None:
    result = bookwheel("show", "nothing", "--debug", "--store", library)
    assert result.code == 1
    assert "Traceback" in result.err


def test_interrupt_is_raised_after_a_task_ignores_cancellation() -> None:
    async def ignore_cancellation() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        asyncio.run(ignore_cancellation())
