import bz2
import gzip
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus import decode as module
from rag_model.corpus.decode import codec_of, decode, split_lines
from rag_model.corpus.records import Codec
from rag_model.errors import InputError

COMPRESS: dict[Codec, Callable[[bytes], bytes]] = {"bz2": bz2.compress, "gzip": gzip.compress, "none": bytes}


def chunked(data: bytes, step: int) -> list[bytes]:
    return [data[i : i + step] for i in range(0, len(data), step)]


@given(
    streams=st.lists(st.binary(max_size=300), max_size=5),
    step=st.integers(1, 50),
    codec=st.sampled_from(["bz2", "gzip", "none"]),
)
def test_streams_end_to_end_decode_to_their_bytes(streams: list[bytes], step: int, codec: Codec) -> None:
    packed = b"".join(map(COMPRESS[codec], streams))
    assert b"".join(decode(chunked(packed, step), codec, "x")) == b"".join(streams)


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
@pytest.mark.parametrize("size", [module.PIECE - 1, module.PIECE, module.PIECE + 1, 3 * module.PIECE])
def test_sizes_around_the_limit_of_a_piece_come_out_whole(codec: Codec, size: int) -> None:
    packed = COMPRESS[codec](b"a" * size)
    assert sum(map(len, decode(chunked(packed, 64), codec, "x"))) == size


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
@pytest.mark.parametrize("cut", [1, 5, 20, -1, -5])
def test_a_truncated_stream_says_so(codec: Codec, cut: int) -> None:
    packed = COMPRESS[codec](b"one") + COMPRESS[codec](b"some words" * 100)[:cut]
    with pytest.raises(
        InputError, match=r"^x\.bin is truncated, .*: download it again, and its index with it if it has one$"
    ):
        list(decode([packed], codec, "x.bin"))


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
def test_a_corrupt_stream_says_so(codec: Codec) -> None:
    packed = bytearray(COMPRESS[codec](bytes(range(256)) * 50))
    packed[len(packed) // 2] ^= 0xFF
    packed[-6] ^= 0xFF
    with pytest.raises(InputError, match=r"^x\.bin is (corrupt|truncated)"):
        list(decode([bytes(packed)], codec, "x.bin"))


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
def test_bytes_after_a_stream_are_not_passed_over(codec: Codec) -> None:
    with pytest.raises(InputError, match="corrupt"):
        list(decode([COMPRESS[codec](b"words") + b"no stream at all"], codec, "x"))


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
def test_a_bomb_is_decoded_in_bounded_memory(codec: Codec) -> None:
    packed = COMPRESS[codec](bytes(64 << 20))
    tracemalloc.start()
    assert sum(len(piece) for piece in decode([packed], codec, "x")) == 64 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@given(lines=st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b""))), step=st.integers(1, 30))
def test_lines_are_what_newlines_divide(lines: list[bytes], step: int) -> None:
    text = b"".join(line + b"\n" for line in lines)
    assert list(split_lines(chunked(text, step), "x")) == lines


def test_the_last_line_needs_no_newline() -> None:
    assert list(split_lines([b"a\nb"], "x")) == [b"a", b"b"]


def test_a_line_without_end_is_given_up() -> None:
    chunk = b"x" * (1 << 20)
    with pytest.raises(InputError, match="line of more than 64 MiB"):
        list(split_lines((chunk for _ in range(100)), "x"))


def test_a_name_tells_the_codec() -> None:
    assert [codec_of(name) for name in ("a.xml.bz2", "a.xml.gz", "a.xml", "a.xml-p1p2.bz2")] == [
        "bz2",
        "gzip",
        "none",
        "bz2",
    ]
