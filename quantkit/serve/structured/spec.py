"""What an answer must look like: a JSON Schema, a regular expression, a grammar, or one of several texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quantkit.errors import UsageError

Kind = Literal["json_schema", "regex", "grammar", "choice"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form that the text of a request must have.

    Make one with the method of its kind: ``StructuredOutput.json_schema({...})``.

    Attributes:
        kind: of ``value``.
        value: the schema as JSON text, the regular expression, the grammar (Lark, or GBNF for a grammar whose rules are
            written with ``::=``), or the texts to choose from.

    Raises:
        UsageError: the kind is unknown, or the value is not what the kind asks for.
    """

    kind: Kind
    value: str | tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"structured output of kind {self.kind!r}: choose from {', '.join(KINDS)}")
        if self.kind == "choice":
            object.__setattr__(self, "value", _choices(self.value))
        elif not isinstance(self.value, str) or not self.value.strip():
            raise UsageError(f"{self.kind}={_short(self.value)} is no text with characters in it")
        if self.kind == "json_schema":
            schema = _parse_schema(str(self.value))
            if not isinstance(schema, dict | bool):
                raise UsageError(f"json_schema={_short(self.value)} is a JSON {type(schema).__name__}, not an object")
        _require_utf8(self.kind, self.value)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "StructuredOutput":
        """A JSON document that a schema allows; the schema as an object or as JSON text.

        Raises:
            UsageError: it is no JSON Schema.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"json_schema cannot be written as JSON: {error}") from error

    @classmethod
    def json_object(cls) -> "StructuredOutput":
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> "StructuredOutput":
        """A text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> "StructuredOutput":
        """A text of a language: Lark or GBNF."""
        return cls("grammar", text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "StructuredOutput":
        """One of several texts."""
        return cls("choice", texts if isinstance(texts, str) else tuple(texts))

    @property
    def schema(self) -> Any:
        """The JSON Schema, parsed; None for other kinds."""
        return _parse_schema(str(self.value)) if self.kind == "json_schema" else None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise UsageError(f"choice={_short(value)} is no list of one or more texts")
    for text in value:
        if not isinstance(text, str) or not text:
            raise UsageError(f"choice={_short(value)} holds {_short(text)}, which is no text with characters in it")
    return tuple(dict.fromkeys(value))


def _parse_schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"json_schema={_short(text)} is no JSON: {error}") from error


def _require_utf8(kind: str, value: str | tuple[str, ...]) -> None:
    try:
        "".join(value).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{kind} is not UTF-8 text (character {error.start})") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
