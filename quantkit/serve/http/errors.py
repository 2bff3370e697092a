"""Every failure as OpenAI's error object with the right status; a wrong request is never a 500."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from quantkit.errors import EngineError, QueueFullError, UsageError
from quantkit.serve.async_engine import EngineStoppedError
from quantkit.serve.http.fields import FieldError, first_word
from quantkit.serve.http.protocol_chat import ChatRequest
from quantkit.serve.http.protocol_completions import CompletionRequest

MAX_MESSAGE = 2000  # characters
UNREADABLE = "There was an error parsing the body"  # all that FastAPI says of what json refuses otherwise than as JSON
logger = logging.getLogger(__name__)
Handler = Callable[[Request, Any], Awaitable[Response]]
HEADERS: Mapping[int, Mapping[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
}
TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}


class ModelNotFoundError(UsageError):
    """A request for another model than the one that is served."""


class AnswerFormError(UsageError):
    """An answer that could not go on: the form that was asked for, with the other parameters, left no token."""


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    # Half a surrogate pair may come back from a request, and no answer can carry it.
    text = message.encode("utf-8", "backslashreplace").decode()[:MAX_MESSAGE]
    place = None if param is None else param.encode("utf-8", "backslashreplace").decode()[:MAX_MESSAGE]
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": text, "type": kind, "param": place, "code": code}}


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    """A whole answer that says what went wrong."""
    return JSONResponse(
        error_body(status, message, param=param, code=code), status_code=status, headers=HEADERS.get(status)
    )


def status_of(error: Exception) -> int:
    """The status that an exception of the engine's or ours deserves."""
    if isinstance(error, ModelNotFoundError):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, UsageError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, QueueFullError):
        return HTTPStatus.TOO_MANY_REQUESTS
    if isinstance(error, EngineStoppedError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def code_of(error: Exception) -> str | None:
    """The code that programs tell an exception by."""
    if isinstance(error, ModelNotFoundError):
        return "model_not_found"
    return "answer_form" if isinstance(error, AnswerFormError) else None


def param_of(error: Exception) -> str | None:
    """The field of a request that an exception is about: it says so, or its message begins with the name."""
    if isinstance(error, FieldError):
        return error.param
    if isinstance(error, ModelNotFoundError):
        return "model"
    word = first_word(error)
    known = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()
    return word if isinstance(error, UsageError) and word in known else None


def install_error_handlers(app: FastAPI) -> None:
    """Make the application answer every exception in OpenAI's form."""

    async def on_wrong_body(_request: Request, error: RequestValidationError) -> Response:
        param, message = _first_problem(error)
        return error_response(HTTPStatus.BAD_REQUEST, message, param=param)

    async def on_http(_request: Request, error: HTTPException) -> Response:
        is_unreadable = error.status_code == HTTPStatus.BAD_REQUEST and error.detail == UNREADABLE
        text = "the body cannot be read: it nests too deep, or a number has thousands of digits"
        response = error_response(error.status_code, text if is_unreadable else str(error.detail))
        response.headers.update(error.headers or {})
        return response

    async def on_known(_request: Request, error: Exception) -> Response:
        return error_response(status_of(error), str(error), param=param_of(error), code=code_of(error))

    async def on_bug(_request: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, f"the server failed: {type(error).__name__}")

    handlers: list[tuple[type[Exception], Handler]] = [
        (RequestValidationError, on_wrong_body),
        (HTTPException, on_http),
        (UsageError, on_known),
        (EngineError, on_known),
        (Exception, on_bug),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)


def _first_problem(error: RequestValidationError) -> tuple[str | None, str]:
    """Where the body is wrong and how: an unknown field first, since it is the surest finding."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    place = _place(problem, error.body)
    if problem["type"] == "extra_forbidden":
        return place, f"{place}: there is no such field"
    if problem["type"] == "json_invalid":
        return None, f"the body is no JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
    if problem["type"] == "string_unicode":
        return place or None, f"{place or 'the body'}: the name of a field is not UTF-8 text"
    if not place:
        return None, "the body is no JSON object (send it with Content-Type: application/json)"
    reasons = dict.fromkeys(str(other["msg"]) for other in problems if _place(other, error.body) == place)
    return place, f"{place}: {'; or: '.join(reasons)}"  # a field of several types has a reason for each


def _place(problem: Mapping[str, Any], body: Any) -> str:
    """Where in the body it is, without pydantic's names for the types of a field that may have several."""
    parts, node = [], body
    loc = [part for part in problem["loc"] if part != "body"]
    for number, part in enumerate(loc):
        is_key = isinstance(node, dict) and part in node
        is_item = isinstance(node, list) and isinstance(part, int)
        is_missing = problem["type"] == "missing" and number == len(loc) - 1
        if is_key or is_item:
            node = node[part] if is_key or part < len(node) else None
        elif not is_missing:
            continue
        parts.append(str(part))
    return ".".join(parts)
