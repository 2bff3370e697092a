"""Functions that a model may call: how they are offered, forced, and read from its text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from quantkit.serve.structured.spec import StructuredOutput

ToolStyle = Literal["hermes", "llama3"]
AnswerParser: TypeAlias = "PlainText | ForcedCallParser | ToolCallParser"
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
ARGUMENTS_KEY: dict[ToolStyle, str] = {"hermes": "arguments", "llama3": "parameters"}
LLAMA3_MARK = "<|start_header_id|>"
# Keywords below which a value is data and not a schema.
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        name: of the function.
        arguments: as JSON text.
    """

    name: str
    arguments: str


def tool_style(chat_template: str) -> ToolStyle:
    """How models with such a template write calls.

    ``hermes`` (Hermes, Qwen, SmolLM2): JSON with name and arguments between tags. ``llama3``: an answer that is nothing
    but JSON with name and parameters. A template that says nothing of tools is taken for hermes.
    """
    return "llama3" if LLAMA3_MARK in chat_template and OPEN_TAG not in chat_template else "hermes"


def offers_tools(chat_template: str) -> bool:
    """True if the template shows tools to the model."""
    return "tools" in chat_template


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message that offers tools, for templates that do not."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. These are the functions, one JSON object a line:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call one, write a JSON object with its name and arguments between tags:\n"
        f'{OPEN_TAG}\n{{"name": "function name", "arguments": {{}}}}\n{CLOSE_TAG}'
    )


def forced_call(tools: Sequence[Mapping[str, Any]], style: ToolStyle) -> StructuredOutput:
    """The form of exactly one call of one of the functions.

    Args:
        tools: ``{"name": ..., "parameters": JSON Schema}`` of each function.
        style: decides the key of the arguments.
    """
    key = ARGUMENTS_KEY[style]
    alternatives = []
    for number, tool in enumerate(tools):
        place = f"#/anyOf/{number}/properties/{key}"
        alternatives.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, key: _moved(_object_schema(tool["parameters"]), place)},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return StructuredOutput.json_schema({"anyOf": alternatives})


def _object_schema(parameters: Any) -> Any:
    """Arguments are always an object; a function without parameters takes an empty one."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself still lead there when it lies at ``place`` of a larger one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in DATA_KEYWORDS else _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def parse_call(text: str, style: ToolStyle, names: Sequence[str]) -> ToolCall | None:
    """A call from its JSON; None if it is none, or of a function that was not offered."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get(ARGUMENTS_KEY[style], {})
    if isinstance(arguments, str):  # some models write the object as a string
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], _as_json(arguments)) if isinstance(arguments, dict) else None


def _as_json(value: Any) -> str:
    """JSON with characters as they are, but half surrogate pairs escaped, since no answer can carry those."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


class PlainText:
    """The parser of answers without calls."""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take more text; all of it is words for the user."""
        return text, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Nothing is left."""
        return "", []


class ForcedCallParser:
    """The parser of answers that are exactly one call, as `forced_call` has it.

    Args:
        style: of the model.
        names: of the functions.
    """

    def __init__(self, style: ToolStyle, names: Sequence[str]) -> None:
        self._style = style
        self._names = tuple(names)
        self._text = ""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take more text; nothing is certain before the end."""
        self._text += text
        return "", []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The call, or the text of one that is not whole."""
        call = parse_call(self._text, self._style, self._names)
        return (self._text, []) if call is None else ("", [call])


class ToolCallParser:
    """Parts a model's text into words for the user and calls, as the text comes.

    What it gives for a text does not depend on the pieces in which the text came. A call that is not whole, or that is
    of no function offered, is text like any other.

    Args:
        style: of the model.
        names: of the functions.
    """

    def __init__(self, style: ToolStyle, names: Sequence[str]) -> None:
        self._style = style
        self._names = tuple(names)
        self._held = ""
        self._gap = ""  # whitespace before an open tag, which belongs to the text if no call follows
        self._is_inside = False  # hermes: behind an open tag
        self._is_text = False  # llama3: it began with words, so no call will come
        self._has_calls = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take more text; the words that are certain now, and the calls that are whole."""
        self._held += text
        if self._style == "hermes":
            return self._read_tags()
        begin = self._held.lstrip()
        if not self._is_text and (not begin or begin.startswith("{")):
            return "", []
        self._is_text = True
        words, self._held = self._held, ""
        return words, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left when no text follows."""
        rest, self._held = self._held, ""
        if self._style == "hermes":
            if self._is_inside:
                return self._gap + OPEN_TAG + rest, []
            return ("" if self._has_calls and not rest.strip() else rest), []
        for parts in ([rest], rest.split(";")):
            calls = [parse_call(part, self._style, self._names) for part in parts]
            whole = [call for call in calls if call is not None]
            if len(whole) == len(parts):
                return "", whole
        return rest, []

    def _read_tags(self) -> tuple[str, list[ToolCall]]:
        words: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, found, after = self._held.partition(CLOSE_TAG if self._is_inside else OPEN_TAG)
            if not found:
                break
            self._held = after
            if self._is_inside:
                call = parse_call(before, self._style, self._names)
                if call is None:
                    words.append(self._gap + OPEN_TAG + before + CLOSE_TAG)
                else:
                    calls.append(call)
                    self._has_calls = True
            else:
                words.append(before.rstrip())
                self._gap = before[len(before.rstrip()) :]
            self._is_inside = not self._is_inside
        if not self._is_inside:
            kept = _possible_tag(self._held)
            words.append(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
        return "".join(words), calls


def _possible_tag(text: str) -> int:
    """Length of the longest end of a text that may lead to a tag: whitespace, and the beginning of one."""
    tag = next((n for n in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1) if OPEN_TAG.startswith(text[-n:])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
