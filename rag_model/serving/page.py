"""The page that lets a person look: a search box, passages, and what an answer was read from.

Three files of ours and nothing else: the policy forbids the browser to load, send or run anything from elsewhere, so
what a passage or a question holds is shown and can't act.
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
    "Referrer-Policy": "no-referrer",  # whom a reader goes to does not learn what was asked
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
    """Return how it looks."""
    return _file("css")


@router.get("/page.js")
def script() -> Response:
    """Return what it does."""
    return _file("js")


def _file(kind: str) -> Response:
    content = (files("rag_model.serving") / f"page.{kind}").read_bytes()
    return Response(content, headers=_HEADERS, media_type=_TYPES[kind])
