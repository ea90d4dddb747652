"""Read the files of a corpus: any fsspec URL as chunks of bytes, decompressed in bounded memory.

Local disks, HTTP, S3 and memory raise different errors; this module turns each into an InputError.
The standard library's `BZ2File` treats invalid bytes after the first stream as padding and stops
without an error, which loses articles of a multistream dump. This module requires that every byte
can be decoded.
"""

import bz2
import errno
import lzma
import re
import sys
import tarfile
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from io import BufferedReader, RawIOBase
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Self

import fsspec
from fsspec.core import has_magic, url_to_fs

from rag_model.corpus import sevenzip
from rag_model.corpus.records import Compression, Slice, is_wiki_site
from rag_model.errors import InputError, MissingExtraError, UnreachableError, UsageError, format_error
from rag_model.secrets import refuse_secret

CHUNK_BYTES = 1 << 18  # bytes per chunk
# Fields of file systems that identify a version of a file; the first available one is used.
_TAG_FIELDS = "ETag", "mtime", "LastModified", "last_modified", "created", "blob_id"
# Module of an HTTP client -> base class of its errors; huggingface_hub uses httpx2.
_CLIENT_ERRORS = {"aiohttp": "ClientError", "httpx2": "HTTPError"}
_TEMPORARY_STATUSES = {408, 425, 429}
_NETWORK_MODULES = {"aiohttp"}  # modules whose connection errors are not all OSErrors
_PERMANENT_ERRORS = FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError
_PERMANENT_ERRNOS = {errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP}
MAX_DECODED_BYTES = 1 << 20  # maximum decoded bytes per step, at any compression ratio
MAX_XZ_BYTES = 256 << 20  # maximum memory of the decoder; `xz -9` needs 65 MiB
# The compiled decoder takes 0.4 s to load and saves 0.06 s per megabyte, so a process loads it
# after `_MIN_COMPILED_BYTES` of bzip2 streams. It decodes slices of up to `_MAX_COMPILED_BYTES`.
_MIN_COMPILED_BYTES, _MAX_COMPILED_BYTES = 1 << 20, 4 << 20
_bzip2_bytes_read = [0]  # bytes of bzip2 streams that `read_slice` has read in this process
_DOWNLOAD_ADVICE = "download it again, and its index with it if it has one"
_7Z_MAGIC = b"7z\xbc\xaf\x27\x1c"
_UTF16_BYTES = 8  # bytes at the start of a text by which UTF-16 is recognised
MAX_LINE = 64 << 20  # maximum bytes of a line in line-based formats
_CODEC_BY_ENDING: dict[str, Compression] = {"bz2": "bz2", "gz": "gzip", "tgz": "gzip", "xz": "xz", "zst": "zstd"}
COMPRESSED_ENDING = r"(\.(bz2|gz|xz|zst|7z))?$"  # pattern of an optional ending
_TAR_ENDING = re.compile(rf"\.tar{COMPRESSED_ENDING}|\.tgz$", re.IGNORECASE)
_MAX_TAR_HEADER = 1 << 20  # maximum bytes of an extended header


def check_pattern(pattern: str) -> None:
    """Check the name of a dump without looking for it.

    Raises:
        UsageError: The pattern is empty, or a URL that may contain a secret.
    """
    if not pattern.strip():
        raise UsageError("the name of the dump is empty: give a path, a URL or a glob")
    refuse_secret(pattern)


def expand_pattern(pattern: str) -> list[str]:
    """Return the URLs of the files that match a path, URL or glob, in natural order.

    Raises:
        InputError: No file matches, or the source cannot be reached.
        UsageError: See `check_pattern`.
    """
    check_pattern(pattern)
    if is_wiki_site(pattern):
        return [pattern]
    with _translate_errors(pattern):
        fs, path = _open_filesystem(pattern)
        paths = [path] if fs.isfile(path) else fs.glob(path)
        urls = [fs.unstrip_protocol(file) for file in paths if _is_file(fs, file)]
        if not urls and "http" in fs.protocol and not has_magic(path):
            fs.info(path)  # raises the error of the connection, which `isfile` hides
    if not urls:
        raise InputError(f"no file matches {pattern}: check the path, or give a glob such as 'dumps/*.bz2'")
    return sorted(urls, key=_build_natural_key)


class FolderEntry(NamedTuple):
    """A file in a folder, or another entry with the reason why it is not read."""

    url: str
    path: str  # relative to the folder
    size: int  # bytes
    problem: str = ""  # why it is not read: `hidden`, `link` or `unreadable`


def list_folder(pattern: str) -> list[FolderEntry] | None:
    """List a folder and its subfolders in the order of paths; None if this is not a folder.

    Links are not followed, and hidden folders are not opened. A folder of an HTTP server cannot be
    listed.

    Raises:
        InputError: The folder cannot be read.
        UsageError: The pattern is a URL that may contain a secret.
    """
    refuse_secret(pattern)
    with _translate_errors(pattern):
        fs, root = _open_filesystem(pattern)
        if "http" in fs.protocol or fs.isfile(root) or not fs.isdir(root):
            return None
        entries, pending_folders = list[FolderEntry](), [root.rstrip("/")]
        while pending_folders:
            folder = pending_folders.pop()
            try:
                file_infos = fs.ls(folder, detail=True)
            except OSError:
                if folder == root.rstrip("/"):
                    raise
                entries.append(FolderEntry(fs.unstrip_protocol(folder), _make_relative(folder, root), 0, "unreadable"))
                continue
            for file_info in file_infos:
                name = file_info["name"].rstrip("/")
                if name == folder:  # object stores list a folder as its own entry
                    continue
                problem = _find_problem(file_info, basename(name))
                if file_info["type"] == "directory" and not problem:
                    pending_folders.append(name)
                else:
                    n_bytes = int(file_info.get("size") or 0)
                    entries.append(FolderEntry(fs.unstrip_protocol(name), _make_relative(name, root), n_bytes, problem))
    return sorted(entries, key=lambda entry: entry.path)


def get_url(path: str) -> str:
    """Return the URL of a path or a URL, without a slash at its end."""
    fs, root = url_to_fs(path)
    return str(fs.unstrip_protocol(root)).rstrip("/")


def _make_relative(path: str, root: str) -> str:
    return path.removeprefix(root.rstrip("/")).lstrip("/")


def _find_problem(file_info: Mapping[str, Any], name: str) -> str:
    if name.startswith("."):
        return "hidden"
    if file_info.get("islink"):
        return "link"
    return "" if file_info["type"] in {"file", "directory"} else "unreadable"


def file_exists(url: str) -> bool:
    """Return whether a file exists."""
    with _translate_errors(url):
        fs, path = _open_filesystem(url)
        return _is_file(fs, path)


def get_size(url: str) -> int:
    """Return a file's size in bytes.

    Raises:
        InputError: The file cannot be reached, or its server does not report the size.
    """
    with _translate_errors(url):
        fs, path = url_to_fs(url)
        n_bytes = fs.size(path)
    if n_bytes is None:
        raise InputError(f"the server of {url} does not report the file's size: download the file and give its path")
    return int(n_bytes)


def get_version_tag(url: str) -> str | None:
    """Return an identifier of a file's version, from the size and the tag or modification time.

    Return None if the file system reports neither tag nor time.

    Raises:
        InputError: The file cannot be reached.
    """
    with _translate_errors(url):
        fs, path = _open_filesystem(url)
        file_info = fs.info(path)
    version_tag = next((str(file_info[name]) for name in _TAG_FIELDS if file_info.get(name) is not None), None)
    return None if version_tag is None else f"{file_info.get('size')} {version_tag}"


def read_bytes(url: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Yield a file, or `length` bytes from `offset`, in chunks of at most `CHUNK_BYTES`.

    Raises:
        InputError: The file cannot be read, or ends before `length` bytes.
    """
    remaining = length
    with _translate_errors(url), fsspec.open(url, "rb").open() as file:
        if offset:
            file.seek(offset)
        while remaining is None or remaining > 0:
            chunk = file.read(CHUNK_BYTES if remaining is None else min(CHUNK_BYTES, remaining))
            if not chunk:
                break
            remaining = None if remaining is None else remaining - len(chunk)
            yield chunk
    if remaining:
        is_file_empty = not offset and remaining == length
        problem = "is empty" if is_file_empty else f"ends before byte {offset + (length or 0)}"
        raise InputError(f"{basename(url)} {problem}: download it again")


def add_client_errors(*expected: type[Exception]) -> tuple[type[Exception], ...]:
    """Return `expected`, and the errors of imported HTTP clients that are not OSErrors."""
    return (
        *expected,
        *(getattr(sys.modules[name], error_name) for name, error_name in _CLIENT_ERRORS.items() if name in sys.modules),
    )


def basename(url: str) -> str:
    """Return the last segment of a URL, as the name of the file in messages."""
    return url.rpartition("/")[2]


def _open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, without cached listings, and the path in it."""
    fs, path = url_to_fs(url)
    fs.invalidate_cache()
    return fs, path


def _is_file(fs: Any, path: str) -> bool:
    """Return whether there is a file; raise the temporary errors of HTTP, which `isfile` hides."""
    if "http" not in fs.protocol:
        return bool(fs.isfile(path))
    try:
        fs.info(path)
    except FileNotFoundError as error:
        if isinstance(error.__cause__, Exception) and not _is_permanent(error.__cause__):
            raise
        return False
    return True


def _build_natural_key(url: str) -> list[tuple[int, str]]:
    return [(int(piece or 0), "") if i % 2 else (0, piece) for i, piece in enumerate(re.split(r"(\d+)", url))]


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn an exception in the block into an InputError that names `url`."""
    try:
        yield
    except Exception as error:
        raise _build_read_error(url, error) from error


def _build_read_error(url: str, error: Exception) -> InputError:
    cause = error.__cause__  # fsspec reports each error of an HTTP server as a missing file
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _comes_from_network(cause):
        error = cause
    reason = format_error(error)
    if not _is_permanent(error):
        return UnreachableError(f"cannot read {url} ({reason}): check the network and the server, and try again")
    if _comes_from_network(error):
        reason = f"{type(error).__name__}: {reason}"  # the text of a redirect loop or a malformed URL does not name it
    return InputError(f"cannot read {url} ({reason}): check that it exists and that you may read it")


def _is_permanent(error: Exception) -> bool:
    """Return whether an error shows that reading the file again later would also fail."""
    http_status = getattr(error, "status", None)  # status of an HTTP response
    if isinstance(http_status, int):  # 0 if the server redirected too often
        return http_status < 500 and http_status not in _TEMPORARY_STATUSES
    if isinstance(error, ValueError):  # also an invalid URL, an error of the HTTP client
        return True
    if not isinstance(error, OSError):
        return not _comes_from_network(error)
    return isinstance(error, _PERMANENT_ERRORS) or error.errno in _PERMANENT_ERRNOS


def _comes_from_network(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or type(error).__module__.partition(".")[0] in _NETWORK_MODULES


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


def decode(chunks: Iterable[bytes], codec: Compression, source_name: str) -> Iterator[bytes]:
    """Yield the decoded bytes of concatenated streams, at most a megabyte at a time.

    Raises:
        InputError: A stream is corrupt or truncated; the message starts with `source_name`.
    """
    if codec == "none":
        return iter(chunks)
    if codec == "zstd":
        return _decode_zstd(chunks, source_name)
    return _decode_streams(chunks, *_CODECS[codec], source_name)


def read_decoded(url: str) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed according to its ending.

    Raises:
        InputError: The file is unreadable or corrupt, or an archive of several files.
        MissingExtraError: It is a `.7z` archive, and py7zr is not installed.
    """
    if _is_archive(url):
        return _decode_archive(url)
    return decode(read_bytes(url), _get_codec(url), basename(url))


def is_compressed(url: str) -> bool:
    """Return whether a file is compressed, by its ending."""
    return _is_archive(url) or _get_codec(url) != "none"


def read_slice(byte_slice: Slice) -> Iterator[bytes]:
    """Yield the decoded bytes of a slice."""
    chunks = read_bytes(byte_slice.url, byte_slice.offset, byte_slice.length)
    if byte_slice.codec == "bz2" and byte_slice.length <= _MAX_COMPILED_BYTES:
        _bzip2_bytes_read[0] += byte_slice.length
        if _bzip2_bytes_read[0] > _MIN_COMPILED_BYTES and (bzip2 := _load_bzip2()):
            return _decode_compiled(bzip2, chunks, describe_slice(byte_slice))
    return decode(chunks, byte_slice.codec, describe_slice(byte_slice))


@cache
def _load_bzip2() -> ModuleType | None:
    """Return the compiled decoder; None if numba is not installed."""
    with suppress(MissingExtraError):
        return import_module("rag_model.corpus.bzip2")
    return None


def _decode_compiled(bzip2: ModuleType, chunks: Iterable[bytes], source_name: str) -> Iterator[bytes]:
    """Read all bytes of bzip2 streams, then yield the decoded bytes.

    Raises:
        InputError: As for `decode`.
    """
    compressed_bytes, n_yielded = b"".join(chunks), 0
    try:
        for block in bzip2.decode_streams(compressed_bytes):
            n_yielded += len(block)
            yield block
    except bzip2.UnusualStreamError:
        for decoded_bytes in decode([compressed_bytes], "bz2", source_name):
            yield decoded_bytes[n_yielded:]
            n_yielded = max(0, n_yielded - len(decoded_bytes))


def describe_slice(byte_slice: Slice) -> str:
    """Return the file and the byte range of a slice, for messages."""
    return f"{basename(byte_slice.url)} (bytes {byte_slice.offset} to {byte_slice.offset + byte_slice.length})"


def read_lines(url: str) -> Iterator[bytes]:
    """Yield the decoded lines of a file without line ends.

    If the file is a tar archive, the lines of all files in it are yielded; each file is
    decompressed according to its own ending.

    Raises:
        InputError: The file is unreadable or corrupt, or has a line of more than `MAX_LINE` bytes.
    """
    if is_tar(url):
        archived_files = read_archived_files(url)
        return chain.from_iterable(split_lines(chunks, basename(url)) for chunks in archived_files)
    chunks = read_decoded(url)
    head = next(filter(None, chunks), b"")
    refuse_utf16(head, basename(url))
    return split_lines(chain([head], chunks), basename(url))


def is_tar(url: str) -> bool:
    """Return whether a file is a tar archive, also compressed, by its ending."""
    return _TAR_ENDING.search(url) is not None


def read_archived_files(url: str) -> Iterator[Iterator[bytes]]:
    """Yield the decoded bytes of each regular file of a tar archive, in its order.

    The archive is read as a stream, and no name in it is used as a path to write to.
    Links, folders and devices are skipped.

    Raises:
        InputError: It is not a tar archive, is truncated or corrupt, or has a sparse file.
    """
    name = basename(url)
    try:
        file = BufferedReader(_ChunkFile(read_decoded(url)), CHUNK_BYTES)
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_TarHeader) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # members would fill memory
                if not member.isreg():
                    continue
                member_file = archive.extractfile(member)
                if member.issparse() or member_file is None:
                    raise InputError(f"{name} has a sparse file, {member.name[:80]!r}: pack it without --sparse")
                chunks = iter(partial(member_file.read, CHUNK_BYTES), b"")
                yield decode(chunks, _get_codec(member.name), name)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        problem = "is truncated or not a tar archive"
        raise InputError(f"{name} {problem} ({str(error).lower()}): {_DOWNLOAD_ADVICE}") from error


class _TarHeader(tarfile.TarInfo):
    """A tar header that raises an error if it is damaged, where the base class ends the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> Self:
        """Parse the header in a block."""
        try:
            header = super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        if not (header.isreg() or 0 <= header.size <= _MAX_TAR_HEADER):
            # a header is read into memory, so its size is limited
            raise tarfile.ReadError(f"a header of {header.size} bytes")
        return header


def refuse_utf16(head: bytes, source_name: str) -> None:
    """Refuse a text whose first bytes are UTF-16, or the byte order mark of UTF-32.

    Raises:
        InputError: The text is refused; the message starts with `source_name`.
    """
    # UTF-32 is checked first, because its byte order mark starts with the mark of UTF-16.
    if head.startswith((BOM_UTF32_LE, BOM_UTF32_BE)):
        raise InputError(f"{source_name} is UTF-32: convert it to UTF-8")
    byte_pairs = head[: len(head[:_UTF16_BYTES]) & ~1]
    zero_counts = {byte_pairs[0::2].count(0), byte_pairs[1::2].count(0)}
    # In Latin letters and markup, every other byte of UTF-16 is zero.
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or (byte_pairs and zero_counts == {0, len(byte_pairs) // 2}):
        raise InputError(f"{source_name} is UTF-16: convert it to UTF-8")


def split_lines(chunks: Iterable[bytes], source_name: str) -> Iterator[bytes]:
    """Yield the lines of decoded bytes without line ends; the last line may have no line end."""
    line_parts, line_bytes = list[bytes](), 0
    for chunk in filter(None, chunks):  # a file may contain millions of empty streams
        line_rest, *complete_lines = chunk.split(b"\n")
        line_parts.append(line_rest)
        line_bytes += len(line_rest)
        if line_bytes > MAX_LINE:
            raise InputError(f"{source_name} has a line of more than {MAX_LINE >> 20} MiB: put one record on each line")
        if complete_lines:
            yield b"".join(line_parts)
            yield from complete_lines[:-1]
            line_parts, line_bytes = [complete_lines[-1]], len(complete_lines[-1])
    if any(line_parts):
        yield b"".join(line_parts)


def _get_codec(url: str) -> Compression:
    return _CODEC_BY_ENDING.get(url.rpartition(".")[2].lower(), "none")


def _decode_streams(
    chunks: Iterable[bytes],
    create_decoder: Callable[[], _Decoder],
    drain: Callable[[_Decoder, bytes], Iterator[bytes]],
    magic: bytes,
    padding: bytes,
    source_name: str,
) -> Iterator[bytes]:
    decoder: _Decoder | None = None
    head = b""  # first bytes of the current stream
    for chunk in chunks:
        undecoded_bytes = chunk
        while undecoded_bytes := undecoded_bytes if decoder else undecoded_bytes.lstrip(padding):
            if decoder is None:
                decoder, head = create_decoder(), b""
            head += undecoded_bytes[: len(magic) - len(head)]
            try:
                yield from drain(decoder, undecoded_bytes)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise InputError(f"{source_name} is corrupt ({str(error).lower()}): {_DOWNLOAD_ADVICE}") from error
            undecoded_bytes = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None and not magic.startswith(head):
        raise InputError(f"{source_name} is corrupt (no compressed data): {_DOWNLOAD_ADVICE}")
    if decoder is not None:
        raise InputError(f"{source_name} is truncated (it ends inside a compressed stream): {_DOWNLOAD_ADVICE}")


def _is_archive(url: str) -> bool:
    return url.lower().endswith(sevenzip.ENDING)


def _decode_archive(url: str) -> Iterator[bytes]:
    name = basename(url)
    if b"".join(read_bytes(url, 0, len(_7Z_MAGIC))) != _7Z_MAGIC:
        raise InputError(f"{name} is not a 7z archive: {_DOWNLOAD_ADVICE}")
    file = sevenzip.find_archived_file(url, name)
    if (memory := max((options.get("dict_size", 0) for options in file.filters), default=0)) > MAX_XZ_BYTES:
        raise InputError(
            f"{name} needs {memory >> 20} MiB to decode, and the limit is {MAX_XZ_BYTES >> 20}: "
            f"unpack it with `7z x {name}`, and give the extracted file"
        )
    decoded_bytes, checksum = 0, 0
    for block in _decode_raw_stream(read_bytes(url, file.offset, file.length), file.filters, name):
        decoded_bytes, checksum = decoded_bytes + len(block), zlib.crc32(block, checksum)
        if decoded_bytes > file.size:
            break
        yield block
    if decoded_bytes < file.size:
        raise InputError(f"{name} is truncated (it ends inside its compressed file): {_DOWNLOAD_ADVICE}")
    if decoded_bytes > file.size or file.crc32 not in {None, checksum}:
        raise InputError(f"{name} is corrupt (its checksum is wrong): {_DOWNLOAD_ADVICE}")


def _decode_raw_stream(chunks: Iterable[bytes], filters: list[dict[str, int]], name: str) -> Iterator[bytes]:
    """Yield the decoded bytes of one raw stream, with or without an end mark."""
    try:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters) if filters else bz2.BZ2Decompressor()
        for chunk in chunks:
            if not decoder.eof:
                yield from _drain_bz2(decoder, chunk)
    except (OSError, lzma.LZMAError) as error:
        raise InputError(f"{name} is corrupt ({str(error).lower()}): {_DOWNLOAD_ADVICE}") from error


class _ChunkFile(RawIOBase):
    """A readable file over chunks of bytes, which pyarrow and `tarfile` require."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(filter(None, self._chunks), b"")
        n_bytes = min(len(buffer), len(self._rest))
        buffer[:n_bytes], self._rest = self._rest[:n_bytes], self._rest[n_bytes:]
        return n_bytes


def _decode_zstd(chunks: Iterable[bytes], source_name: str) -> Iterator[bytes]:
    import pyarrow as pa  # noqa: PLC0415 - takes long to import

    try:
        with pa.CompressedInputStream(pa.PythonFile(_ChunkFile(chunks), "r"), "zstd") as stream:
            while decoded_bytes := stream.read(MAX_DECODED_BYTES):
                yield decoded_bytes
    except OSError as error:
        problem = str(error).lower()
        damage = "truncated" if "truncated" in problem else "corrupt"
        raise InputError(f"{source_name} is {damage} ({problem}): {_DOWNLOAD_ADVICE}") from error


def _drain_bz2(decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor, compressed_bytes: bytes) -> Iterator[bytes]:
    yield decoder.decompress(compressed_bytes, MAX_DECODED_BYTES)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", MAX_DECODED_BYTES)


def _drain_gzip(decoder: "zlib._Decompress", compressed_bytes: bytes) -> Iterator[bytes]:
    while True:
        decoded_bytes = decoder.decompress(compressed_bytes, MAX_DECODED_BYTES)
        yield decoded_bytes
        compressed_bytes = decoder.unconsumed_tail
        if decoder.eof or not (compressed_bytes or len(decoded_bytes) == MAX_DECODED_BYTES):
            return


# Codec -> (function that creates a decoder, function that yields all output of a decoder for some
# input, first bytes of a stream, padding between streams).
_CODECS: dict[Compression, tuple[Callable[[], _Decoder], Callable[..., Iterator[bytes]], bytes, bytes]] = {
    "bz2": (bz2.BZ2Decompressor, _drain_bz2, b"BZh", b""),
    "xz": (
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_BYTES),
        _drain_bz2,
        b"\xfd7zXZ\0",
        b"\0",
    ),
    "gzip": (lambda: zlib.decompressobj(wbits=31), _drain_gzip, b"\x1f\x8b", b""),
}
