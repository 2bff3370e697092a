"""pydantic's errors -> one line with file, line, column, key path, the allowed values and "did you mean"."""

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from quantkit.errors import RecipeError, did_you_mean
from quantkit.recipe import calibration, gates, model, output, quantization, search, transforms, tuning
from quantkit.recipe.document import Document, KeyPath, Position, key_path
from quantkit.scheme import PRESETS


def _by_tag(place: str, union: Any, tag: str) -> dict[str, type[BaseModel]]:
    """The members of a union of sections, by place and the value of the key that chooses."""
    members: tuple[type[BaseModel], ...] = get_args(get_args(union)[0])
    return {f"{place}.{value}": member for member in members for value in get_args(member.model_fields[tag].annotation)}


# The model behind each mapping of the file; the last word is the tag where another key of the mapping chooses.
SECTIONS: dict[str, type[BaseModel]] = {
    "": model.Recipe,
    "calibration": calibration.Calibration,
    **_by_tag("calibration.sources[]", calibration.Source, "kind"),
    "quantization": quantization.Quantization,
    "quantization.scheme": quantization.Scheme,
    "quantization.overrides[]": quantization.Override,
    "quantization.overrides[].scheme": quantization.Scheme,
    "quantization.candidates[]": quantization.Candidate,
    "quantization.candidates[].scheme": quantization.Scheme,
    "quantization.experts": quantization.Experts,
    "quantization.kv_cache": quantization.KVCache,
    "quantization.algorithm.target_correction": quantization.TargetCorrection,
    "quantization.tuning": tuning.Tuning,
    **_by_tag("quantization.tuning.sources[]", calibration.Source, "kind"),
    **_by_tag("quantization.algorithm", quantization.Algorithm, "name"),
    **_by_tag("quantization.transforms[]", transforms.Transform, "name"),
    **_by_tag("outputs[]", output.Output, "format"),
    "outputs[].overrides[]": output.GgufOverride,
    "gates": gates.Gates,
    "gates.suites[].file": gates.FileSuite,
    "gates.suites[].constrained": gates.ConstrainedSuite,
    "gates.suites[].text": gates.TextSuite,
    "gates.suites[].lm-eval": gates.LmEvalSuite,
    "report": gates.Report,
    "search": search.Search,
    "search.candidates[]": search.SearchCandidate,
    "search.budget": search.Budget,
    "search.screening": search.Screening,
    "search.certification": search.Certification,
    "search.speed": search.PlannedSpeed,
}
_EXPECTED = {  # pydantic's error type -> what must stand there; what was found is added
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "is_instance_of": "must be a path",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must be 1 to 64 letters, digits, dots, dashes or underscores, no sign first",
}
Problem = tuple[Position, str]


def explain(error: ValidationError, document: Document) -> RecipeError:
    """The first problem in the order of the file, as an error; how many more there are is said at its end."""
    details = error.errors()
    misspelt = {entry["loc"][:-1] for entry in details if entry["type"] == "extra_forbidden"}
    problems = {_problem(entry, document) for entry in details if not _is_consequence(entry, misspelt)}
    (place, text), *more = sorted(problems, key=lambda problem: (problem[0].line, problem[0].column))
    note = f" (and {len(more)} more)" if more else ""
    return RecipeError(f"{document.origin}:{place.line}:{place.column}: {text}{note}")


def _is_consequence(details: ErrorDetails, misspelt: set[tuple[int | str, ...]]) -> bool:
    """A list is "too short" when its items are wrong, a key "missing" when it is misspelt: the cause says enough."""
    if details["type"] == "missing":
        return details["loc"][:-1] in misspelt
    return details["type"] == "too_short" and bool(details["input"])


def _problem(details: ErrorDetails, document: Document) -> Problem:
    path, tag = _split_tag(details["loc"])
    while path and isinstance(path[-1], int) and path not in document.values:
        path = path[:-1]  # one value that stands for a list of it
    kind, found, context = details["type"], details["input"], details.get("ctx", {})
    match kind:
        case "not_yet":
            return _not_yet(document, (*path, *context["keys"]))
        case "recipe":
            path = (*path, *context["keys"])
            text = str(context["message"])
            return document.position(path), f"{key_path(path)}: {text}" if path else text
        case "extra_forbidden":
            return _unknown_key(document, path, tag)
        case "too_short":
            return document.position(path), f"{key_path(path)}: must not be empty"
        case "missing":
            return document.position(path, at_key=True), f"{key_path(path)}: missing{_example(path)}"
        case "literal_error" | "choice" | "union_tag_invalid" | "union_tag_not_found":
            return _wrong_choice(document, path, kind, found, context)
    expected = _EXPECTED.get(kind) or details["msg"].replace("Input should", "must")
    return document.position(path), f"{key_path(path)}: {expected}, not {_show(found)}"


def _split_tag(loc: Sequence[str | int]) -> tuple[KeyPath, str | None]:
    """The location without the tags of its unions and the mark of a wrong key; and the last tag."""
    path: list[str | int] = []
    tag: str | None = None
    for part in loc:
        is_tag = path[-1:] == ["algorithm"] or (
            len(path) > 1 and path[-2] in ("sources", "suites", "transforms", "outputs") and tag is None
        )
        if is_tag and tag is None and isinstance(part, str):
            tag = part
        elif part != "[key]":
            path.append(part)
    return tuple(path), tag


def _pattern(path: KeyPath) -> str:
    return re.sub(r"\[\d+\]", "[]", key_path(path))


def _unknown_key(document: Document, path: KeyPath, tag: str | None) -> Problem:
    section = _pattern(path[:-1])
    tagged = f"{section}.{tag}"
    allowed = _keys(tagged if tagged in SECTIONS else section)
    hint = did_you_mean(path[-1], allowed)
    if not hint:
        homes = [name for name in SECTIONS if path[-1] in _keys(name) and name != section]
        hint = f"; {path[-1]} belongs under {homes[0]}" if homes and homes[0] else ""
    text = f"{key_path(path)}: unknown key; allowed here: {', '.join(allowed)}{hint}"
    return document.position(path, at_key=True), text


def _keys(section: str) -> list[str]:
    """The keys of a mapping."""
    return [field.alias or name for name, field in SECTIONS[section].model_fields.items()]


def _wrong_choice(document: Document, path: KeyPath, kind: str, found: Any, context: dict[str, Any]) -> Problem:
    if kind == "choice":
        allowed = list(context["allowed"])
        path = (*path, *context["keys"])
        found = path[-1] if context["keys"] else found
    elif kind == "literal_error":
        allowed = re.split(r", | or ", context["expected"].replace("'", "").replace("True", "true"))
    else:
        path = (*path, context["discriminator"].strip("'"))
        members = [key for key in SECTIONS if key.startswith(f"{_pattern(path[:-1])}.") and not key.endswith("[]")]
        inner = {field for key in members for field in _keys(key)}  # a section inside a member is none itself
        members = [key for key in members if key.rpartition(".")[2] not in inner]
        allowed = [key.rpartition(".")[2] for key in members]
    if kind == "union_tag_not_found":
        return document.position(path[:-1]), f"{key_path(path)}: missing; allowed: {', '.join(allowed)}"
    found = context.get("tag", found)
    at_key = path not in document.values or found == path[-1]
    pattern = f"{_pattern(path[:-1])}{{}}" if at_key else _pattern(path)
    if isinstance(found, str | int) and found in model.NOT_YET_VALUES.get(pattern, ()):
        return _not_yet(document, path, f": {_show(found)}; supported: {', '.join(allowed)}")
    if pattern == "version":
        return document.position(path), f"version: this quantkit reads version {allowed[0]}, not {_show(found)}"
    at_key = path not in document.values or found == path[-1]
    text = (
        f"{key_path(path)}: {_show(found)} is not allowed; allowed: {', '.join(allowed)}{did_you_mean(found, allowed)}"
    )
    return document.position(path, at_key=at_key), text


def _not_yet(document: Document, path: KeyPath, rest: str = "") -> Problem:
    return document.position(path, at_key=True), f"not supported yet: {key_path(path)}{rest}"


def _example(path: KeyPath) -> str:
    examples = {
        "version": "write `version: 1`",
        "quantization.scheme": f"one of {', '.join(PRESETS)}",
        "quantization.algorithm": "{name: gptq} or {name: rtn}",
        "quantization.overrides[].scheme": f"one of {', '.join(PRESETS)}, {quantization.KEEP}",
        "outputs[].format": "one of compressed-tensors, gptq, awq, gguf",
    }
    example = examples.get(_pattern(path))
    return f"; {example}" if example else ""


def _show(value: Any) -> str:
    """A value as an error line quotes it."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return repr(value if len(value) <= 60 else f"{value[:57]}...")
    return str(value)
