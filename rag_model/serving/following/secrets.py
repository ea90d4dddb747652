"""Keep secrets out of what is logged and told: credentials in addresses, and the values of variables that hold them."""

import os
import re

_USER = re.compile(r"(?<=://)[^/@\s]+@")  # user:password@ of an address
_QUERY = re.compile(r"(://[^\s?]*)\?[^\s)\"']+")  # what signs an address
_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_KEY", re.IGNORECASE)
_SHORTEST = 6  # characters; shorter values are words


def without_secrets(text: str) -> str:
    """Return `text` with `***` in place of every secret that this process knows.

    >>> without_secrets("cannot reach s3://me:hush@bucket/library?X-Amz-Signature=0f")
    'cannot reach s3://***@bucket/library?***'
    """
    for value in _secrets():
        text = text.replace(value, "***")
    return _QUERY.sub(r"\1?***", _USER.sub("***@", text))


def _secrets() -> list[str]:
    found = {value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)  # what contains another goes first
