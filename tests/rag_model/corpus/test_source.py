import bz2
import errno
import gzip
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import aiohttp
import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from rag_model.corpus import source as source_module
from rag_model.corpus.bzip2 import UnusualStreamError, decode_streams
from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.records import Compression, Plan, Slice
from rag_model.corpus.source import (
    _build_read_error,
    decode,
    expand_pattern,
    file_exists,
    get_size,
    is_compressed,
    read_bytes,
    read_slice,
    split_lines,
)
from rag_model.errors import InputError, UnreachableError
from tests.fixtures.work_counters import measure_peaks


class _Handler(BaseHTTPRequestHandler):
    """Serve the files of a folder; with `ranges`, sizes and byte ranges are sent."""

    def __init__(self, folder: Path, ranges: bool, *args: object) -> None:
        self.folder, self.ranges = folder, ranges
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.folder / unquote(self.path.lstrip("/"))
        if path.is_dir():
            body, status = ("".join(f'<a href="{path.name}">{path.name}</a>' for path in path.iterdir()).encode(), 200)
        elif path.exists():
            body, status = path.read_bytes(), 200
        else:
            body, status = b"", 404
        file_bytes, span = len(body), self.headers["Range"]
        if span and self.ranges and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last or file_bytes) + 1], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{file_bytes}")
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
        handler = partial(_Handler, tmp_path, ranges)
        servers.append(server := ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
    fsspec.filesystem("http").clear_instance_cache()


def read_titles(plan: Plan) -> list[str]:
    return [page.title for part in plan.parts for page in MEDIAWIKI.read(part)]


def test_dumps_are_read_over_http(tmp_path, make_multistream, small_dump, plan, serve) -> None:
    (tmp_path / "dumps").mkdir()
    make_multistream(tmp_path / "dumps", small_dump, files=2)
    expected = read_titles(plan(small_dump))
    assert read_titles(plan(f"{serve(ranges=True)}/dumps/*.bz2")) == expected


def test_single_file_is_read_from_a_server_without_ranges(tmp_path, small_dump, plan, serve) -> None:
    (tmp_path / "x.xml.bz2").write_bytes(small_dump.read_bytes())
    assert read_titles(plan(f"{serve(ranges=False)}/x.xml.bz2")) == read_titles(plan(small_dump))


def test_missing_file_size_is_reported(tmp_path, make_multistream, plan, serve) -> None:
    name = Path(make_multistream(tmp_path)).name
    with pytest.raises(InputError, match="does not report the file's size: download the file"):
        plan(f"{serve(ranges=False)}/{name}")


def test_missing_file_on_a_server_is_reported(plan, serve) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*(no file matches|cannot read)[^\n]*$"):
        plan(f"{serve(ranges=True)}/none.xml.bz2")


@pytest.mark.parametrize("file_name", ["x.xml.bz2", "*.bz2"])
def test_unreachable_host_is_not_reported_as_a_missing_file(file_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused_server:
        url = f"http://127.0.0.1:{unused_server.getsockname()[1]}/{file_name}"
    with pytest.raises(UnreachableError, match=r"^cannot read .*\(Cannot connect to host .*try again$"):
        expand_pattern(url)


def test_dumps_are_read_from_a_bucket(tmp_path, make_multistream, small_dump, plan, s3_store_url) -> None:
    make_multistream(tmp_path, small_dump, files=2)
    bucket, _ = fsspec.url_to_fs(s3_store_url)
    for path in tmp_path.glob("*.bz2"):
        bucket.put_file(str(path), f"{s3_store_url}/{path.name}")
    assert read_titles(plan(f"{s3_store_url}/*.bz2")) == read_titles(plan(small_dump))


def test_glob_does_not_leave_out_files_of_a_busy_server(tmp_path, serve, monkeypatch) -> None:
    for name in ("a1.xml", "a2.xml"):
        (tmp_path / name).write_bytes(b"x")
    url = serve(ranges=True)
    assert len(expand_pattern(f"{url}/*.xml")) == 2
    answer_request = _Handler.do_GET

    def refuse_second_file(handler: _Handler) -> None:
        if handler.path == "/a2.xml":
            handler.send_error(503)
        else:
            answer_request(handler)

    monkeypatch.setattr(_Handler, "do_GET", refuse_second_file)
    with pytest.raises(UnreachableError, match="503"):
        expand_pattern(f"{url}/*.xml")
    assert file_exists(f"{url}/a1.xml")
    assert not file_exists(f"{url}/a3.xml")
    with pytest.raises(UnreachableError, match="503"):
        file_exists(f"{url}/a2.xml")


def test_files_are_ordered_by_number(tmp_path) -> None:
    for name in ("x10.xml", "x2.xml", "x1.xml", "y.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [url.rpartition("/")[2] for url in expand_pattern(f"{tmp_path}/x*.xml")] == ["x1.xml", "x2.xml", "x10.xml"]


def test_file_name_may_look_like_a_glob(tmp_path) -> None:
    (tmp_path / "x[1].xml").write_bytes(b"abc")
    (url,) = expand_pattern(str(tmp_path / "x[1].xml"))
    assert get_size(url) == 3
    assert b"".join(read_bytes(url, 1, 2)) == b"bc"


def test_truncated_file_is_reported(tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(InputError, match="ends before byte 10: download it again"):
        list(read_bytes((tmp_path / "x").as_uri(), 0, 10))


def test_unreadable_path_is_reported(tmp_path) -> None:
    with pytest.raises(InputError, match="no file matches"):
        expand_pattern(str(tmp_path))
    with pytest.raises(InputError, match=r"cannot read .*: check that it exists"):
        list(read_bytes((tmp_path / "gone").as_uri()))


COMPRESS: dict[Compression, Callable[[bytes], bytes]] = {"bz2": bz2.compress, "gzip": gzip.compress, "none": bytes}


def split_chunks(data: bytes, step: int) -> list[bytes]:
    return [data[i : i + step] for i in range(0, len(data), step)]


@given(
    streams=st.lists(st.binary(max_size=300), max_size=5),
    step=st.integers(1, 50),
    codec=st.sampled_from(["bz2", "gzip", "none"]),
)
def test_concatenated_streams_are_decoded(streams: list[bytes], step: int, codec: Compression) -> None:
    packed = b"".join(map(COMPRESS[codec], streams))
    assert b"".join(decode(split_chunks(packed, step), codec, "x")) == b"".join(streams)


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
@pytest.mark.parametrize(
    "size",
    [
        source_module.MAX_DECODED_BYTES - 1,
        source_module.MAX_DECODED_BYTES,
        source_module.MAX_DECODED_BYTES + 1,
        3 * source_module.MAX_DECODED_BYTES,
    ],
)
def test_sizes_around_the_limit_of_a_piece_are_decoded(codec: Compression, size: int) -> None:
    packed = COMPRESS[codec](b"a" * size)
    assert sum(map(len, decode(split_chunks(packed, 64), codec, "x"))) == size


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
@pytest.mark.parametrize("cut", [1, 5, 20, -1, -5])
def test_truncated_stream_is_reported(codec: Compression, cut: int) -> None:
    packed = COMPRESS[codec](b"one") + COMPRESS[codec](b"some words" * 100)[:cut]
    with pytest.raises(
        InputError, match=r"^x\.bin is truncated \(.*: download it again, and its index with it if it has one$"
    ):
        list(decode([packed], codec, "x.bin"))


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
def test_corrupt_stream_is_reported(codec: Compression) -> None:
    packed = bytearray(COMPRESS[codec](bytes(range(256)) * 50))
    packed[len(packed) // 2] ^= 0xFF
    packed[-6] ^= 0xFF
    with pytest.raises(InputError, match=r"^x\.bin is (corrupt|truncated)"):
        list(decode([bytes(packed)], codec, "x.bin"))


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
def test_bytes_after_a_stream_are_reported(codec: Compression) -> None:
    with pytest.raises(InputError, match="corrupt"):
        list(decode([COMPRESS[codec](b"words") + b"no stream at all"], codec, "x"))


# Random bytes, runs of many lengths, long codes, and several tables and blocks.
TEXTS = [
    random.Random(0).randbytes(9_000),
    b"".join(bytes([length % 7]) * length for length in range(600)),
    b"".join(bytes([symbol]) * (1 << symbol) for symbol in range(17)),
    b"".join(b"line %d of a page, with %x\n" % (line, line**3) for line in range(5_000)),
]


@pytest.mark.parametrize("level", [1, 9])
def test_compiled_decoder_agrees_with_the_standard_library(level: int) -> None:
    packed = [bz2.compress(text, level) for text in [b"", b"a", *TEXTS]]
    assert b"".join(decode_streams(b"".join(packed))) == b"".join([b"a", *TEXTS])


def test_compiled_decoder_detects_damage() -> None:
    text = random.Random(0).randbytes(20) + b"some words of a page " * 9
    packed = bz2.compress(text)
    bits = product(range(len(packed)), range(8))
    with_flipped_bit = (packed[:byte] + bytes([packed[byte] ^ 1 << bit]) + packed[byte + 1 :] for byte, bit in bits)
    for damaged in (*with_flipped_bit, *(packed[:size] for size in range(1, len(packed)))):
        try:
            decoded = b"".join(decode_streams(damaged))
        except UnusualStreamError:
            continue
        assert decoded == bz2.decompress(damaged)


def test_slice_of_a_large_dump_is_decoded_by_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, packed = tmp_path / "x.bz2", bz2.compress(TEXTS[3], 1)
    damaged = bytearray(packed)
    damaged[-300] ^= 1  # in the last block
    path.write_bytes(packed + damaged)
    intact_slice, damaged_slice = (Slice(str(path), offset, len(packed), "bz2", 1, 1) for offset in (0, len(packed)))
    monkeypatch.setattr(source_module, "_bzip2_bytes_read", [source_module._MIN_COMPILED_BYTES])
    assert b"".join(read_slice(intact_slice)) == TEXTS[3]
    pieces = read_slice(damaged_slice)
    first_piece = next(pieces)
    assert first_piece
    assert TEXTS[3].startswith(first_piece)
    with pytest.raises(InputError, match=r"^x\.bz2 .* is corrupt \(invalid data stream\): download it again"):
        list(pieces)
    monkeypatch.setattr(source_module, "_MAX_COMPILED_BYTES", 100)
    assert b"".join(read_slice(intact_slice)) == TEXTS[3]


def decode_bomb(codec: Compression, packed: bytes) -> None:
    assert sum(len(piece) for piece in decode([packed], codec, "x")) == 32 << 20


def test_bomb_is_decoded_in_bounded_memory() -> None:
    bombs = {codec: compress(bytes(32 << 20)) for codec, compress in COMPRESS.items()}
    peaks = measure_peaks(*(partial(decode_bomb, *bomb) for bomb in bombs.items()))
    assert max(peaks) < 16 << 20, peaks


@given(lines=st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b""))), step=st.integers(1, 30))
def test_lines_are_split_at_newlines(lines: list[bytes], step: int) -> None:
    text = b"".join(line + b"\n" for line in lines)
    assert list(split_lines(split_chunks(text, step), "x")) == lines


def test_last_line_needs_no_newline() -> None:
    assert list(split_lines([b"a\nb"], "x")) == [b"a", b"b"]


def test_endless_line_is_refused() -> None:
    chunk = b"x" * (1 << 20)
    with pytest.raises(InputError, match="line of more than 64 MiB"):
        list(split_lines((chunk for _ in range(100)), "x"))


def test_compression_is_recognized_by_name() -> None:
    names = ("a.xml.bz2", "a.xml.gz", "a.xml", "a.xml-p1p2.bz2", "a.xml.7z")
    assert [is_compressed(name) for name in names] == [True, True, False, True, True]


REQUEST = aiohttp.RequestInfo(URL("https://host/d"), "GET", CIMultiDictProxy(CIMultiDict()), URL("https://host/d"))


@pytest.mark.parametrize(
    ("error", "is_permanent"),
    [
        (FileNotFoundError("x"), True),
        (PermissionError("x"), True),
        (ValueError("no such protocol"), True),
        (aiohttp.ClientResponseError(REQUEST, (), status=404), True),
        (aiohttp.ClientResponseError(REQUEST, (), status=503), False),
        (aiohttp.TooManyRedirects(REQUEST, ()), True),
        (aiohttp.InvalidURL("http:///d"), True),
        (aiohttp.ServerDisconnectedError(), False),
        (ConnectionResetError("x"), False),
        (TimeoutError("x"), False),
        (OSError(errno.EIO, "x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_temporary_errors_are_distinguished_from_permanent_ones(error: Exception, is_permanent: bool) -> None:
    assert isinstance(_build_read_error("s3://bucket/d", error), UnreachableError) != is_permanent
