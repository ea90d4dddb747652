"""Whether the service lives and can answer: for the machines that start, stop and watch it.

The same three paths are served at the service's own port and, where one is given, at a port for health alone, which
clients of the service cannot use up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rag_model.serving.http.problems import Problem, problem
from rag_model.serving.service import Service
from rag_model.serving.told import unready


@dataclass(frozen=True, slots=True)
class Exposition:
    """What /metrics replies."""

    text: Callable[[], bytes]
    media_type: str = "text/plain"


def create_health_app(service: Service, metrics: Exposition | None = None) -> FastAPI:
    """Return the application of the port for health alone."""
    app = FastAPI(title="bookwheel health", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_health(app, service, metrics)
    return app


def add_health(app: FastAPI, service: Service, metrics: Exposition | None = None) -> None:
    """Add the paths to an application; without `metrics` there is no /metrics."""

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "alive"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readyz() -> Response:
        """Say whether questions can be answered."""
        return JSONResponse({"status": "ready"}) if service.ready else problem(503, unready(service))

    if metrics is not None:
        exposition = metrics

        @app.get("/metrics", response_class=PlainTextResponse)
        def exposed() -> Response:
            """Return the metrics of this service in Prometheus' text format."""
            return Response(exposition.text(), media_type=exposition.media_type)
