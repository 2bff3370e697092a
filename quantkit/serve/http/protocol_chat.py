"""The body of /v1/chat/completions."""

import json
from typing import Any, Literal

from pydantic import Field

from quantkit.errors import UsageError
from quantkit.serve.http.fields import renamed
from quantkit.serve.http.protocol_sampling import GenerationRequest, Strict
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.spec import StructuredOutput


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """Which function was called, and how."""

    name: str
    arguments: str = Field(description="JSON text.")


class MessageToolCall(Strict):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: text in one piece, arguments as objects.

        Raises:
            UsageError: it says nothing.
        """
        if self.content is None and not self.tool_calls:
            raise UsageError(f"messages: a message of the {self.role} has no content")
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict, description="JSON Schema of the arguments.")
    strict: bool | None = None


class Tool(Strict):
    """Something that the model may use; only functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """A function's name."""

    name: str


class NamedTool(Strict):
    """The one function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest):
    """A request for the assistant's next turn."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, description="The same as max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, description="So many most likely tokens; needs logprobs=true.")
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false needs tool_choice required or a function.")

    def offered_tools(self) -> list[Tool]:
        """The functions that the model gets to see.

        Raises:
            UsageError: tools and tool_choice do not fit together.
        """
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise UsageError("tools: two functions have the same name")
        if not tools and self.tool_choice not in (None, "none"):
            raise UsageError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise UsageError(f"tool_choice: there is no function {self.tool_choice.function.name!r} in tools")
        is_forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        if tools and self.parallel_tool_calls is False and not is_forced:
            raise UsageError("parallel_tool_calls=false is not supported with tool_choice=auto")
        return [] if self.tool_choice == "none" else tools

    def forced_tools(self) -> list[Tool]:
        """The functions of which one has to be called; empty if the model may choose."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered_tools() if tool.function.name == self.tool_choice.function.name]
        return self.offered_tools() if self.tool_choice == "required" else []

    def sampling_params(self, forced_call: StructuredOutput | None) -> SamplingParams:
        """As the engine knows it; max_tokens is all that there is room for unless given.

        Args:
            forced_call: the form of a call that has to be made.

        Raises:
            UsageError: a value is out of range or not supported.
        """
        self.require_consistent()
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise UsageError("max_tokens and max_completion_tokens differ", fix="give one of them")
        form = self.form()
        if form is not None and forced_call is not None:
            raise UsageError("the answer is a call of a function and cannot have another form")
        is_completion = self.max_tokens is None
        limit = "max_completion_tokens" if is_completion else "max_tokens"
        with renamed({"logprobs": "top_logprobs", "max_tokens": limit}):
            return self.sampling(
                max_tokens=self.max_completion_tokens if is_completion else self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                structured=forced_call if forced_call is not None else form,
            )


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
