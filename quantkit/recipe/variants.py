"""A recipe with other keys laid over it: what a search tries, and what it ends with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quantkit.recipe.document import Document, KeyPath, parse_document, write_document
from quantkit.recipe.explain import explain
from quantkit.recipe.model import Recipe

SECTIONS = ("quantization", "calibration")


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe's own keys as plain data, with the model that the command line may have given."""
    data = parse_document(recipe.text, str(recipe.path or "<recipe>")).data
    return data | ({"model": recipe.model} if recipe.model is not None else {})


def lay_over(data: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A recipe without its search, with keys of ``quantization`` and ``calibration`` replaced whole; None removes one.

    Args:
        data: of a recipe.
        changes: section -> key -> value.
    """
    laid: dict[str, Any] = {key: value for key, value in data.items() if key != "search"}
    for section in SECTIONS:
        changed = changes.get(section)
        if changed:
            merged = {**laid.get(section, {}), **changed}
            laid[section] = {key: value for key, value in merged.items() if value is not None}
    return laid


def at_folder(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with its checkpoints below another folder, the first one called ``checkpoint``; no files, no reports.

    All checkpoints stay, because together they say in which type scales are found.
    """
    checkpoints = [output for output in data["outputs"] if output["format"] != "gguf"]
    outputs = [
        {**output, "path": str(folder / f"checkpoint{f'-{number}' * bool(number)}")}
        for number, output in enumerate(checkpoints)
    ]
    return {key: value for key, value in data.items() if key != "report"} | {"outputs": outputs}


def variant_text(data: Mapping[str, Any], *comments: str) -> str:
    """The YAML of a recipe, with comment lines before it."""
    return "".join(f"# {line}\n" for line in comments) + write_document(data)


def check_candidates(recipe: Recipe, document: Document) -> None:
    """Refuse a candidate of the section ``search`` that makes no recipe.

    Raises:
        RecipeError: with the line in which the candidate has the key that is wrong.
    """
    for number, candidate in enumerate((recipe.search.candidates if recipe.search else None) or ()):
        changes = {"quantization": candidate.quantization, "calibration": candidate.calibration}
        laid = lay_over(document.data, changes)
        try:
            Recipe.model_validate(laid)
        except ValidationError as error:
            raise explain(error, _moved(document, laid, number, changes)) from error


def _moved(document: Document, laid: dict[str, Any], number: int, changes: Mapping[str, Mapping[str, Any]]) -> Document:
    """The document as if the candidate's keys stood in the recipe's sections, each at its own line."""
    home: KeyPath = ("search", "candidates", number)
    moved = Document(f"{document.origin}", laid, dict(document.keys), dict(document.values))
    for before, after in ((document.keys, moved.keys), (document.values, moved.values)):
        for section, keys in changes.items():
            for key in keys:
                for path in [path for path in after if path[:2] == (section, key)]:
                    del after[path]
                after |= {
                    path[len(home) :]: place for path, place in before.items() if path[:5] == (*home, section, key)
                }
            if keys and (section,) not in after:
                after[(section,)] = before[(*home, section)]
    return moved
