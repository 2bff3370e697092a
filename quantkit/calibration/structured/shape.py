"""The shape of an answer: which keys, how nested, and the ways in which a request can say so.

A shape is a mapping from a key to a field or to a shape, or a list that holds the shape of its entries.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.calibration.structured.scenario import Field
from quantkit.calibration.structured.values import join, json_schema, type_name

Shape = Field | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How keys are spelled: as in the files (snake_case), or in camelCase."""

    camel: bool

    def key(self, key: str) -> str:
        """A key as it stands in the answer."""
        first, *rest = key.split("_")
        return first + "".join(part[:1].upper() + part[1:] for part in rest) if self.camel else key

    def value(self, value: Any) -> Any:
        """A value with the keys of its objects spelled."""
        if isinstance(value, Mapping):
            return {self.key(key): self.value(inner) for key, inner in value.items()}
        return [self.value(inner) for inner in value] if isinstance(value, list) else value


def outline(shape: Shape, spelling: Spelling) -> str:
    """The shape with the names of types in the place of values."""
    if isinstance(shape, Field):
        return type_name(shape.kind)
    if isinstance(shape, Mapping):
        inner = ", ".join(f'"{spelling.key(key)}": {outline(part, spelling)}' for key, part in shape.items())
        return "{" + inner + "}"
    return f"[{outline(shape[0], spelling)}, ...]"


def schema_of(shape: Shape, spelling: Spelling, *, nullable: bool) -> dict[str, Any]:
    """The JSON Schema of the shape; all keys are required.

    Args:
        shape: of the answer.
        spelling: of its keys.
        nullable: whether a value may be null.
    """
    if isinstance(shape, Field):
        schema = json_schema(shape.kind)
        if nullable and "enum" in schema:
            return {"enum": [*schema["enum"], None]}
        return schema | {"type": [schema["type"], "null"]} if nullable else schema
    if isinstance(shape, Mapping):
        return {
            "type": "object",
            "properties": {
                spelling.key(key): schema_of(part, spelling, nullable=nullable) for key, part in shape.items()
            },
            "required": [spelling.key(key) for key in shape],
        }
    return {"type": "array", "items": schema_of(shape[0], spelling, nullable=nullable)}


def describe(
    fields: Mapping[str, Field], spelling: Spelling, wordings: Mapping[str, Any], rng: random.Random, language: str
) -> str:
    """The keys of a flat object as a list, as bullet points, or in a sentence."""
    keys = [spelling.key(key) for key in fields]
    match rng.choices(["keys", "prose", "bullets"], [5, 3, 2])[0]:
        case "keys":
            quote = rng.choice(['"{}"', "{}", "`{}`"])
            quoted = [quote.format(key) for key in keys]
            listed = ", ".join(quoted) if rng.random() < 0.5 else join(quoted, language)
            return str(rng.choice(wordings["keys"])).format(keys=listed)
        case "prose":
            part = rng.choice(wordings["prose_part"])
            parts = [part.format(what=field.what, key=key) for key, field in zip(keys, fields.values(), strict=True)]
            return str(rng.choice(wordings["prose"])).format(prose=join(parts, language))
    typed = rng.random() < 0.6
    lines = [
        f"- {key}: {field.what}" + (f" ({type_name(field.kind)})" if typed else "")
        for key, field in zip(keys, fields.values(), strict=True)
    ]
    return str(rng.choice(wordings["bullets"])).format(bullets="\n".join(lines))


def show(
    shape: Shape, example: Any, spelling: Spelling, wordings: Mapping[str, Any], rng: random.Random, *, nullable: bool
) -> str:
    """The shape as an example of other data, as an outline with types, or as a JSON Schema.

    Args:
        shape: of the answer.
        example: a value of this shape, keys as in the files.
        spelling: of the keys.
        wordings: of the language.
        rng: the draw.
        nullable: whether a value may be null.
    """
    match rng.choices(["example", "typed", "schema"], [4, 4, 2])[0]:
        case "example":
            text = json.dumps(spelling.value(example), ensure_ascii=False)
            return str(rng.choice(wordings["example"])).format(example=text)
        case "typed":
            return str(rng.choice(wordings["typed"])).format(typed=outline(shape, spelling))
    text = json.dumps(schema_of(shape, spelling, nullable=nullable), ensure_ascii=False)
    return str(rng.choice(wordings["schema"])).format(schema=text)


def kinds_in(fields: Mapping[str, Field]) -> set[str]:
    """The first words of the fields' kinds."""
    return {field.kind.partition(" ")[0] for field in fields.values() if isinstance(field.kind, str)}


def formats_told(fields: Mapping[str, Field], wordings: Mapping[str, Any], rng: random.Random) -> list[str]:
    """What a request says about dates and times, where there are any."""
    kinds = kinds_in(fields)
    return [rng.choice(wordings[name]) for kind, name in (("date", "dates"), ("time", "times")) if kind in kinds]


def assemble(parts: Sequence[str]) -> str:
    """The sentences of a request: with blanks between them, but a part of several lines on lines of its own."""
    text, last = "", ""
    for part in filter(None, parts):
        between = "" if not text else "\n" if "\n" in part or "\n" in last else " "
        text, last = text + between + part, part
    return text
