"""Looks into a JSON Schema: is it one, how deep is it, and which of its keywords does the grammar not enforce."""

import json
import re
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from quantkit.errors import UsageError

GRAMMAR_OPTIONS = "x-guidance"  # a key with which a schema could set the compiler's options; ours hold
# Keywords below which a value is data and not a schema.
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples", "example"})
UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*?)(?: \(\d+ times\))?")
ONE_OF = re.compile(r"oneOf not fully supported.*")


def require_schema(schema: Any) -> None:
    """Refuse what is no JSON Schema, of the draft that it names or else Draft 2020-12.

    Raises:
        UsageError: with the place of what is wrong.
    """
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        place = "".join(f"/{part}" for part in error.absolute_path) or "its root"
        reason = " ".join(error.message.split())
        raise UsageError(f"json_schema is no JSON Schema: at {place}: {reason[:200]}") from error
    except RecursionError as error:
        raise UsageError("json_schema is nested too deeply to be checked") from error


def nesting_depth(value: Any) -> int:
    """How many objects and arrays lie in one another at most."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, dict | list):
            deepest = max(deepest, depth)
            waiting += [(child, depth + 1) for child in (node.values() if isinstance(node, dict) else node)]
    return deepest


def name_unenforced(schema: Any, warnings: list[str]) -> tuple[str, ...]:
    """Where the keywords stand that the grammar leaves out.

    Args:
        schema: the JSON Schema.
        warnings: what llguidance says about it.

    Returns:
        JSON pointers to the keywords, sorted; a warning of an unknown kind as it is.
    """
    found: set[str] = set()
    keywords: set[str] = set()
    formats: set[str] = set()
    for warning in warnings:
        if match := UNIMPLEMENTED.fullmatch(warning):
            keywords |= set(json.loads(match[1]))
        elif match := UNKNOWN_FORMAT.fullmatch(warning):
            formats.add(match[1])
        elif ONE_OF.fullmatch(warning):
            keywords.add("oneOf")
        else:
            found.add(warning)
    for pointer, keyword, value in _keywords(schema):
        if keyword in keywords or (keyword == "format" and value in formats) or pointer == f"/{GRAMMAR_OPTIONS}":
            found.add(pointer)
    return tuple(sorted(found))


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """JSON pointer, name and value of every key outside data; names of properties are among them."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        pointer, node = waiting.pop()
        if isinstance(node, list):
            waiting += [(f"{pointer}/{number}", child) for number, child in enumerate(node)]
        elif isinstance(node, dict):
            is_names = pointer.rsplit("/", 1)[-1] in NAME_MAPS
            for name, child in node.items():
                place = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
                if not is_names:
                    yield place, name, child
                if is_names or name not in DATA_KEYWORDS:
                    waiting.append((place, child))


# Keywords whose value maps names of the user's to schemas.
NAME_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
