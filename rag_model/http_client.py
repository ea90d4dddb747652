"""HTTP clients of httpx, which also read proxies and certificates from the environment."""

from typing import Any, TypeVar

import httpx

from rag_model.errors import UsageError, reason

_Kind = TypeVar("_Kind", httpx.Client, httpx.AsyncClient)


def http_client(kind: type[_Kind], **settings: Any) -> _Kind:
    """Return a client of a kind.

    Raises:
        UsageError: a proxy or a certificate file that the environment names cannot be used.
    """
    try:
        return kind(**settings)
    except (ValueError, ImportError, OSError, httpx.InvalidURL) as wrong:
        raise UsageError(
            f"the proxy or the certificates that the environment names cannot be used ({reason(wrong)}): correct "
            "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE or SSL_CERT_DIR"
        ) from wrong
