"""Every function that takes a URL refuses one with a secret, and no error repeats the secret."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rag_model.corpus.dump_catalog import find_newest_dump
from rag_model.corpus.source import expand_pattern
from rag_model.encoders.files import resolve_folder
from rag_model.errors import UsageError
from rag_model.evaluation.questions import read_questions
from rag_model.secrets import HARMLESS_PARAMETERS, mask_secrets, refuse_secret, refuse_secrets
from rag_model.store.store import Store
from rag_model.training.data.examples import read_examples

S = "s3cret-9f"
URLS_WITH_USERS = [
    f"https://me:{S}@host/d.xml.bz2",
    f"https://{S}@host/d.xml.bz2",
    f"https://:{S}@host/d.xml.bz2",
    f"https://{S}:@host/d.xml.bz2",
    f"https://{S}:x-oauth-basic@github.com/a/b",
    f"http://me:{S}@host:80/d",
    f"HTTPS://me:{S}@host/d",
    f"  https://me:{S}@host/d",
    f"https://me%3A{S}%40host/d",
    f"https://me:{S}%40host/d",
    f"https://me:{S}/more@host/d",
    f"https://me:{S}::more@host/d",
    f"https://me:12::{S}@host/d",
    f"https://me: {S}@host/d",
    f"https:/me:{S}@host/d",
    f"https:\\\\me:{S}@host\\d",
    f"https:///me:{S}@host/d",
    f"https://me:{S}@host",
    f"https://me:{S}@[::1]:80/d",
    f"s3://AKIA:{S}@bucket/d",
    f"s3a://{S}@bucket/d",
    f"gs://{S}@bucket/d",
    f"abfs://container:{S}@account.dfs.core.windows.net/d",
    f"sftp://:{S}@host/d/*.bz2",
    f"ssh://me:{S}@host/d",
    f"ftp://me:{S}@host/d",
    f"hdfs://{S}@namenode:8020/d",
    f"smb://domain;me:{S}@host/d",
    f"webdav+https://me:{S}@host/d",
    f"hf://user:{S}@datasets/a/b",
    f"filecache::ftp://a:{S}@h/d.bz2",
    f"zip://a::https://u:{S}@h",
    f"zip://a.xml::simplecache::https://u:{S}@h/b.zip",
    f"zip://me:{S}@a::https://h/b.zip",
    f"memory://me:{S}@x",
    f"x https://me:{S}@host/d",
    f"https:/\t/me:{S}@host/d",
    f"ht\ntps://me:{S}@host/d",
    f"https:{S}@host/d",
]
URLS_WITH_QUERIES = [
    f"https://bucket.s3.amazonaws.com/d?X-Amz-Credential=me&X-Amz-Signature={S}&X-Amz-Expires=60",
    f"https://a.blob.core.windows.net/d/e?sv=2024&sig={S}",
    f"https://storage.googleapis.com/b/d?X-Goog-Signature={S}",
    f"simplecache::https://host/d.jsonl?access_token={S}",
    f"https://host/d?key={S}",
    f"https://host/d?code={S}",
    f"https://host/d?download=true&key={S}",
    f"https://host/d?k%65y={S}",
    f"https://host/d?KEY={S}",
    f"https://host/d?Download={S}",
    f"https://host/d?{S}",
    f"https://host?{S}",
    f"https://host/d?download=1;auth={S}",
    f"https://host/d?download=1?auth={S}",
    f"https://host/d#access_token={S}",
    f"https://host/d?download=1#{S}",
    f"https://host/d#download=1&token={S}",
    f"https://host/d;jsessionid={S}",
    f"https://host/d&token={S}",
    f"https://host/d?url=https://u:{S}@other",
    f"https://host/d?dl=1&dl={S}",
    f"zip://a::https://host/b.zip?rlkey={S}",
    f"s3://bucket/d?X-Amz-Signature={S}",
    f"s3://bucket/d?versionId=1&X-Amz-Security-Token={S}",
    f"abfs://container/d?sv=1&sig={S}",
    f"jupyter://host:8888/d?token={S}",
    f"hf://datasets/a/b?token={S}",
]
HARMLESS_URLS = [
    "s3://bucket/a:b@c/d",
    "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name/d",
    "s3://bucket/part-?.bz2",
    "s3://bucket/year=2026/part-?.bz2",
    "s3://bucket/a&b;c#d.bz2",
    "gs://bucket/part-[0-9]?.xml",
    "abfs://container/d",
    "http://h:80/a@b",
    "https://[::1]:80/d",
    "https://host/token=1/d.bz2?page=2",
    "https://huggingface.co/datasets/a/b/resolve/main/c.jsonl?download=true",
    "https://host/A&B.xml.bz2",
    "s3://bucket/d?versionId=abc",
    "zip://*.xml::https://host/b.zip?dl=1",
    "hf://datasets/user/name@main/d.jsonl",
    "memory://x",
    "file:///dumps/a:b@c?.bz2",
    "/a:b@c/d",
    "/a?token=b",
    "C:\\dumps\\a@b.bz2",
    "model:reader@3",
    "intfloat/e5-small-v2",
    "latest@3",
]


@pytest.mark.parametrize("url", URLS_WITH_USERS + URLS_WITH_QUERIES)
def test_a_url_that_may_contain_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(
        UsageError, match=r"may be a secret.*: leave it out, and set [A-Z].* in the environment"
    ) as error:
        refuse_secret(url)
    assert S not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", HARMLESS_URLS)
def test_harmless_urls_and_paths_are_accepted(url: str) -> None:
    refuse_secret(url)
    refuse_secrets([url])


@pytest.mark.parametrize(
    "function", [Store.open, expand_pattern, read_questions, read_examples, resolve_folder, find_newest_dump]
)
@pytest.mark.parametrize("url", [URLS_WITH_USERS[1], URLS_WITH_QUERIES[4], f"zip://a::https://u:{S}@h"])
def test_every_function_that_reads_a_url_refuses(function: Callable[[str], object], url: str) -> None:
    with pytest.raises(UsageError, match="may be a secret") as error:
        function(url)
    assert S not in str(error.value)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://k@b/d", "AWS_SECRET_ACCESS_KEY"),
        ("gs://k@b/d", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfs://k@b/d", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("https://k@b/d", "FSSPEC_HTTP="),
        ("hf://k@b/d", "HF_TOKEN"),
        ("sftp://k@b/d", "FSSPEC_SFTP "),
    ],
)
def test_the_error_names_the_variable_of_the_scheme(url: str, variable: str) -> None:
    with pytest.raises(UsageError, match=variable):
        refuse_secret(url)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [("x", f"https://{S}@h/x")]},
        f"rerank(bm25, https://me:{S}@host/model, 50)",
        f"--flink_master=http://me:{S}@flink:8081",
        f'--environment_config={{"url": "https://h/?key={S}"}}',
        {f"https://{S}@h": 1},
    ],
)
def test_a_url_inside_of_other_values_is_found(value: object) -> None:
    with pytest.raises(UsageError, match="may be a secret"):
        refuse_secrets(value)


def test_http_headers_of_the_environment_are_sent(tmp_path: Path) -> None:
    calls: list[str | None] = []

    class AnswerHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"who?\n")

        do_HEAD = do_GET  # noqa: N815 - the name that the server calls

        def log_message(self, *args: object) -> None:
            """Log no requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), AnswerHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = json.dumps({"client_kwargs": {"headers": {"Authorization": f"Bearer {S}"}}})
    code = f"from rag_model.corpus.source import *; print(*read_bytes('http://127.0.0.1:{server.server_port}/q.txt'))"
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            env={"FSSPEC_HTTP": settings, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert process.stdout == b"b'who?\\n'\n", process.stderr
    assert set(calls) == {f"Bearer {S}"}


def test_values_of_tokenizer_variables_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKWHEEL_LLM_TOKENIZER", "models/tokenizer.json")
    monkeypatch.setenv("SOME_TOKENS", "hush-hush")
    assert mask_secrets("models/tokenizer.json and hush-hush") == "models/tokenizer.json and ***"


def test_parameters_with_secrets_are_not_harmless() -> None:
    assert "versionId" in HARMLESS_PARAMETERS
    assert not {"key", "token", "sig", "code"} & HARMLESS_PARAMETERS


def test_keys_of_azure_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "AccountName=public;AccountKey=aGlkZGVu==;BlobEndpoint=https://host/public;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0==")
    masked_text = mask_secrets(f"{settings} | public signs with aGlkZGVu== or c2VjcmV0==")
    assert masked_text == "*** | public signs with *** or ***"


def test_a_variable_may_be_unset_while_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_TOKEN", "SECOND_TOKEN"):
        monkeypatch.setenv(name, f"value of {name}")
    names = re.compile("FIRST_TOKEN|SECOND_TOKEN")

    class UnsettingPattern:
        def search(self, name: str) -> re.Match[str] | None:
            if name == "FIRST_TOKEN":
                monkeypatch.delenv("SECOND_TOKEN")
            return names.fullmatch(name)

    monkeypatch.setattr("rag_model.secrets._SECRET_NAMES", UnsettingPattern())
    assert mask_secrets("value of FIRST_TOKEN.") == "***."
