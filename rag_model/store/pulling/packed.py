"""The beginning of a file, compressed: a graph's links are numbers of four bytes, most of them -1.

A file is a row of blocks: the length of a zstd frame, in four bytes, and the frame. Each decodes to 4 MiB, the last one
to the rest.
"""

import struct
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from rag_model.errors import InputError
from rag_model.landing import landing

VERSION = 1  # raise it with any change of the layout: puller and builder find a file by this number
_BLOCK = 4 << 20  # bytes in memory at once, twice
_LEVEL = 9  # 47 bytes a passage of a graph in 272; level 1 56, level 19 45 in fifty times the time
_LENGTH = struct.Struct("<I")


def pack(file: Path, size: int, out: Path) -> None:
    """Write the first `size` bytes of a file compressed; holds a block.

    Raises:
        OSError: `out` cannot be written, or the file cannot be read.
    """
    codec = pa.Codec("zstd", _LEVEL)
    with file.open("rb") as source, landing(out) as temporary, temporary.open("wb") as packed:
        for at in range(0, size, _BLOCK):
            frame = codec.compress(source.read(min(_BLOCK, size - at)), asbytes=True)
            packed.write(_LENGTH.pack(len(frame)) + frame)


def unpack(packed: Path, size: int, out: Path) -> None:
    """Write the `size` bytes that a file was packed from; holds a block.

    Raises:
        InputError: it is damaged, or of another size.
        OSError: `out` cannot be written.
    """
    with packed.open("rb") as source, landing(out) as temporary, temporary.open("wb") as file:
        for at in range(0, size, _BLOCK):
            file.write(_decoded(source, min(_BLOCK, size - at)))


def _decoded(source: BinaryIO, size: int) -> bytes:
    try:
        (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
        frame = source.read(min(length, 2 * _BLOCK))
        return bytes(pa.Codec("zstd").decompress(frame, size, asbytes=True))
    except (struct.error, OSError, ValueError, pa.ArrowException) as broken:  # OSError: of zstd
        raise InputError(f"{source.name} is not a packed file ({broken}): fetch the whole file") from broken
