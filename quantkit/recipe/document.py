"""YAML text -> plain data, with the line and column of every key and value.

Scalars are read as YAML 1.2's core schema has them (``no`` is text, ``1e-2`` is a number). What a recipe has no use for
and what would hide a mistake is refused: duplicate keys, keys without a value, anchors, tags, a second document.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from quantkit.errors import RecipeError

MAX_DEPTH = 12  # of nested lists and mappings; a recipe needs 5
KeyPath = tuple[str | int, ...]  # ("calibration", "sources", 0, "share")


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the text; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Document:
    """What a recipe file says.

    Attributes:
        origin: the file's name, as error lines begin with it.
        data: mappings, lists and scalars; no value is None.
        keys: where the key (or list item) of a path stands.
        values: where its value begins.
    """

    origin: str
    data: dict[str, Any]
    keys: dict[KeyPath, Position]
    values: dict[KeyPath, Position]

    def position(self, path: KeyPath, *, at_key: bool = False) -> Position:
        """Where the value (or the key) of ``path`` stands; where its nearest parent's key stands if there is none."""
        places = self.keys if at_key else self.values
        while path and path not in places:
            path, places = path[:-1], self.keys
        return places.get(path, Position(1, 1))


def key_path(path: KeyPath) -> str:
    """``calibration.sources[0].share``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


class _Loader(yaml.SafeLoader):
    """Resolves scalars as YAML 1.2's core schema does, not as YAML 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own class attribute


_INT = re.compile(r"[-+]?[0-9]{1,100}$")
_DECIMAL = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_FLOAT = re.compile(rf"(?:{_DECIMAL}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")
_Loader.add_implicit_resolver("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("float", _FLOAT, list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not read as text, and writes everything out: a recipe may hold no anchors."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(f"tag:yaml.org,2002:{tag}", pattern) for tag, pattern in resolvers]
        for first, resolvers in _Loader.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Write the same value twice if it stands twice."""
        return True


def parse_document(text: str, origin: str) -> Document:
    """Read one YAML mapping.

    Args:
        text: the file's content.
        origin: the file's name for error lines.

    Returns:
        The document; ``data`` holds only dict, list, str, int, float and bool.

    Raises:
        RecipeError: no YAML, no mapping, empty, or something that a recipe may not contain.
    """
    document = Document(origin, {}, {}, {})
    root = _compose(text, origin)
    document.data.update(_convert(root, (), document))
    return document


def write_document(data: Mapping[str, Any]) -> str:
    """The YAML that :func:`parse_document` reads as this data."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _compose(text: str, origin: str) -> yaml.MappingNode:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _at(origin, event, "nested too deeply to be a recipe")
            _refuse_event(event, origin)
        nodes = list(yaml.compose_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, origin) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        character = repr(chr(error.character))
        raise RecipeError(f"{origin}:{line}:{column}: the character {character} is not allowed in YAML") from error
    root = nodes[0] if nodes else None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == "null"):
        raise RecipeError(f"{origin}: the recipe is empty", fix="To start from one: quantkit recipes show w4a16-gptq")
    if len(nodes) > 1:
        raise _at(origin, nodes[1], "a second YAML document begins here; a recipe is one document")
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else f"the text {root.value[:40]!r}"
        raise _at(origin, root, f"a recipe is a mapping that begins with `version: 1`, this is {found}")
    return root


def _convert(node: yaml.Node, path: KeyPath, document: Document) -> Any:
    """Plain data of a node; enters every place below it into the document."""
    document.values[path] = _position(node)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _at(document.origin, key_node, "a key must be text, this one is a list or a mapping")
            below = (*path, key_node.value)
            if below in document.keys:
                first = document.keys[below].line
                message = f"{key_path(below)}: duplicate key, first given in line {first}"
                raise _at(document.origin, key_node, message)
            document.keys[below] = _position(key_node)
            result[key_node.value] = _convert(value_node, below, document)
        return result
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.keys[(*path, index)] = _position(item)
        return [_convert(item, (*path, index), document) for index, item in enumerate(node.value)]
    if node.tag == "null":
        raise _at(document.origin, node, f"{key_path(path)}: has no value; give it one or delete the key")
    return _scalar(node)


def _scalar(node: yaml.Node) -> str | int | float | bool:
    text = str(node.value)
    match node.tag:
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def _refuse_event(event: yaml.Event, origin: str) -> None:
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise _at(origin, event, "& and * (anchors) are not read in a recipe; write the value out, or put it in quotes")
    tag = getattr(event, "tag", None)
    if tag:
        raise _at(origin, event, f"the tag {tag!r} is not read in a recipe")


def _syntax_error(error: yaml.MarkedYAMLError, text: str, origin: str) -> RecipeError:
    mark = error.problem_mark
    if mark is None:
        return RecipeError(f"{origin}: not valid YAML: {error.problem}")
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1]:
        return RecipeError(f"{origin}:{mark.line + 1}:{line.index(chr(9)) + 1}: a tab; YAML is indented with spaces")
    context = f" {error.context}" if error.context else ""
    return RecipeError(f"{origin}:{mark.line + 1}:{mark.column + 1}: not valid YAML: {error.problem}{context}")


def _position(node: yaml.Node | yaml.Event) -> Position:
    mark = node.start_mark
    assert mark is not None  # only nodes made by hand have none
    return Position(mark.line + 1, mark.column + 1)


def _at(origin: str, node: yaml.Node | yaml.Event, message: str) -> RecipeError:
    position = _position(node)
    return RecipeError(f"{origin}:{position.line}:{position.column}: {message}")
