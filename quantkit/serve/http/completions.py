"""The endpoint /v1/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quantkit.errors import EngineError, UsageError
from quantkit.serve.http.errors import code_of, error_body, status_of
from quantkit.serve.http.fields import about
from quantkit.serve.http.generation import Generation, Piece
from quantkit.serve.http.protocol_completions import CompletionRequest
from quantkit.serve.http.service import Service
from quantkit.serve.http.streaming import DONE, EventStream, event, while_connected
from quantkit.serve.http.token_text import TokenText, completion_logprobs, prompt_logprobs
from quantkit.serve.structured.tool_calls import PlainText

router = APIRouter()


class _Writer:
    """Puts pieces into OpenAI's words.

    Args:
        service: that serves the model.
        texts: of single tokens; None if no log-probabilities were asked for.
    """

    def __init__(self, service: Service, texts: TokenText | None) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._texts = texts
        self._offsets: dict[int, int] = {}

    def document(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole answer, or an event of a stream."""
        return {**self._head, "choices": choices, **more}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """One piece."""
        choice: dict[str, Any] = {"index": piece.index, "text": piece.text, "logprobs": None}
        if self._texts is not None and piece.logprobs is not None:
            offset = self._offsets.get(piece.index, 0)
            choice["logprobs"] = completion_logprobs(self._texts, piece.token_ids, piece.logprobs, offset)
            self._offsets[piece.index] = offset + sum(len(token) for token in choice["logprobs"]["tokens"])
        if self._texts is not None and piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, piece.prompt_logprobs)
        choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        return choice if piece.structured is None else {**choice, "structured": piece.structured}


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    service: Service = request.app.state.service
    service.require_running()
    service.require_model(body.model)
    params = body.sampling_params()
    with about("prompt"):
        prompts = [await service.prompt_tokens(one) if isinstance(one, str) else one for one in body.prompts()]
    wants_texts = params.logprobs is not None or params.prompt_logprobs is not None
    writer = _Writer(service, await service.token_text() if wants_texts else None)
    generation = await service.begin(body, "prompt", prompts, params, PlainText)
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_events(generation, writer, has_usage), generation.abort)
    try:
        choices = await while_connected(request.receive, _collect(generation, writer))
    finally:
        generation.abort()
    return JSONResponse(writer.document(choices, usage=generation.usage))


async def _events(generation: Generation, writer: _Writer, has_usage: bool) -> AsyncGenerator[str, None]:
    try:
        async for piece in generation.pieces():
            if piece.text or piece.logprobs or piece.finish_reason:
                yield event(writer.document([writer.choice(piece)]))
        if has_usage:
            yield event(writer.document([], usage=generation.usage))
    except (EngineError, UsageError) as error:
        yield event(error_body(status_of(error), str(error), code=code_of(error)))
    yield event(DONE)


async def _collect(generation: Generation, writer: _Writer) -> list[dict[str, Any]]:
    """Every choice as if all of its pieces were one."""
    choices: dict[int, dict[str, Any]] = {}
    async for piece in generation.pieces():
        choice = writer.choice(piece)
        before = choices.get(piece.index)
        if before is not None:
            choice["text"] = before["text"] + choice["text"]
            choice["logprobs"] = _joined(before["logprobs"], choice["logprobs"])
            if "prompt_logprobs" in before:
                choice["prompt_logprobs"] = before["prompt_logprobs"]
        choices[piece.index] = choice
    return [choices[index] for index in sorted(choices)]


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first if second is None else second
    return {name: first[name] + second[name] for name in first}
