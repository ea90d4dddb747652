import functools
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest

from rag_model.corpus.dump import read_pages
from rag_model.corpus.records import Plan
from rag_model.corpus.source import expand, read_bytes, size_of
from rag_model.errors import InputError


class _Handler(BaseHTTPRequestHandler):
    """Serves the files of a folder; byte ranges and sizes only if the server is of that kind."""

    def __init__(self, folder: Path, ranges: bool, *args: object) -> None:
        self.folder, self.ranges = folder, ranges
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.folder / unquote(self.path.lstrip("/"))
        if path.is_dir():
            body, status = (
                "".join(f'<a href="{one.name}">{one.name}</a>' for one in path.iterdir()).encode(),
                200,
            )
        elif path.exists():
            body, status = path.read_bytes(), 200
        else:
            body, status = b"", 404
        whole, span = len(body), self.headers["Range"]
        if span and self.ranges and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last or whole) + 1], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{whole}")
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    servers = []

    def start(*, ranges: bool) -> str:
        handler = functools.partial(_Handler, tmp_path, ranges)
        servers.append(server := ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
    fsspec.filesystem("http").clear_instance_cache()


def titles(plan: Plan) -> list[str]:
    return [page.title for part in plan.parts for page in read_pages(part)]


def test_dumps_are_read_over_http(tmp_path, make_multistream, small_dump, plan, serve) -> None:
    (tmp_path / "dumps").mkdir()
    make_multistream(tmp_path / "dumps", small_dump, files=2)
    expected = titles(plan(small_dump))
    assert titles(plan(f"{serve(ranges=True)}/dumps/*.bz2")) == expected


def test_a_server_without_ranges_serves_what_is_read_front_to_back(tmp_path, small_dump, plan, serve) -> None:
    (tmp_path / "x.xml.bz2").write_bytes(small_dump.read_bytes())
    assert titles(plan(f"{serve(ranges=False)}/x.xml.bz2")) == titles(plan(small_dump))


def test_a_server_without_sizes_is_one_sentence_where_they_are_needed(tmp_path, make_multistream, plan, serve) -> None:
    name = Path(make_multistream(tmp_path)).name
    with pytest.raises(InputError, match="does not tell its size: download the file"):
        plan(f"{serve(ranges=False)}/{name}")


def test_what_a_server_lacks_is_one_sentence(plan, serve) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*(names no file|cannot read)[^\n]*$"):
        plan(f"{serve(ranges=True)}/none.xml.bz2")


class TestS3:
    def test_dumps_are_read_from_a_bucket(self, tmp_path, make_multistream, small_dump, plan, s3_store_url) -> None:
        make_multistream(tmp_path, small_dump, files=2)
        bucket, _ = fsspec.url_to_fs(s3_store_url)
        for path in tmp_path.glob("*.bz2"):
            bucket.put_file(str(path), f"{s3_store_url}/{path.name}")
        assert titles(plan(f"{s3_store_url}/*.bz2")) == titles(plan(small_dump))


def test_files_come_in_the_order_of_their_numbers(tmp_path) -> None:
    for name in ("x10.xml", "x2.xml", "x1.xml", "y.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [url.rpartition("/")[2] for url in expand(f"{tmp_path}/x*.xml")] == ["x1.xml", "x2.xml", "x10.xml"]


def test_a_name_may_look_like_a_glob(tmp_path) -> None:
    (tmp_path / "x[1].xml").write_bytes(b"abc")
    (url,) = expand(str(tmp_path / "x[1].xml"))
    assert size_of(url) == 3
    assert b"".join(read_bytes(url, 1, 2)) == b"bc"


def test_a_file_that_became_shorter_is_one_sentence(tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(InputError, match="ends 7 bytes before byte 10: download it again"):
        list(read_bytes((tmp_path / "x").as_uri(), 0, 10))


def test_a_folder_or_a_file_that_may_not_be_read_is_one_sentence(tmp_path) -> None:
    with pytest.raises(InputError, match="names no file"):
        expand(str(tmp_path))
    with pytest.raises(InputError, match=r"cannot read .*: check that it exists"):
        list(read_bytes((tmp_path / "gone").as_uri()))
