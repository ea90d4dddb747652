"""A failure as a reply: one sentence."""

from collections.abc import Mapping

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

_AGAIN = {429: "1", 503: "2"}  # seconds until it is worth asking again


class Problem(BaseModel):
    """Why there is no reply."""

    detail: str = Field(description="One sentence: what, and what to do.")


def problem(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply of a failure."""
    again = {"Retry-After": _AGAIN[status]} if status in _AGAIN else {}
    return JSONResponse({"detail": sentence}, status, {**again, **(headers or {})})
