"""Secrets: refused in URLs, which are written into logs and manifests, and left out of what is told.

A URL is refused for its form alone: no list of secrets could be complete.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from urllib.parse import unquote

from rag_model.errors import UsageError

# Query parameters of downloads that are no secrets. Any other is refused.
HARMLESS = frozenset(
    {"action", "dl", "download", "format", "generation", "page", "raw", "sequence", "version", "versionId"}
)
_LINK = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+):[/\\]+(?P<host>[^/\\?#]*)(?P<rest>.*)", re.DOTALL)
_EMBEDDED = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]+:[/\\]{2}[^\s\"'<>]+")  # URLs within a longer text
_MEANT = re.compile(r"[A-Za-z][\w+.-]+:/")  # a path keeps one of the slashes
_UNSEEN = re.compile(r"[\x00-\x20\x7f]")
_BARE = re.compile(r"(?P<scheme>https?):(?![/\\:])", re.IGNORECASE)
_USER_ANYWHERE = re.compile(r"(?P<scheme>[\w+.-]*):[/\\]{2}[^/\\?#]*@")  # as well where `::` is a part of the password
_FILES = frozenset(  # where `?` stands for any character, as in `part-?.bz2`, unless a value is assigned after it
    [
        "abfs",
        "abfss",
        "adl",
        "az",
        "dropbox",
        "file",
        "filecache",
        "ftp",
        "gcs",
        "gs",
        "hdfs",
        "local",
        "memory",
        "s3",
        "s3a",
        "sftp",
        "simplecache",
        "smb",
        "ssh",
        "tar",
        "wasb",
        "wasbs",
        "zip",
    ]
)
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_HTTP = """FSSPEC_HTTP='{"client_kwargs": {"headers": {"Authorization": "…"}}}'"""
_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_VARIABLES = {
    **dict.fromkeys(("s3", "s3a"), _AWS),
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("abfs", "abfss", "adl", "az", "wasb", "wasbs"), _AZURE),
    **dict.fromkeys(("http", "https"), _HTTP),
    "hf": "HF_TOKEN",
}

# user:password@ of an address; a password may hold / and @. Of hf:// what follows an @ behind a slash is a revision.
_USER = re.compile(r"(?<=://)(?<!hf://)[^@\s]+(?:@[^@\s]*)*@|(?<=hf://)[^@/\s]*@")
_QUERY = re.compile(r"(://[^\s?#]*)([?#])[^\s)\"']+")  # what signs an address
_NAMES = re.compile(
    r"SECRET|TOKEN(?!IZER)|PASSWORD|PASSWD|CREDENTIAL|API_KEY|ACCOUNT_KEY|CONNECTION_STRING", re.IGNORECASE
)
_OF_AZURE = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)")  # in a connection string
_SHORTEST = 6  # characters; shorter values are words


def refuse_secret(url: str) -> None:
    """Check that a URL names no user, no password and no query parameter that may be a secret.

    A path without `scheme://` passes. Of chained URLs, as `zip://a::https://host/b.zip`, each is checked.

    >>> refuse_secret("s3://bucket/dumps/part-?.bz2")

    Raises:
        UsageError: it does; the message names the environment variable to use, and does not repeat the secret.
    """
    text = _UNSEEN.sub("", url)  # which libraries leave out as well
    if bare := _BARE.match(text):
        raise _refused(bare["scheme"].lower(), "names no host behind //")
    links = [link for link in map(_LINK.match, text.split("::")) if link]
    for link in links:
        scheme = link["scheme"].lower()
        if _names_user(link["host"]):
            raise _refused(scheme, "names a user or a password")
        names = list(_parameters(scheme, link["rest"]))
        if not HARMLESS.issuperset(names) or len(set(names)) < len(names):
            raise _refused(scheme, f"has a query parameter other than {', '.join(sorted(HARMLESS))}")
    if anywhere := _USER_ANYWHERE.search(text):
        scheme = links[-1]["scheme"] if links else anywhere["scheme"]
        raise _refused(scheme.lower(), "names a user or a password")


def refuse_url(path: Path) -> None:
    """Check that what is used as a path of this machine is not meant as a URL.

    Raises:
        UsageError: it begins as one; the message does not repeat it, since it may hold a secret.
    """
    if _MEANT.match(str(path)):
        raise UsageError("a URL is given where a path of this machine is needed: name a folder or a file here")


def refuse_secrets(given: object) -> None:
    """Check every text in a value, however deep, for URLs that `refuse_secret` refuses.

    Raises:
        UsageError: one is refused.
    """
    for text in _texts(given):
        refuse_secret(text)
        for url in _EMBEDDED.findall(text):
            refuse_secret(url)


def without_secrets(text: str) -> str:
    """Return `text` with `***` in place of every secret that this process knows.

    >>> without_secrets("cannot reach s3://me:hush@bucket/library?X-Amz-Signature=0f")
    'cannot reach s3://***@bucket/library?***'
    """
    for value in _secrets():
        text = text.replace(value, "***")
    return _QUERY.sub(r"\1\2***", _USER.sub("***@", text))


def _names_user(host: str) -> bool:
    """Return whether the part of a URL before its path contains more than a host and a port."""
    plain = unquote(host)
    port = plain.rpartition("]")[2].partition(":")[2]  # after the brackets of an IPv6 address
    return "@" in plain or (bool(port) and not port.isdigit() and not plain.startswith("arn:"))


def _parameters(scheme: str, rest: str) -> Iterator[str]:
    """Yield the names of the parameters in what follows a URL's host."""
    path, _, query = rest.partition("?")
    if scheme in _FILES:
        pieces = [piece for piece in re.split(r"[?&;]", query) if "=" in piece.partition("/")[0]]
    else:
        assigned = re.findall(r"[;&][^/;&=]*=", path.partition("#")[0])
        pieces = [piece for piece in (*re.split(r"[?&;#]", query), *assigned, *path.partition("#")[2:]) if piece]
    yield from (piece.partition("=")[0] for piece in pieces)


def _refused(scheme: str, what: str) -> UsageError:
    variable = _VARIABLES.get(scheme) or f"FSSPEC_{re.sub(r'[^A-Z0-9]', '_', scheme.upper())} (fsspec's settings, JSON)"
    return UsageError(
        f"the {scheme} URL {what}, which may be a secret and would be written into logs and manifests: leave it out, "
        f"and set {variable} in the environment"
    )


def _texts(given: object) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        yield from _texts([*given.items()])
    elif is_dataclass(given) and not isinstance(given, type):
        yield from _texts([getattr(given, field.name) for field in fields(given)])
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        for one in given:
            yield from _texts(one)


def _secrets() -> list[str]:
    found = {value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    found.update(part for value in tuple(found) for part in _OF_AZURE.findall(value))
    return sorted(found, key=len, reverse=True)  # what contains another goes first
