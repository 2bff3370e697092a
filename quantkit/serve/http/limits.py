"""What stands before every request: the key, and the size of the body."""

import hmac
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.serve.http.errors import error_response

OPEN_PATHS = ("/health",)  # for probes that know no key


class RequestLimits:
    """ASGI middleware that refuses requests without the key, and bodies that are too large.

    Args:
        app: what comes after.
        max_body_bytes: of a body.
        api_key: that requests must carry as a bearer token; None for no key.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, api_key: str | None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not self._is_authorized(scope["path"], headers):
            await error_response(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong", code="invalid_api_key")(
                scope, receive, send
            )
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            await error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes"

    def _is_authorized(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        if self._api_key is None or path in OPEN_PATHS:
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key.encode())

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
            return message

        return counted
