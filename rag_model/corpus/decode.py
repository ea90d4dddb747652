"""Decompression in bounded memory, one stream after another.

The standard library's `BZ2File` treats bytes after a first stream that are not a stream as padding, and stops
without an error: on a multistream dump that loses articles. Here every byte must be decoded.
"""

import bz2
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from rag_model.corpus.records import Codec, Slice
from rag_model.corpus.source import basename, read_bytes
from rag_model.errors import InputError

PIECE = 1 << 20  # decoded bytes produced at a time, at any ratio of compression
_ADVICE = "download it again, and its index with it if it has one"
MAX_LINE = 64 << 20  # bytes of one line, in formats that have lines


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


def decode(chunks: Iterable[bytes], codec: Codec, where: str) -> Iterator[bytes]:
    """Yield the decoded bytes of one or more concatenated streams, at most a megabyte at a time.

    Raises:
        InputError: a stream is corrupt, or the bytes end inside one; `where` names them in the message.
    """
    if codec == "none":
        return iter(chunks)
    return _streams(chunks, *_CODECS[codec], where)


def read_slice(piece: Slice) -> Iterator[bytes]:
    """Yield the decoded bytes of a slice."""
    return decode(read_bytes(piece.url, piece.offset, piece.length), piece.codec, where(piece))


def where(piece: Slice) -> str:
    """Return the name of a slice for messages: its file and its bytes."""
    return f"{basename(piece.url)} (bytes {piece.offset} to {piece.offset + piece.length})"


def read_lines(url: str) -> Iterator[bytes]:
    """Yield the decoded lines of a file without their ends.

    Raises:
        InputError: the file is unreadable or corrupt, or has a line of more than `MAX_LINE` bytes.
    """
    return split_lines(decode(read_bytes(url), codec_of(url), basename(url)), basename(url))


def split_lines(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yield the lines of decoded bytes without their ends; the last may lack one."""
    rest, length = list[bytes](), 0
    for chunk in filter(None, chunks):  # a compressed stream may be empty, and a file have millions of them
        first, *others = chunk.split(b"\n")
        rest.append(first)
        length += len(first)
        if length > MAX_LINE:
            raise InputError(f"{where} has a line of more than {MAX_LINE >> 20} MiB: give one record a line")
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest, length = [others[-1]], len(others[-1])
    if any(rest):
        yield b"".join(rest)


def codec_of(url: str) -> Codec:
    """Return the compression of a file by its name."""
    return _ENDINGS.get(url.rpartition(".")[2].lower(), "none")


def _streams(
    chunks: Iterable[bytes],
    new: Callable[[], _Decoder],
    drain: Callable[[_Decoder, bytes], Iterator[bytes]],
    where: str,
) -> Iterator[bytes]:
    decoder: _Decoder | None = None
    for chunk in chunks:
        rest = chunk
        while rest:
            decoder = decoder or new()
            try:
                yield from drain(decoder, rest)
            except (OSError, EOFError, zlib.error) as corrupt:
                raise InputError(f"{where} is corrupt ({str(corrupt).lower()}): {_ADVICE}") from corrupt
            rest = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise InputError(f"{where} is truncated, it ends inside a compressed stream: {_ADVICE}")


def _drain_bz2(decoder: bz2.BZ2Decompressor, data: bytes) -> Iterator[bytes]:
    yield decoder.decompress(data, PIECE)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", PIECE)


def _drain_gzip(decoder: "zlib._Decompress", data: bytes) -> Iterator[bytes]:
    while True:
        piece = decoder.decompress(data, PIECE)
        yield piece
        data = decoder.unconsumed_tail
        if decoder.eof or not (data or len(piece) == PIECE):
            return


_ENDINGS: dict[str, Codec] = {"bz2": "bz2", "gz": "gzip"}
_CODECS: dict[Codec, tuple[Callable[[], _Decoder], Callable[..., Iterator[bytes]]]] = {
    "bz2": (bz2.BZ2Decompressor, _drain_bz2),
    "gzip": (lambda: zlib.decompressobj(wbits=31), _drain_gzip),
}
