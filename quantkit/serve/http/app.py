"""The application: endpoints, limits and errors put together around one engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from quantkit import __version__
from quantkit.serve.engine import Engine
from quantkit.serve.http import chat_completions, completions, tokens
from quantkit.serve.http.errors import error_response, install_error_handlers
from quantkit.serve.http.limits import RequestLimits
from quantkit.serve.http.prometheus import CONTENT_TYPE
from quantkit.serve.http.service import Service
from quantkit.serve.http.streaming import ClientGoneError

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads it but the metrics
ERROR_FIELDS: Mapping[str, str | list[str]] = {
    "message": "string",
    "type": "string",
    "param": ["string", "null"],
    "code": ["string", "null"],
}
router = APIRouter()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server behaves.

    Attributes:
        model_name: under which the model is served.
        api_key: that requests must carry as a bearer token; None for no key.
        max_body_bytes: of a request.
        drain_s: seconds that requests have to end when the server stops.
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 4 * 2**20
    drain_s: float = 30.0


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 if requests are taken, otherwise 503."""
    service: Service = request.app.state.service
    return Response() if service.engine.is_running else error_response(503, "the engine takes no requests")


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model_card(request.app.state.service)]}


@router.get("/v1/models/{name:path}")
async def describe_model(name: str, request: Request) -> dict[str, Any]:
    """The one model that is served, asked for by name."""
    service: Service = request.app.state.service
    service.require_model(name)
    return _model_card(service)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "quantkit",
        "max_model_len": service.engine.engine.max_model_len,
    }


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service: Service = request.app.state.service
    return PlainTextResponse(await service.metrics_page(), media_type=CONTENT_TYPE)


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application; its lifespan starts and drains the engine's thread.

    Args:
        engine: nobody else may use it from now on.
        config: of the server.
    """
    service = Service(engine, config.model_name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.close(config.drain_s)

    app = FastAPI(title="quantkit", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.openapi = partial(_describe, app)  # type: ignore[method-assign]
    for part in (router, completions.router, chat_completions.router, tokens.router):
        app.include_router(part)
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_middleware(RequestLimits, max_body_bytes=config.max_body_bytes, api_key=config.api_key)
    app.add_middleware(CountResponses, service=service, paths=set(app.openapi()["paths"]))
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """The description of all requests; what FastAPI would answer with 422 is our error object with 400."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = described["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        fields = {name: {"type": kind} for name, kind in ERROR_FIELDS.items()}
        error = {"type": "object", "properties": fields, "required": list(fields)}
        schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for operations in described["paths"].values():
            for operation in operations.values():
                if operation["responses"].pop("422", None) is not None:
                    operation["responses"]["400"] = {"description": "The request is wrong", "content": content}
        app.openapi_schema = described
    return app.openapi_schema


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class CountResponses:
    """ASGI middleware that counts answers by path and status.

    Args:
        app: what comes after.
        service: whose metrics they are.
        paths: that are known; all others are counted as one.
    """

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service, paths: set[str]
    ) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and look at the status."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._service.metrics.responses[path, message["status"]] += 1
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:
            if self._service.engine.is_running:
                raise
            return  # the server gives up on this request at its end; that is no failure of the application's
