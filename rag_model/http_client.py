"""Create httpx clients, which read proxies and certificates from the environment."""

from typing import Any, TypeVar

import httpx

from rag_model.errors import UsageError, format_error

_Client = TypeVar("_Client", httpx.Client, httpx.AsyncClient)


def create_http_client(client_class: type[_Client], **settings: Any) -> _Client:
    """Create a synchronous or asynchronous client.

    Raises:
        UsageError: A proxy or a certificate file from the environment is unusable.
    """
    try:
        return client_class(**settings)
    except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
        raise UsageError(
            "the proxy or the certificates from the environment are unusable "
            f"({format_error(error)}): correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, "
            "SSL_CERT_FILE or SSL_CERT_DIR"
        ) from error
