"""The pages that list what the code has: environment variables, and the HTTP API with its fields and metrics."""

import ast
import re
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel

from rag_model.client import replies
from rag_model.encoders.endpoint_encoder import EMBED_PREFIX, EmbedSettings
from rag_model.endpoint import LLM_PREFIX
from rag_model.errors import UsageError
from rag_model.reading.writers.chat_settings import ChatSettings
from rag_model.serving.http import messages
from rag_model.serving.http.app import Problem
from rag_model.serving.settings import ServiceSettings
from tests.docs.blocks import DOCS, ROOT, read_exchanges

VARIABLE = re.compile(r"BOOKWHEEL_[A-Z_]*[A-Z]")

API = (DOCS / "http-api.md").read_text(encoding="utf-8")
METRICS = ROOT / "rag_model" / "serving" / "monitoring" / "metrics.py"
REQUESTS: list[type[BaseModel]] = [messages.SearchRequest, messages.RetrieveRequest, messages.AnswerRequest]
REPLIES = {
    "/search": messages.create_model(replies.SearchReply),
    "/retrieve": messages.RetrieveReply,
    "/answer": messages.create_model(replies.AnswerReply),
    "/snapshot": messages.create_model(replies.SnapshotReply),
    "Problem": Problem,
}


def rows_of(title: str) -> list[list[str]]:
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
    rows = rows_of(f"### {name}")
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
    assert [row[1] for row in rows_of("## Limits")] == [
        "; ".join(f"{value:,g}" if value < 1e5 else f"{value:,}" for value in row) for row in limits
    ]
    source = (ROOT / "rag_model" / "serving" / "http" / "app.py").read_text(encoding="utf-8")
    declared = re.search(r"for status in \(([\d, ]+)\)", source)
    assert declared is not None
    statuses = {*declared[1].split(", "), "200", "404", "405", "431"}  # the last three come before an endpoint
    assert [row[0] for row in rows_of("## Status codes")] == sorted(statuses)


def test_the_page_of_the_api_has_every_metric() -> None:
    source = METRICS.read_text(encoding="utf-8")
    found = re.findall(r'(counter\(|histogram\(|yield |Info\w*\(|Gauge\w*\()\s*"(?:bookwheel_)?([a-z_\d]+)"', source)
    endings = {"counter(": "_total", "InfoMetricFamily(": "_info"}
    names = sorted(f"`bookwheel_{name}{endings.get(kind, '')}`" for kind, name in found)
    assert len(names) > 30
    rows = rows_of("## Metrics")
    assert [row[0] for row in rows] == names
    meanings = source.replace('f"{text} ', '"Recall of sampled questions against exact search, ')
    assert [row for row in rows if f'"{row[3]}"' not in meanings] == []


def read_variables(page: str) -> dict[str, str]:
    """Return the rows of a page's tables by the environment variables in their first cell."""
    rows = re.findall(r"^\| (`BOOKWHEEL_.*?) \|(.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {variable: row for names, row in rows for variable in VARIABLE.findall(names)}


def test_the_page_of_the_install_has_every_variable_that_the_code_reads() -> None:
    used = set()
    for package in ("flows", "beam_jobs", "rag_model"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if "BOOKWHEEL_" in source:
                constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
                used |= {value for value in constants if isinstance(value, str) and VARIABLE.fullmatch(value)}
    assert {"BOOKWHEEL_CACHE", "BOOKWHEEL_CORES"} < used
    assert set(read_variables("howto/install.md")) == used - {"BOOKWHEEL_STORE"}  # an option


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
    known = {field.name for field in fields(settings)}
    assert set(variables.values()) <= known
    for name in known:
        try:
            type(settings).from_environment({f"{prefix}{name.upper()}": "?"})
        except UsageError:
            assert name in variables.values(), f"{page} lacks a variable that is read"
    for variable, name in variables.items():
        value = getattr(settings, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            assert f"{value:,g}" in rows[variable], variable
