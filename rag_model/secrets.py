"""Reject secrets in URLs, which are written into logs and manifests, and mask them in messages.

A URL is rejected for its form alone, because no list of secrets could be complete.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from urllib.parse import unquote

from rag_model.errors import UsageError

# Names of this machine in URLs, which no other site can use.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# Query parameters of downloads that are not secrets. All others are rejected.
HARMLESS_PARAMETERS = frozenset(
    {"action", "dl", "download", "format", "generation", "page", "raw", "sequence", "version", "versionId"}
)
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+):[/\\]+(?P<host>[^/\\?#]*)(?P<rest>.*)", re.DOTALL)
# URLs within a longer text.
_EMBEDDED_URL = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]+:[/\\]{2}[^\s\"'<>]+")
# A `Path` made from a URL keeps one of the two slashes.
_URL_PREFIX = re.compile(r"[A-Za-z][\w+.-]+:/")
_INVISIBLE = re.compile(r"[\x00-\x20\x7f]")
_SCHEME_WITHOUT_HOST = re.compile(r"(?P<scheme>https?):(?![/\\:])", re.IGNORECASE)
# Also matches if `::` is a part of the password.
_USER_ANYWHERE = re.compile(r"(?P<scheme>[\w+.-]*):[/\\]{2}[^/\\?#]*@")
# Schemes in which `?` is a wildcard, as in `part-?.bz2`, unless a `name=value` follows it.
_GLOB_SCHEMES = frozenset([
    "abfs", "abfss", "adl", "az", "dropbox", "file", "filecache", "ftp", "gcs", "gs", "hdfs",
    "local", "memory", "s3", "s3a", "sftp", "simplecache", "smb", "ssh", "tar", "wasb", "wasbs",
    "zip",
])  # fmt: skip
# The environment variables for credentials, as error messages name them.
_AZURE_VARIABLES = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_HTTP_VARIABLE = """FSSPEC_HTTP='{"client_kwargs": {"headers": {"Authorization": "…"}}}'"""
_AWS_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_CREDENTIAL_VARIABLES = {
    **dict.fromkeys(("s3", "s3a"), _AWS_VARIABLES),
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("abfs", "abfss", "adl", "az", "wasb", "wasbs"), _AZURE_VARIABLES),
    **dict.fromkeys(("http", "https"), _HTTP_VARIABLE),
    "hf": "HF_TOKEN",
}

# user:password@ of a URL; a password may contain / and @. In hf:// URLs the @ after a slash starts
# a revision.
_USER = re.compile(r"(?<=://)(?<!hf://)[^@\s]+(?:@[^@\s]*)*@|(?<=hf://)[^@/\s]*@")
_QUERY = re.compile(r"(://[^\s?#]*)([?#])[^\s)\"']+")  # a query may contain a signature
_SECRET_NAMES = re.compile(
    r"SECRET|TOKEN(?!IZER)|PASSWORD|PASSWD|CREDENTIAL|API_KEY|ACCOUNT_KEY|CONNECTION_STRING",
    re.IGNORECASE,
)
# A secret in an Azure connection string.
_AZURE_SECRET = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)")
_MIN_SECRET_LENGTH = 6  # characters; shorter values may be ordinary words, so they are not masked


def refuse_secret(url: str) -> None:
    """Check that a URL contains no user, no password and no query parameter that may be a secret.

    A path without `scheme://` passes. Each URL of a chain such as `zip://a::https://host/b.zip` is
    checked.

    >>> refuse_secret("s3://bucket/dumps/part-?.bz2")

    Raises:
        UsageError: The URL may contain a secret; the message names the environment variable to use
            instead.
    """
    visible_url = _INVISIBLE.sub("", url)  # libraries ignore these characters too
    if scheme_match := _SCHEME_WITHOUT_HOST.match(visible_url):
        raise _create_secret_error(scheme_match["scheme"].lower(), "has no host after //")
    url_matches = [url_match for url_match in map(_URL.match, visible_url.split("::")) if url_match]
    for match in url_matches:
        scheme = match["scheme"].lower()
        if _has_user_info(match["host"]):
            raise _create_secret_error(scheme, "names a user or a password")
        parameters = list(_iter_parameters(scheme, match["rest"]))
        if not HARMLESS_PARAMETERS.issuperset(parameters) or len(set(parameters)) < len(parameters):
            raise _create_secret_error(
                scheme, f"has a query parameter other than {', '.join(sorted(HARMLESS_PARAMETERS))}"
            )
    if user_match := _USER_ANYWHERE.search(visible_url):
        scheme = url_matches[-1]["scheme"] if url_matches else user_match["scheme"]
        raise _create_secret_error(scheme.lower(), "names a user or a password")


def build_secret_pattern() -> str:
    """Return a regular expression that matches within every text that `refuse_secrets` rejects.

    The JSON schemas of Prefect's run forms contain this pattern, because Prefect's server checks a
    form without this code. It may also match unusual spellings of URLs without secrets.
    """
    # A text may be a URL or a chain of URLs, in which blanks are ignored. A URL within a longer
    # text ends at a blank or a quotation mark.
    blank_pattern = r"[\x00-\x20\x7f]*"
    url_patterns = [
        *_build_url_patterns(rf"(?:^|::){blank_pattern}", blank_pattern, ""),
        *_build_url_patterns(r"(?<![\w+.-])", "", r"\s\"'<>"),
    ]
    scheme_without_host = blank_pattern.join(["^", "[hH]", "[tT]", "[tT]", "[pP]", "[sS]?", ":"])
    return "|".join(
        [
            rf"{scheme_without_host}(?!{blank_pattern}[/\\:])",
            rf":{blank_pattern}[/\\]{blank_pattern}[/\\][^/\\?#]*@",
            *url_patterns,
        ]
    )


def _build_url_patterns(start: str, blank_pattern: str, stops: str) -> list[str]:
    """Return patterns of URLs with a user, with an invalid port, or with unknown query parameters.

    Args:
        start: pattern of the text before a scheme.
        blank_pattern: pattern of the characters that are ignored within a URL.
        stops: characters at which the URL ends, for a character class.
    """
    slashes, host_character = rf"{blank_pattern}(?:[/\\]{blank_pattern})+", rf"[^/\\?#{stops}]"
    harmless, end = "|".join(sorted(HARMLESS_PARAMETERS)), rf"(?:[=?&;#{stops}]|(?![\s\S]))"
    glob_start = rf"(?i:{'|'.join(sorted(_GLOB_SCHEMES))}){blank_pattern}:"
    scheme = rf"{start}[A-Za-z]{blank_pattern}(?:[\w+.-]{blank_pattern})+:{slashes}"
    glob_scheme = rf"{start}{glob_start}{slashes}"
    other_scheme = rf"{start}(?!{glob_start})[A-Za-z]{blank_pattern}(?:[\w+.-]{blank_pattern})+:{slashes}"
    url_character = rf"[^{stops}]" if stops else r"[\s\S]"
    return [
        rf"{scheme}{host_character}*(?:@|%40)",
        # An IPv6 address in brackets and an ARN contain colons too.
        rf"{scheme}(?!arn:)(?:\[[^\]/\\?#]*\]|(?!\[[^\]/\\?#]*\]))"
        rf"(?:(?!%3[aA])[^/\\?#:{stops}])*"
        rf"(?::(?!:)\d*(?::(?!:)|[^\d/\\?#:{stops}])|%3[aA]\d*[^\d/\\?#{stops}])",
        rf"{glob_scheme}[^?{stops}]*\?(?:{url_character}*[?&;])?(?!(?:{harmless})=)[^?&;/={stops}]*=",
        rf"{other_scheme}[^?#{stops}]*[?#](?:{url_character}*[?&;#])?(?!(?:{harmless}){end})[^?&;#{stops}]",
        rf"{other_scheme}[^?#{stops}]*[;&][^/;&=?#{stops}]*=",
        # If a harmless parameter is repeated, its second value may be a secret.
        *(
            rf"{scheme}{url_character}*[?&;#]{name}{end}{url_character}*(?<=[?&;#]){name}{end}"
            for name in sorted(HARMLESS_PARAMETERS)
        ),
    ]


def refuse_url_as_path(path: Path) -> None:
    """Check that a local path is not a URL.

    Raises:
        UsageError: The path starts like a URL; the message does not repeat it, since it may contain
            a secret.
    """
    if _URL_PREFIX.match(str(path)):
        raise UsageError("a URL was given instead of a local path: give a folder or a file of this machine")


def refuse_secrets(value: object) -> None:
    """Check every string in a nested value with `refuse_secret`.

    Raises:
        UsageError: A string contains a URL that may contain a secret.
    """
    for text in _iter_strings(value):
        refuse_secret(text)
        for url in _EMBEDDED_URL.findall(text):
            refuse_secret(url)


def mask_secrets(text: str) -> str:
    """Replace every secret that this process knows by `***`.

    >>> mask_secrets("cannot reach s3://me:hush@bucket/library?X-Amz-Signature=0f")
    'cannot reach s3://***@bucket/library?***'
    """
    for secret in _list_environment_secrets():
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1\2***", _USER.sub("***@", text))


def _has_user_info(host: str) -> bool:
    """Return whether a URL's authority contains more than a host and a port."""
    decoded_host = unquote(host)
    # The port follows the brackets of an IPv6 address.
    port = decoded_host.rpartition("]")[2].partition(":")[2]
    return "@" in decoded_host or (bool(port) and not port.isdigit() and not decoded_host.startswith("arn:"))


def _iter_parameters(scheme: str, url_rest: str) -> Iterator[str]:
    """Yield the names of the query parameters; `url_rest` is the part of a URL after its host."""
    path, _, query = url_rest.partition("?")
    if scheme in _GLOB_SCHEMES:
        parameters = [parameter for parameter in re.split(r"[?&;]", query) if "=" in parameter.partition("/")[0]]
    else:
        before_fragment, _, fragment = path.partition("#")
        path_parameters = re.findall(r"[;&][^/;&=]*=", before_fragment)
        parameters = [
            parameter for parameter in (*re.split(r"[?&;#]", f"{query}#{fragment}"), *path_parameters) if parameter
        ]
    yield from (parameter.partition("=")[0] for parameter in parameters)


def _create_secret_error(scheme: str, problem: str) -> UsageError:
    variable = (
        _CREDENTIAL_VARIABLES.get(scheme)
        or f"FSSPEC_{re.sub(r'[^A-Z0-9]', '_', scheme.upper())} (fsspec settings as JSON)"
    )
    return UsageError(
        f"the {scheme} URL {problem}, which may be a secret and would be written into logs and "
        f"manifests: leave it out, and set {variable} in the environment"
    )


def _iter_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _iter_strings([*value.items()])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _iter_strings([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Iterable) and not isinstance(value, bytes):
        for item in value:
            yield from _iter_strings(item)


def _list_environment_secrets() -> list[str]:
    # Another thread may unset a variable during the iteration.
    values = [os.environ.get(name, "") for name in [*os.environ] if _SECRET_NAMES.search(name)]
    secrets = {value for value in values if len(value) >= _MIN_SECRET_LENGTH}
    secrets.update(match for value in tuple(secrets) for match in _AZURE_SECRET.findall(value))
    return sorted(secrets, key=len, reverse=True)  # longest first: one secret may contain another
