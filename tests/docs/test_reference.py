"""Pages list the environment variables, messages, estimates, and HTTP fields and metrics that the code has."""

import ast
import functools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from flows import cli
from rag_model.client import replies
from rag_model.encoders.endpoint_encoder import EMBED_PREFIX, EmbedSettings
from rag_model.endpoint import LLM_PREFIX
from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import CollapseStats
from rag_model.evaluation.questions import read_questions
from rag_model.reading.writers.chat_settings import ChatSettings
from rag_model.serving.http import messages
from rag_model.serving.http.app import Problem
from rag_model.serving.monitoring.metrics import ScrapeState, ServiceMetrics
from rag_model.serving.monitoring.observer import Refusal
from rag_model.serving.monitoring.probes import ProbeMetrics
from rag_model.serving.monitoring.quality import QualityMetrics
from rag_model.serving.settings import ServiceSettings
from rag_model.store.store import Store
from rag_model.store.versions.build_history import Trend
from rag_model.training.data.examples import read_examples
from rag_model.training.objectives.objective import list_objectives
from tests.docs.blocks import DOCS, ROOT, read_blocks, read_exchanges
from tests.docs.shell import Shell
from tests.fixtures.serving import QUICK, run_service
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_rag import save_tiny_rag
from tests.fixtures.tiny_snapshot import publish_tiny

VARIABLE = re.compile(r"BOOKWHEEL_[A-Z_]*[A-Z]")

API = (DOCS / "http-api.md").read_text(encoding="utf-8")
ERRORS = DOCS / "howto" / "troubleshoot.md"
REQUESTS: list[type[BaseModel]] = [messages.SearchRequest, messages.RetrieveRequest, messages.AnswerRequest]
REPLIES = {
    "/search": messages.create_model(replies.SearchReply),
    "/retrieve": messages.RetrieveReply,
    "/answer": messages.create_model(replies.AnswerReply),
    "/snapshot": messages.create_model(replies.SnapshotReply),
    "Problem": Problem,
}


@functools.cache
def read_texts() -> frozenset[str]:
    """Return all strings of the code; … replaces the values of an f-string."""
    texts = set()
    for package in ("flows", "beam_jobs", "rag_model"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
                elif isinstance(node, ast.JoinedStr):
                    pieces = [piece.value if isinstance(piece, ast.Constant) else "…" for piece in node.values]
                    texts.add("".join(map(str, pieces)))
    return frozenset(texts)


def read_messages() -> list[str]:
    """Return the error messages on the page of errors; … means any text."""
    rows = re.findall(r"^\| (?:\d{3}, )?(``.+?``|`.+?`)[ ,]", ERRORS.read_text(encoding="utf-8"), re.MULTILINE)
    return [row.strip("`").rstrip("… ") if row.startswith("``") else row[1:-1] for row in rows]


def read_rows(title: str) -> list[list[str]]:
    """Return the cells of the first table below a title of the page."""
    section = re.split(rf"^{title}\n", API, flags=re.MULTILINE)[1]
    table = re.search(r"^\| --- .*\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    return [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in table[1].splitlines()]


def read_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every object of the API."""
    schemas: dict[str, dict[str, Any]] = {}
    for model in (*REQUESTS, *REPLIES.values()):
        schema = model.model_json_schema(mode="validation" if model in REQUESTS else "serialization")
        schemas |= {model.__name__: schema, **schema.get("$defs", {})}
    return {name: schema for name, schema in schemas.items() if name != "Problem"}


def describe_type(schema: dict[str, Any], *, is_required: bool) -> str:
    if "anyOf" in schema:
        names = [describe_type(choice, is_required=True) for choice in schema["anyOf"]]
        text = " or ".join(name for name in names if is_required or name != "null")
    elif "$ref" in schema:
        text = schema["$ref"].rpartition("/")[2]
    elif schema["type"] == "array":
        text = f"list of {describe_type(schema['items'], is_required=True)}"
    else:
        text = schema["type"]
    return text if is_required else f"{text}, optional"


@pytest.mark.parametrize("name", sorted(read_schemas()))
def test_the_page_of_the_api_has_every_field(name: str) -> None:
    schemas = read_schemas()
    inherited = schemas["Hit"]["properties"] if name == "ReadPassage" else {}
    fields = {
        f"`{field}`": (describe_type(schema, is_required=field in schemas[name].get("required", [])), schema)
        for field, schema in schemas[name]["properties"].items()
        if field not in inherited
    }
    rows = read_rows(f"### {name}")
    assert [row[0] for row in rows] == list(fields)
    for field, type_name, meaning in rows:
        expected, schema = fields[field]
        assert type_name == expected or (name, field) == ("RetrieveReply", "`result`")  # four types of lists
        assert meaning
        assert meaning.replace("\\|", "|") == schema.get("description", meaning.replace("\\|", "|"))


def test_examples_on_the_page_of_the_api_are_valid() -> None:
    exchanges = read_exchanges()
    for model, path in zip(REQUESTS, ("/search", "/retrieve", "/answer"), strict=True):
        model.model_validate(exchanges[path][0])
    for path, reply_model in REPLIES.items():
        reply_model.model_validate(exchanges[path][1])


def test_the_page_of_the_api_has_the_limits_and_the_statuses() -> None:
    defaults = ServiceSettings()
    limits = [
        (defaults.max_questions,),
        (defaults.max_queries,),
        (defaults.max_question_chars,),
        (defaults.max_k,),
        (defaults.max_retrieved,),
        (defaults.max_depth,),
        (defaults.max_body_bytes, defaults.max_retrieve_body_bytes),
        (defaults.body_seconds,),
        (defaults.request_seconds,),
        (defaults.connections, defaults.connections_per_client),
        (defaults.queue_questions, defaults.queue_answers),
    ]
    assert [row[1] for row in read_rows("## Limits")] == [
        "; ".join(f"{value:,g}" if value < 1e5 else f"{value:,}" for value in row) for row in limits
    ]
    source = (ROOT / "rag_model" / "serving" / "http" / "app.py").read_text(encoding="utf-8")
    declared = re.search(r"for status in \(([\d, ]+)\)", source)
    assert declared is not None
    statuses = {*declared[1].split(", "), "200", "404", "405", "431"}  # the last three come before an endpoint
    assert [row[0] for row in read_rows("## Status codes")] == sorted(statuses)


def test_the_page_of_the_api_has_every_metric(tmp_path: Path) -> None:
    """The metrics are those of a running service, and those of states that it reaches after days or after a fault."""
    encoder, store = save_bert(tmp_path / "encoder"), Store.open(str(tmp_path / "store"), create=True)
    publish_tiny(store, encoder, {f"river {n}": f"It is {n} miles long." for n in range(9)}, tmp_path)
    model, metrics = save_tiny_rag(tmp_path / "model", encoder), ServiceMetrics(QUICK)
    with run_service(store.url, tmp_path / "dest", QUICK, metrics, model=str(model)) as service:
        assert service.client.post("/answer", json={"questions": ["how long?"]}).status_code == 200
        service.search("how long?")
        scrape = service.client.get("/metrics").text
    assert metrics.served_snapshot is not None
    trends = (Trend("recall", "hnsw", 1.0, 1.0),)
    served_snapshot = replace(metrics.served_snapshot, created=0.0, recall_mean=1.0, recall_p5=1.0, trends=trends)
    refusal = Refusal("latest", 1, "a" * 64, "", "", 1, final=False)
    quality = QualityMetrics({"search": CollapseStats(1, 1.0, 1, 0.0)}, 1.0, 1.0, 1.0)
    state = ScrapeState(0.0, served_snapshot, refusal, 0.0, quality, ProbeMetrics(1.0, 0.0))
    families = {}
    for family in [*text_string_to_metric_families(scrape), *state.iter_metrics()]:
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        kind = family.type.replace("info", "gauge")
        if family.name.startswith("bookwheel_") and not family.name.endswith("_created"):
            families[f"`{family.name}{ending}`"] = kind, labels, family.documentation
    assert len(families) > 30
    rows = {row[0]: row[1:] for row in read_rows("## Metrics")}
    assert list(rows) == sorted([*families, "`bookwheel_workers`"])  # only if there are several processes
    for name, (kind, labels, documentation) in families.items():
        assert [rows[name][0], rows[name][2]] == [kind, documentation]
        assert set(re.findall(r"\w+", rows[name][1])) == labels or name == "`bookwheel_tokens_total`", name


def read_variables(page: str) -> dict[str, str]:
    """Return the rows of a page's tables by the environment variables in their first cell."""
    rows = re.findall(r"^\| (`BOOKWHEEL_.*?) \|(.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {variable: row for names, row in rows for variable in VARIABLE.findall(names)}


def test_the_page_of_the_install_has_every_variable_that_the_code_reads() -> None:
    variables = {text for text in read_texts() if VARIABLE.fullmatch(text)}
    assert {"BOOKWHEEL_CACHE", "BOOKWHEEL_CORES"} < variables
    assert set(read_variables("howto/install.md")) == variables - {"BOOKWHEEL_STORE"}  # the page of options has it


@pytest.mark.parametrize(
    ("page", "prefix", "settings"),
    [
        ("howto/llm.md", LLM_PREFIX, ChatSettings()),
        ("howto/endpoint-encoders.md", EMBED_PREFIX, EmbedSettings()),
    ],
)
def test_the_pages_of_endpoints_have_their_variables_with_defaults(page: str, prefix: str, settings: Any) -> None:
    rows = read_variables(page)
    assert {f"{prefix}BASE_URL", f"{prefix}API_KEY"} <= set(rows)
    variables = {name: name.removeprefix(prefix).lower() for name in rows if not name.endswith(("_URL", "_API_KEY"))}
    names = {field.name for field in fields(settings)}
    assert set(variables.values()) <= names
    for name in names:
        try:
            type(settings).from_environment({f"{prefix}{name.upper()}": "?"})
        except UsageError:
            assert name in variables.values(), f"{page} lacks a variable that is read"
    for variable, name in variables.items():
        value = getattr(settings, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            assert f"{value:,g}" in rows[variable], variable


def test_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    messages_of_page = read_messages()
    assert len(messages_of_page) > 35
    parts = {part.strip() for message in messages_of_page for part in message.split("…")}
    code = "\n".join(read_texts())
    assert [part for part in parts if part not in code] == []
    assert [message for message in messages_of_page if max(map(len, message.split("…"))) < 8] == []


@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("log --store libary", 1),
        ("search who --store library --ref lates", 1),
        ("search who --store library --ref latest@9", 1),
        ("search who --store library --index hnws", 2),
        ("search who", 2),
        ("search who --store library -k 9000", 2),
        ("search who --store library --question-encoder other", 3),
        ("reindex --dump absent.xml.bz2 --store library", 1),
        ("reindex --dump absent.xml.bz2 --store library --encoder absent", 1),
        ("evaluate --store library --questions broken.jsonl", 1),
        ("index --plan --n 21015324 -d 768 --memory 1GB", 1),
        ("log --store s3://user:secret@bucket/library", 2),
    ],
)
def test_an_error_has_its_message_and_its_exit_code(
    command: str, code: int, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    (shell.folder / "broken.jsonl").write_text('{"question": "a"')
    if "other" in command:
        save_bert(shell.folder / "other", seed=2)
    assert cli.run(command.split()) == code
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bookwheel: ")]
    patterns = [".*".join(map(re.escape, message.split("…"))) for message in read_messages()]
    assert any(re.match(pattern, error.removeprefix("bookwheel: ")) for pattern in patterns), error


def test_the_page_of_builds_has_the_estimates_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "howto" / "build.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for factory, dim, estimates in rows:
        words = ["index", "--plan", "--n", "21015324", "-d", dim, "--memory", "256GB", "--index", factory]
        assert cli.run(words) == 0
        plan = capsys.readouterr().out
        pattern = (
            r"memory +(.+) to build, (.+) to search\ndisk +(.+) for the index, .*; (.+) while[^|]+\ntime +([\d.]+) "
        )
        (printed,) = re.findall(pattern, plan)
        assert " | ".join(printed) == estimates


def read_example(name: str, folder: Path, page: str) -> Path:
    (block,) = [block for block in read_blocks(DOCS / "howto" / page) if (block.mark, block.note) == ("file", name)]
    (folder / name).write_text(block.text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize(
    ("name", "n_positives", "n_negatives", "pages"),
    [
        ("dpr.jsonl", 1, 1, ()),
        ("triples.jsonl", 1, 0, ()),
        ("kilt.jsonl", 0, 0, ("11512",)),
        ("questions.jsonl", 0, 0, ()),
    ],
)
def test_examples_on_the_page_of_training_are_read(
    name: str, n_positives: int, n_negatives: int, pages: tuple[str, ...], tmp_path: Path
) -> None:
    (example,) = read_examples(read_example(name, tmp_path, "train.md"))
    assert (example.question, example.answers[:1]) == ("Who wrote Faust?", ("Goethe",))
    assert (len(example.positives), len(example.negatives), example.pages) == (n_positives, n_negatives, pages)


def test_the_page_of_training_says_which_objective_needs_examples() -> None:
    page = (DOCS / "howto" / "train.md").read_text(encoding="utf-8")
    needs = page.partition("| objective | needs |")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in needs.splitlines()]
    for objective in list_objectives():
        (need,) = [row[1] for row in rows if f"`{objective.name}`" in row[0]]
        assert (need == "no files") == (not objective.takes_examples)


def test_questions_on_the_page_of_searching_are_read(tmp_path: Path) -> None:
    first, second = read_questions(read_example("all-fields.jsonl", tmp_path, "search.md")).questions
    assert (first.passages, first.source, first.answers) == (("12:0",), "nq", ("Proudhon",))
    assert (second.text, second.answers, second.evidence) == ("Who wrote Faust?", ("Goethe",), (frozenset({"11512"}),))
