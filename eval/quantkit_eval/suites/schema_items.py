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
from quantkit_eval.suites.words import word_list

Schema = dict[str, Any]
Property = tuple[str, Schema]
WORDINGS = (
    "Write a JSON object that is valid for this JSON Schema: {schema}",
    "JSON Schema: {schema}\nInvent one example for it. JSON only.",
    "{schema}\nThis is the JSON Schema of a form. Fill in the form, with JSON.",
)
# The turn before the question: what a schema and an object that fits it look like.
EXAMPLE: list[Property] = [("song", {"type": "string"}), ("year", {"type": "integer", "minimum": 1900})]
EXAMPLE_ANSWER = '{"song": "Yesterday", "year": 1965}'


def _plain(rng: random.Random) -> Property:
    text, number = {"type": "string", "minLength": 1}, {"type": "integer"}
    kinds: list[Property] = [("name", text), ("city", text), ("age", number), ("count", number), ("title", text)]
    name, schema = rng.choice(kinds)
    return name, dict(schema)


def _bounded(rng: random.Random) -> Property:
    low = rng.randrange(0, 50, 5)
    return rng.choice(["score", "price", "weight"]), {"type": "number", "minimum": low, "maximum": low + 50}


def _enum(rng: random.Random) -> Property:
    return "color", {"enum": rng.sample(list(word_list("colors")), 3)}


def _long_enum(rng: random.Random) -> Property:
    return "thing", {"enum": rng.sample(list(word_list("things")), 24)}


def _array(rng: random.Random) -> Property:
    least = rng.randint(2, 3)
    items: Schema = rng.choice([{"type": "integer"}, {"type": "string"}, {"enum": ["low", "high"]}])
    return rng.choice(["values", "list"]), {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + 2,
    }


def _nested(rng: random.Random) -> Property:
    return "address", _closed([("street", {"type": "string"}), ("number", {"type": "integer", "minimum": 1})])


def _any_of(rng: random.Random) -> Property:
    options: list[Schema] = [{"type": "integer"}, {"type": "null"}, {"enum": ["unknown", "later"]}, {"type": "boolean"}]
    return "answer", {"anyOf": rng.sample(options, 2)}


def _reference(rng: random.Random) -> Property:
    return rng.choice(["start", "position"]), {"$ref": "#/$defs/point"}


def _pattern(rng: random.Random) -> Property:
    pattern = rng.choice(["^[A-Z]{3}$", "^[a-z]+-[0-9]{2}$", "^[0-9]{4}$", "^(left|right)$"])
    return "code", {"type": "string", "pattern": pattern}


def _format(rng: random.Random) -> Property:
    name = rng.choice(["date", "email", "ipv4", "uuid"])
    return name, {"type": "string", "format": name}


def _unicode_key(rng: random.Random) -> Property:
    return rng.choice(["größe", "prénom", "名前", "цена", "τιμή", "naïve ñ"]), {"type": "string", "minLength": 1}


def _constant(rng: random.Random) -> Property:
    return "version", {"const": rng.choice([1, 2, "v1", "draft"])}


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
    schema = _closed(properties)
    text = json.dumps(schema, ensure_ascii=False)
    if "#/$defs/point" in text:
        schema["$defs"] = {"point": POINT}
        text = json.dumps(schema, ensure_ascii=False)
    wording = WORDINGS[draw.wording]
    example = wording.format(schema=json.dumps(_closed(EXAMPLE)))
    return Item.after_examples(draw.id, [(example, EXAMPLE_ANSWER)], wording.format(schema=text), None, schema)


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS))
