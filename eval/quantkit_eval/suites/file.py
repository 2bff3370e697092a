"""A suite of the user's own prompts: one JSON object a line.

    {"prompt": "Which currency does Japan use? One word.", "gold": "yen"}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], "schema": {...}}

A line has ``prompt`` or ``messages``, and ``gold`` or ``schema`` or both; ``id`` and ``max_tokens`` are optional. An
answer is exact if it does all that its line demands: it says what gold says (text: the whole answer, blanks around it
aside; object or list: by value, see ``answers.agrees``) and fits the schema (Draft 2020-12).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from quantkit_eval.errors import OptionError
from quantkit_eval.suites import SuiteOutcome, SuiteRun, parse_options
from quantkit_eval.suites.answers import agrees, read_json
from quantkit_eval.suites.graded import FIELDS, GradedSuite, Item, Metrics
from quantkit_eval.suites.schema_check import BROKEN_REFERENCE, first_error

ROLES = ("system", "user", "assistant")
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of the suite.

    Attributes:
        kind: ``file``.
        path: of the items.
        num_items: the first so many; 0 takes all.
        max_tokens: of an answer whose line says nothing else.
    """

    kind: str
    path: str
    num_items: int = 0
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if self.num_items < 0 or self.max_tokens < 1:
            raise ValueError(f"num_items={self.num_items} must be at least 0, max_tokens={self.max_tokens} at least 1")


def run(suite_run: SuiteRun) -> SuiteOutcome:
    """Ask every prompt of the file.

    Raises:
        OptionError: an option is wrong, or the file is; the line is named.
        ModelOutputError: the model's generations are not those of the requests.
    """
    options = parse_options(FileOptions, suite_run.options, suite_run.name)
    return SUITE.ask(suite_run, chosen_items(options), options.max_tokens)


def check_forms(name: str, items: Sequence[Item]) -> None:
    """Refuse a constrained suite with a line that has no schema. Raises OptionError."""
    for item in items:
        SUITE.require_form(name, item)


def chosen_items(options: FileOptions) -> list[Item]:
    """The items of the file that the options ask for. Raises OptionError as ``read_items``."""
    items = read_items(Path(options.path))
    return items[: options.num_items or len(items)]


def read_items(path: Path) -> list[Item]:
    """The items of a file; blank lines are skipped.

    Raises:
        OptionError: the file cannot be read, has no item, or a line is none; ``path:line: what is wrong``.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no UTF-8, byte {error.start}"
        place = "" if path.is_absolute() else f" below {Path.cwd()}"
        fix = f"Give a file of UTF-8 text{place}"
        raise OptionError(f"the items {path} cannot be read ({reason})", fix=fix) from None
    items: dict[str, Item] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = _item(json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_object), number)
        except ValueError as error:
            raise OptionError(f"{path}:{number}: {error}") from None
        except RecursionError:
            raise OptionError(f"{path}:{number}: nested too deeply to be read") from None
        if item.id in items:
            raise OptionError(f"{path}:{number}: the id {item.id!r} stands above already")
        items[item.id] = item
    if not items:
        raise OptionError(f"{path}: no item", fix='Write one JSON object a line: {"prompt": "...", "gold": "..."}')
    return list(items.values())


def _item(line: Any, number: int) -> Item:
    """An item from its line. Raises ValueError with what is wrong."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    for key, value in line.items():
        if key not in _CHECKS:
            raise ValueError(f"unknown key {key!r}; allowed are {', '.join(_CHECKS)}")
        _CHECKS[key](value)
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("needs either prompt or messages")
    if "gold" not in line and "schema" not in line:
        raise ValueError("needs gold (what is right), or schema, or both")
    _check_writable(line)
    messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
    name = line.get("id", f"line-{number:04d}")
    return Item.of_chat(name, messages, line.get("gold"), line.get("schema"), line.get("max_tokens"))


def _check_text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("id and prompt must be text that is not empty")


def _check_messages(value: Any) -> None:
    shape = "messages must be a list of {role, content} with text in both"
    if not isinstance(value, list) or not value:
        raise ValueError(shape)
    for message in value:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(shape)
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"{shape}; roles are {', '.join(ROLES)}")
    if value[-1]["role"] != "user":
        raise ValueError("the last of messages must be the user's")


def _check_schema(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError("schema must be a JSON Schema object")
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise ValueError(f"schema is no JSON Schema (Draft 2020-12): {' '.join(error.message.split())[:200]}") from None
    wanted = value.get("type", "object")
    if not {"object", "array"}.intersection(wanted if isinstance(wanted, list) else [wanted]):
        raise ValueError(
            f"schema asks for type {wanted!r}, but only an object or a list is looked for in an answer; "
            'put the value into an object, such as {"label": ...}'
        )
    kinds: tuple[object, ...] = ({}, [], "", 0)
    for sample in kinds:  # references at the top, whatever kind of value is asked for
        if first_error(value, sample) == ("", BROKEN_REFERENCE):
            raise ValueError("schema has a $ref that leads nowhere or into itself; references have to stay inside it")


def _check_gold(value: Any) -> None:
    if not isinstance(value, str | dict | list) or not value:
        raise ValueError("gold must be text, an object or a list, and not empty")


def _check_max_tokens(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"max_tokens must be a whole number above 0, not {value!r}")


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "id": _check_text,
    "prompt": _check_text,
    "messages": _check_messages,
    "schema": _check_schema,
    "gold": _check_gold,
    "max_tokens": _check_max_tokens,
}


def _check_writable(line: Mapping[str, Any]) -> None:
    """Records hold the line: a half character has no UTF-8, and JSON no number that is read as infinite."""
    try:
        json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair, {error.object[error.start]!r}, is no text") from None
    except ValueError:
        raise ValueError("a number is too large for a float, such as 1e999") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file; a key that stands twice would lose one of its values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def measure(item: Item, output: str) -> Metrics:
    """What the line demands: gold, schema, or both."""
    needs_json = item.schema is not None or not isinstance(item.gold, str)
    answer, only_json = read_json(output) if needs_json else (None, False)
    error = first_error(item.schema, answer) if item.schema is not None and answer is not None else None
    schema_ok = None if item.schema is None else answer is not None and error is None
    gold_ok = True
    if item.gold is not None:
        gold_ok = output.strip() == item.gold.strip() if isinstance(item.gold, str) else agrees(answer, item.gold)
    metrics: Metrics = {"exact": gold_ok and schema_ok is not False}
    if needs_json:
        metrics |= {"parse_ok": answer is not None, "only_json": only_json}
    if schema_ok is not None:
        metrics |= {"schema_ok": schema_ok}
        metrics |= {"error_path": error[0] if error else None, "error_keyword": error[1] if error else None}
    if isinstance(item.gold, dict):
        given = answer if isinstance(answer, dict) else {}
        correct = sum(key in given and agrees(given[key], value) for key, value in item.gold.items())
        metrics |= {"fields_correct": correct, "fields_total": len(item.gold)}
    return metrics


SUITE = GradedSuite(measure=measure, primary="exact", shares=("exact", "parse_ok", "schema_ok"), parts=FIELDS)
