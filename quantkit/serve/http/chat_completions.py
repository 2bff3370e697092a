"""The endpoint /v1/chat/completions."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quantkit.errors import EngineError, UsageError
from quantkit.serve.chat import require_text
from quantkit.serve.http.errors import code_of, error_body, status_of
from quantkit.serve.http.fields import about
from quantkit.serve.http.generation import Generation, Piece
from quantkit.serve.http.protocol_chat import ChatRequest
from quantkit.serve.http.service import Service
from quantkit.serve.http.streaming import DONE, EventStream, event, while_connected
from quantkit.serve.http.token_text import TokenText, chat_logprobs, prompt_logprobs
from quantkit.serve.structured.tool_calls import (
    OPEN_TAG,
    AnswerParser,
    ForcedCallParser,
    PlainText,
    ToolCallParser,
    ToolStyle,
    forced_call,
    offers_tools,
    tool_prompt,
    tool_style,
)

router = APIRouter()


class _Writer:
    """Puts pieces into OpenAI's words.

    Args:
        service: that serves the model.
        texts: of single tokens; None if no log-probabilities were asked for.
    """

    def __init__(self, service: Service, texts: TokenText | None) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model_name}
        self._texts = texts
        self._num_calls: dict[int, int] = {}

    def document(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole answer, or an event of a stream."""
        return {**self._head, "object": kind, "choices": choices, **more}

    def tool_calls(self, piece: Piece) -> list[dict[str, Any]]:
        """The calls of a piece, numbered over the whole answer."""
        first = self._num_calls.get(piece.index, 0)
        self._num_calls[piece.index] = first + len(piece.tool_calls)
        return [
            {
                "index": first + number,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(piece.tool_calls)
        ]

    def logprobs(self, piece: Piece) -> list[dict[str, Any]] | None:
        """Of the tokens of a piece."""
        if self._texts is None or piece.logprobs is None:
            return None
        return chat_logprobs(self._texts, piece.token_ids, piece.logprobs)

    def prompt_logprobs(self, piece: Piece) -> list[dict[str, Any] | None] | None:
        """Of the prompt, in the first piece."""
        if self._texts is None or piece.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._texts, piece.prompt_logprobs)


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Give the assistant's next turn of a chat."""
    service: Service = request.app.state.service
    service.require_running()
    service.require_model(body.model)
    offered, forced = body.offered_tools(), body.forced_tools()
    style = tool_style(service.engine.engine.chat.text)
    functions = [tool.function.model_dump(include={"name", "parameters"}) for tool in forced]
    params = body.sampling_params(forced_call(functions, style) if forced else None)
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in offered]
    with about("tools"):
        require_text(json.dumps(tools, ensure_ascii=False), "a function")
    with about("messages"):
        prompt = await _prompt(service, body, tools)
    if forced and style == "hermes":
        prompt += await service.tokenize(f"{OPEN_TAG}\n", add_special_tokens=False)
    parser = _parser(style, [tool.function.name for tool in offered], is_forced=bool(forced))
    wants_texts = params.logprobs is not None or params.prompt_logprobs is not None
    writer = _Writer(service, await service.token_text() if wants_texts else None)
    generation = await service.begin(body, "messages", [prompt], params, parser)
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_events(generation, writer, params.n, has_usage), generation.abort)
    try:
        choices = await while_connected(request.receive, _collect(generation, writer))
    finally:
        generation.abort()
    return JSONResponse(writer.document("chat.completion", choices, usage=generation.usage))


def _parser(style: ToolStyle, names: Sequence[str], *, is_forced: bool) -> Callable[[], AnswerParser]:
    """Makes what reads one answer, given the names of the functions that were offered."""
    if not names:
        return PlainText
    return partial(ForcedCallParser if is_forced else ToolCallParser, style, names)


async def _prompt(service: Service, body: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """The chat as token ids, with the functions where the model looks for them."""
    messages = [message.for_template() for message in body.messages]
    if not tools or offers_tools(service.engine.engine.chat.text):
        return await service.render(messages, tools or None)
    system = tool_prompt(tools)
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{system}"}
    else:
        messages.insert(0, {"role": "system", "content": system})
    return await service.render(messages, None)


async def _events(
    generation: Generation, writer: _Writer, num_choices: int, has_usage: bool
) -> AsyncGenerator[str, None]:
    kind = "chat.completion.chunk"
    for index in range(num_choices):
        yield event(writer.document(kind, [_delta(index, {"role": "assistant", "content": ""})]))
    try:
        async for piece in generation.pieces():
            delta: dict[str, Any] = {}
            if piece.text:
                delta["content"] = piece.text
            if piece.tool_calls:
                delta["tool_calls"] = writer.tool_calls(piece)
            logprobs = writer.logprobs(piece)
            if not (delta or logprobs or piece.finish_reason):
                continue
            choice = _delta(piece.index, delta) | _ending(piece)
            choice["logprobs"] = None if logprobs is None else {"content": logprobs}
            yield event(writer.document(kind, [choice]))
        if has_usage:
            yield event(writer.document(kind, [], usage=generation.usage))
    except (EngineError, UsageError) as error:
        yield event(error_body(status_of(error), str(error), code=code_of(error)))
    yield event(DONE)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _ending(piece: Piece) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": piece.finish_reason}
    if piece.finish_reason is not None:
        ending["stop_reason"] = piece.stop_reason
    return ending if piece.structured is None else {**ending, "structured": piece.structured}


async def _collect(generation: Generation, writer: _Writer) -> list[dict[str, Any]]:
    """Every choice from all of its pieces."""
    choices: dict[int, dict[str, Any]] = {}
    async for piece in generation.pieces():
        empty = {"index": piece.index, "message": {"role": "assistant", "content": ""}, "logprobs": None}
        choice = choices.setdefault(piece.index, empty)
        message = choice["message"]
        message["content"] += piece.text
        if piece.tool_calls:
            calls = [{key: value for key, value in call.items() if key != "index"} for call in writer.tool_calls(piece)]
            message["tool_calls"] = message.get("tool_calls", []) + calls
        logprobs = writer.logprobs(piece)
        if logprobs is not None:
            content = (choice["logprobs"] or {"content": []})["content"]
            choice["logprobs"] = {"content": content + logprobs}
        of_prompt = writer.prompt_logprobs(piece)
        if of_prompt is not None:
            choice["prompt_logprobs"] = of_prompt
        choice |= _ending(piece)
    for choice in choices.values():
        if "tool_calls" in choice["message"] and not choice["message"]["content"]:
            choice["message"]["content"] = None
    return [choices[index] for index in sorted(choices)]
