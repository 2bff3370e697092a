"""The recipe: YAML in the user's repository -> a frozen :class:`Recipe`; each mistake is one line with its place."""

import hashlib
from pathlib import Path

from pydantic import ValidationError

from quantkit.errors import RecipeError, did_you_mean
from quantkit.recipe.calibration import (
    Calibration,
    DatasetSource,
    JsonlSource,
    SelfGeneratedSource,
    StructuredChatSource,
    TextSource,
)
from quantkit.recipe.document import parse_document
from quantkit.recipe.explain import explain
from quantkit.recipe.gates import Gates, Report
from quantkit.recipe.model import Recipe
from quantkit.recipe.output import CheckpointOutput, GgufOutput, Output
from quantkit.recipe.places import at_keys, name_places
from quantkit.recipe.quantization import Gptq, Override, Quantization, Rtn, SchemeChoice
from quantkit.recipe.variants import check_candidates

__all__ = [
    "Calibration",
    "CheckpointOutput",
    "DatasetSource",
    "Gates",
    "GgufOutput",
    "Gptq",
    "JsonlSource",
    "Output",
    "Override",
    "Quantization",
    "Recipe",
    "Report",
    "Rtn",
    "SchemeChoice",
    "SelfGeneratedSource",
    "StructuredChatSource",
    "TextSource",
    "at_keys",
    "builtin_recipes",
    "load_recipe",
    "name_places",
    "parse_recipe",
]

MAX_RECIPE_BYTES = 1 << 20  # a file beyond this is a model or a data set, given by mistake


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with quantkit, by name: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "recipes"
    folder = inside if inside.is_dir() else package.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        path_or_name: a file, or the name of a built-in recipe; an existing file wins.

    Returns:
        The frozen recipe; paths in it are relative to the current folder.

    Raises:
        RecipeError: no such recipe, or the file is not one; the line names file, line, column and key.
    """
    if not str(path_or_name).strip():
        raise RecipeError("the recipe's name is empty", fix="Give a YAML file or the name of a built-in recipe")
    path = Path(path_or_name)
    if path.is_dir() or not path.exists():  # a pipe is no regular file, and is read
        path = _builtin(path)
    recipe = parse_recipe(_read(path), origin=str(path))
    recipe._path = path
    return recipe


def parse_recipe(text: str, *, origin: str = "<recipe>") -> Recipe:
    """Read a recipe from its text.

    Args:
        text: YAML.
        origin: what error lines call the file.

    Returns:
        The frozen recipe, which keeps ``text`` and its sha256.

    Raises:
        RecipeError: the text is no recipe.
    """
    document = parse_document(text, origin)
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        raise explain(error, document) from error
    check_candidates(recipe, document)
    recipe._text = text
    recipe._document = document
    recipe._sha256 = hashlib.sha256(text.encode()).hexdigest()
    return recipe


def _builtin(path: Path) -> Path:
    known = builtin_recipes()
    if str(path) in known:
        return known[str(path)]
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, not a recipe", fix="A recipe is a YAML file")
    names = list(known)
    raise RecipeError(
        f"no recipe file {str(path)!r}, and no built-in recipe of that name; "
        f"built-in: {', '.join(names)}{did_you_mean(path, names)}"
    )


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            raise RecipeError(
                f"{path} has more than {MAX_RECIPE_BYTES} bytes, too many for a recipe",
                fix="A recipe is a short YAML file",
            )
        return content.decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text (byte {error.start})", fix="A recipe is a YAML file") from error
