"""The web page of the service: a search box, passages, and which passages an answer was read from.

The page is three files. Its policy forbids the browser to load, send or run anything from elsewhere, so HTML or script
in a passage or a question is shown as text and cannot run.
"""

from importlib.resources import files

from fastapi import APIRouter, Response

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # a linked site does not learn the question
    "Cache-Control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

router = APIRouter(include_in_schema=False)


@router.get("/")
def page() -> Response:
    """Return the page."""
    return _file("html")


@router.get("/page.css")
def sheet() -> Response:
    """Return the style sheet."""
    return _file("css")


@router.get("/page.js")
def script() -> Response:
    """Return the script."""
    return _file("js")


def _file(kind: str) -> Response:
    content = (files("rag_model.serving.http") / f"page.{kind}").read_bytes()
    return Response(content, headers=_HEADERS, media_type=_TYPES[kind])
