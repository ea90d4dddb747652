"""Locate the one file in a `.7z` archive, so that its bytes can be decoded as a stream.

The header of an archive may demand gigabytes, so a child process parses it within limits. The file
itself is decoded by the standard library: LZMA, LZMA2 and bzip2, which `7z` and Wikimedia use.
"""

import lzma
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import fsspec

from rag_model.errors import InputError
from rag_model.extras import require
from rag_model.process import ChildDiedError, run_in_child, serve_call

ENDING = ".7z"
# Limits of the child process; a usual header has less than a kilobyte.
_SECONDS, _MEMORY = 60.0, 256 << 20  # CPU seconds, bytes
_BZIP2 = bytes.fromhex("040202")
_FILTERS = {  # filters of the standard library, by the method ids of 7z
    bytes.fromhex("21"): lzma.FILTER_LZMA2,
    bytes.fromhex("030101"): lzma.FILTER_LZMA1,
    bytes.fromhex("03030103"): lzma.FILTER_X86,  # py7zr adds it to LZMA2 by default
}


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """The byte range of a file in an archive, and how to decode it."""

    offset: int  # offset of its compressed bytes
    length: int  # compressed bytes
    size: int  # decoded bytes
    crc32: int | None
    filters: list[dict[str, int]]  # filters for `lzma.LZMADecompressor`; empty for bzip2


def find_archived_file(url: str, name: str) -> ArchivedFile:
    """Locate the only file in the archive at `url`; `name` is the archive's name in messages.

    Raises:
        InputError: The archive is damaged or encrypted, has no file or several, or is compressed by
            an unsupported method.
        MissingExtraError: py7zr is not installed.
    """
    try:
        return ArchivedFile(**run_in_child(__name__, [url, name], seconds=_SECONDS, memory=_MEMORY))
    except ChildDiedError as error:
        raise InputError(f"{name} has a header that {error}: {_advise_unpacking(name)}") from error


def _locate_in_child(arguments: list[str]) -> dict[str, Any]:
    url, name = arguments
    py7zr = require("py7zr", "sevenzip")
    with fsspec.open(url, "rb").open() as file:
        try:
            with py7zr.SevenZipFile(file) as archive:
                return asdict(_describe_file(archive, name))
        except py7zr.PasswordRequired as error:
            raise InputError(f"{name} is encrypted: {_advise_unpacking(name)}") from error
        except (InputError, MemoryError):
            raise
        except Exception as error:  # a damaged header can raise any exception
            raise InputError(f"{name} is not a readable 7z archive ({error}): download it again") from error


def _describe_file(archive: Any, name: str) -> ArchivedFile:
    file_names = [file.filename for file in archive.files if not file.is_directory]
    if not file_names:
        raise InputError(f"{name} holds no file: give an archive of one dump")
    if len(file_names) != 1:
        raise InputError(f"{name} holds {len(file_names)} files: unpack it with `7z x {name}`, and give the files")
    (file,) = (file for file in archive.files if not file.is_directory)
    main_streams = archive.header.main_streams
    if file.emptystream or main_streams is None:
        raise InputError(f"{name} holds an empty file: download it again")
    coders = [(coder["method"], coder["properties"] or b"") for coder in file.folder.coders]
    return ArchivedFile(
        archive.afterheader + main_streams.packinfo.packpos,
        main_streams.packinfo.packsizes[0],
        file.uncompressed,
        file.crc32,
        _build_filters(coders, name),
    )


def _build_filters(coders: Iterable[tuple[bytes, bytes]], name: str) -> list[dict[str, int]]:
    """Convert coders in the decoding order of 7z to filters in the encoding order of `lzma`.

    Raises:
        InputError: The standard library cannot decode the file exactly.
    """
    methods = [method for method, _ in coders]
    if methods == [_BZIP2]:
        return []
    filter_ids = [_FILTERS.get(method, 0) for method in methods]
    # After LZMA without an end mark, liblzma does not output the last bytes of the x86 filter.
    if filter_ids not in ([lzma.FILTER_LZMA1], [lzma.FILTER_LZMA2], [lzma.FILTER_LZMA2, lzma.FILTER_X86]):
        raise InputError(
            f"{name} is encrypted, or uses a method other than LZMA, LZMA2 and bzip2: {_advise_unpacking(name)}"
        )
    filters = [_build_filter(filter_id, coder[1]) for filter_id, coder in zip(filter_ids, coders, strict=True)]
    return filters[::-1]


def _build_filter(filter_id: int, properties: bytes) -> dict[str, int]:
    if filter_id == lzma.FILTER_LZMA2:
        bits = properties[0]
        return {"id": filter_id, "dict_size": (2 | bits & 1) << (bits // 2 + 11)}
    if filter_id == lzma.FILTER_LZMA1:
        remainder, lc = divmod(properties[0], 9)
        pb, lp = divmod(remainder, 5)
        return {"id": filter_id, "dict_size": int.from_bytes(properties[1:5], "little"), "lc": lc, "lp": lp, "pb": pb}
    return {"id": filter_id}


def _advise_unpacking(name: str) -> str:
    return f"unpack it with `7z x {name}`, and give the extracted file"


if __name__ == "__main__":
    serve_call(_locate_in_child)
