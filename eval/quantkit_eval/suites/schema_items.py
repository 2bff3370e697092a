"""The items of ``schema``: a property of each kind, alone (level 1), beside a plain one (2), among four (3).

Every property is required and no other is allowed, so an answer that repeats the schema, leaves something out or adds
something is wrong. Which values are right, nobody says: the suite is about form, ``extract`` is about content.
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quantkit_eval.suites.graded import Item
from quantkit_eval.suites.levels import Draw, items_in_turn
from quantkit_eval.suites.words import script_words, word_list

Schema = dict[str, Any]
Property = tuple[str, Schema]
WORDINGS = (
    "Write a JSON object that is valid for this JSON Schema: {schema}",
    "JSON Schema: {schema}\nInvent one example for it. JSON only.",
    "{schema}\nThis is the JSON Schema of a form. Fill in the form, with JSON.",
)
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
PATTERNS = (
    *("^[A-Z]{3}$", "^[a-z]+-[0-9]{2}$", "^[0-9]{4}$", "^(left|right)$"),
    *("^[A-Z]{2}[0-9]{3}$", "^[0-9]{2}:[0-9]{2}$", "^(north|south)$", "^[a-z]{4}$"),
)
CONSTANTS = (1, 2, 3, 4, "v1", "v2", "draft", "final", "open", "beta")
# Turns before the question, by kind: a schema that is no item's, and an object that fits it. A model that sees but one
# schema repeats its answer whatever is asked, so two are shown: a common one, and one of the item's own kind.
EXAMPLES: Mapping[str, tuple[Schema, Any]] = {
    "plain": ({"song": TEXT, "year": NUMBER | {"minimum": 1900}}, {"song": "Yesterday", "year": 1965}),
    "enum": ({"size": {"enum": ["small", "medium", "large"]}}, {"size": "medium"}),
    "array": ({"tags": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}}, {"tags": ["new", "round"]}),
    "nested": (
        {
            "owner": {
                "type": "object",
                "properties": {"nickname": TEXT, "floor": NUMBER},
                "required": ["nickname", "floor"],
                "additionalProperties": False,
            }
        },
        {"owner": {"nickname": "Ann", "floor": 30}},
    ),
    "bounded": ({"height": {"type": "number", "minimum": 10, "maximum": 60}}, {"height": 42}),
    "unicode": ({"straße": TEXT}, {"straße": "Hauptweg"}),
    "format": ({"clock": {"type": "string", "format": "time"}}, {"clock": "12:30:00Z"}),
    "anyof": ({"reply": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}, {"reply": None}),
    "const": ({"kind": {"const": "box"}}, {"kind": "box"}),
    "ref": ({"end": {"$ref": "#/$defs/point"}}, {"end": [3, 4]}),
    "pattern": ({"room": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"}}, {"room": "B12"}),
    "longenum": (
        {"fruit": {"enum": ["apple", "plum", "pear", "cherry", "fig", "lemon", "peach", "melon"]}},
        {"fruit": "plum"},
    ),
}


def _plain(rng: random.Random) -> Property:
    kind, schema = rng.choice([("text", TEXT | {"minLength": 1}), ("number", NUMBER)])
    return _field(rng, kind), dict(schema)


def _bounded(rng: random.Random) -> Property:
    low = rng.randrange(0, 50, 5)
    return _field(rng, "measure"), {"type": "number", "minimum": low, "maximum": low + 50}


def _enum(rng: random.Random) -> Property:
    return "color", {"enum": rng.sample(list(word_list("colors")), 3)}


def _long_enum(rng: random.Random) -> Property:
    return "thing", {"enum": rng.sample(list(word_list("things")), 24)}


def _array(rng: random.Random) -> Property:
    least = rng.randint(2, 3)
    items: Schema = rng.choice([{"type": "integer"}, {"type": "string"}, {"enum": ["low", "high"]}])
    return _field(rng, "array"), {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _nested(rng: random.Random) -> Property:
    number = NUMBER | {"minimum": 1}
    return _field(rng, "object"), _closed([(_field(rng, "text"), dict(TEXT)), (_field(rng, "number"), number)])


def _any_of(rng: random.Random) -> Property:
    options: list[Schema] = [{"type": "integer"}, {"type": "null"}, {"enum": ["unknown", "later"]}, {"type": "boolean"}]
    return _field(rng, "choice"), {"anyOf": rng.sample(options, 2)}


def _reference(rng: random.Random) -> Property:
    return rng.choice(word_list("things")), {"$ref": "#/$defs/point"}


def _pattern(rng: random.Random) -> Property:
    return _field(rng, "code"), {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: random.Random) -> Property:
    name = rng.choice(["date", "email", "ipv4", "uuid"])
    return _field(rng, name), {"type": "string", "format": name}


def _unicode_key(rng: random.Random) -> Property:
    words = [word for script, found in script_words().items() if script != "emoji" for word in found]
    return rng.choice(words), {"type": "string", "minLength": 1}


def _constant(rng: random.Random) -> Property:
    return _field(rng, "state"), {"const": rng.choice(CONSTANTS)}


def _field(rng: random.Random, kind: str) -> str:
    """A name for a property. There are many, so that a run hardly asks the same twice, and two seeds ask otherwise."""
    return rng.choice(word_list(f"{kind}_fields"))


KINDS: Mapping[str, Callable[[random.Random], Property]] = {
    "plain": _plain,
    "enum": _enum,
    "array": _array,
    "nested": _nested,
    "bounded": _bounded,
    "unicode": _unicode_key,
    "format": _format,
    "anyof": _any_of,
    "const": _constant,
    "ref": _reference,
    "pattern": _pattern,
    "longenum": _long_enum,
}
CELLS = [(kind, level) for level in (1, 2, 3) for kind in KINDS]
POINT: Schema = {"type": "array", "prefixItems": [{"type": "integer"}] * 2, "items": False, "minItems": 2}


def _closed(properties: list[Property]) -> Schema:
    """An object that has exactly these properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name, _ in properties],
        "additionalProperties": False,
    }


def _make(draw: Draw) -> Item:
    rng, kind = draw.rng, KINDS[draw.kind]
    properties = [kind(rng)]
    while len(properties) < draw.level:
        more = _plain(rng) if draw.level == 2 else KINDS[rng.choice(list(KINDS))](rng)
        if more[0] not in dict(properties):
            properties.append(more)
    rng.shuffle(properties)
    if draw.level == 3:
        properties.append(("details", _closed([_plain(rng)])))
    schema, wording = _whole(properties), WORDINGS[draw.wording]
    shown = [EXAMPLES[name] for name in ("enum" if draw.kind == "plain" else "plain", draw.kind)]
    examples = [(wording.format(schema=_text(_whole(list(asked.items())))), _text(given)) for asked, given in shown]
    return Item.after_examples(draw.id, examples, wording.format(schema=_text(schema)), None, schema)


def _whole(properties: list[Property]) -> Schema:
    """The schema of an object that has exactly these properties, with the definition that they refer to."""
    schema = _closed(properties)
    return schema | {"$defs": {"point": POINT}} if "#/$defs/point" in _text(schema) else schema


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS))
