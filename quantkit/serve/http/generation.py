"""One HTTP request's continuations, from the engine's outputs to pieces of an answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from quantkit.errors import EngineError
from quantkit.serve.async_engine import EngineStoppedError, RequestStream
from quantkit.serve.http.errors import AnswerFormError
from quantkit.serve.http.prometheus import ServerMetrics
from quantkit.serve.next_tokens import NO_TOKEN
from quantkit.serve.outputs import RequestOutput, TokenLogprobs
from quantkit.serve.structured.compiler import CompiledGrammar
from quantkit.serve.structured.matcher import FormError
from quantkit.serve.structured.post_validation import AnswerValidator
from quantkit.serve.structured.tool_calls import AnswerParser, ToolCall

REPAIRED_BELOW = 0.99  # mean probability of the legal tokens below which a valid answer counts as repaired
FORM_ERROR = f"{FormError.__name__}: "  # so the engine begins what a form's error says
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one continuation.

    Attributes:
        index: which one.
        text: words for the user.
        tool_calls: that became whole.
        token_ids: new ones.
        logprobs: of the new tokens, if asked for.
        prompt_logprobs: of the prompt's, if asked for, in the first piece.
        finish_reason: ``stop``, ``length`` or ``tool_calls`` in the last piece.
        stop_reason: the stop string or token that ended it.
        structured: how the answer keeps to its form, in the last piece of a structured answer.
    """

    index: int
    text: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None
    structured: dict[str, Any] | None


class Generation:
    """Reads a stream of outputs to the end, and counts.

    Args:
        stream: of the engine.
        num_prompt_tokens: of all prompts together.
        make_parser: makes the parser of one continuation.
        grammar: the form that was asked for.
        validator: of structured answers.
        metrics: to count in.
    """

    def __init__(
        self,
        stream: RequestStream,
        num_prompt_tokens: int,
        make_parser: Callable[[], AnswerParser],
        grammar: CompiledGrammar | None,
        validator: AnswerValidator,
        metrics: ServerMetrics,
    ) -> None:
        self._stream = stream
        self._num_prompt_tokens = num_prompt_tokens
        self._make_parser = make_parser
        self._grammar = grammar
        self._validator = validator
        self._metrics = metrics
        self._parsers: dict[int, AnswerParser] = {}
        self._texts: dict[int, str] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._has_calls: set[int] = set()
        self._has_failed = False
        self._num_new_tokens = 0
        self._num_cached_tokens: dict[str, int] = {}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far, in OpenAI's words."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_new_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_new_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }

    def abort(self) -> None:
        """Nobody reads on: end what is not finished."""
        if self._stream.is_open:
            self._metrics.disconnects += not self._has_failed
            self._stream.abort()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """All pieces until every continuation has ended.

        Raises:
            EngineError: a continuation failed; the others are ended.
            AnswerFormError: the form that was asked for left a continuation no token.
        """
        async for output in self._stream:
            if output.finish_reason in ("error", "abort"):
                self._has_failed = True
                self._stream.abort()
                if output.finish_reason == "abort":
                    raise EngineStoppedError("the server is shutting down and has ended this request")
                if self._grammar is not None and _is_of_the_form(output.error or ""):
                    raise AnswerFormError(str(output.error).removeprefix(FORM_ERROR))
                raise EngineError(f"the request failed: {output.error}")
            yield await self._piece(output)

    async def _piece(self, output: RequestOutput) -> Piece:
        index = output.index
        self._num_new_tokens += len(output.token_ids)
        self._num_cached_tokens[output.request_id] = output.num_cached_tokens
        parser = self._parsers.setdefault(index, self._make_parser())
        self._texts[index] = self._texts.get(index, "") + output.text
        if self._grammar is not None:
            self._token_ids.setdefault(index, []).extend(output.token_ids)
        text, calls = parser.feed(output.text)
        finish_reason, structured = output.finish_reason, None
        reason: str | None = finish_reason
        if finish_reason is not None:
            rest, more = parser.finish()
            text, calls = text + rest, [*calls, *more]
            if self._grammar is not None:
                structured = await self._judge(output, self._grammar)
        self._metrics.tool_calls += len(calls)
        if calls:
            self._has_calls.add(index)
        if finish_reason == "stop" and index in self._has_calls:
            reason = "tool_calls"
        return Piece(
            index=index,
            text=text,
            tool_calls=tuple(calls),
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=reason,
            stop_reason=output.stop_reason,
            structured=structured,
        )

    async def _judge(self, output: RequestOutput, grammar: CompiledGrammar) -> dict[str, Any]:
        """Validate a whole answer, and count it; one that was cut off is not valid, whatever it reads like."""
        is_valid: bool | None = False
        if output.finish_reason != "length":
            token_ids: list[int] | None = self._token_ids[output.index]
            if isinstance(output.stop_reason, str):
                token_ids = None  # the tokens hold the stop string, which is no part of the answer
            elif token_ids and token_ids[-1] == output.stop_reason:
                token_ids = token_ids[:-1]
            is_valid = await asyncio.to_thread(self._validator.is_valid, grammar, self._texts[output.index], token_ids)
        self._metrics.structured["unknown" if is_valid is None else str(is_valid).lower()] += 1
        self._metrics.truncated += output.finish_reason == "length"
        is_held_up = output.legal_mass is not None and output.legal_mass < REPAIRED_BELOW
        self._metrics.repaired += is_valid is True and is_held_up
        return {
            "schema_valid": is_valid,
            "unenforced": list(grammar.unenforced),
            "num_forced_tokens": output.num_forced_tokens,
            "legal_mass": output.legal_mass,
        }


def _is_of_the_form(error: str) -> bool:
    """True for what the engine says of a form that leaves no token, and not for a failure of its own."""
    return error.startswith((FORM_ERROR, NO_TOKEN))
