"""``quantkit recipes list | show``."""

import click

from quantkit.cli.output import emit, json_option, table


@click.group("recipes")
def recipes_group() -> None:
    """List or show the recipes that come with quantkit."""


@recipes_group.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Names of the built-in recipes, each with its first comment line."""
    from quantkit.recipe import builtin_recipes, load_recipe

    rows = []
    for name, path in builtin_recipes().items():
        summary = load_recipe(path).text.splitlines()[0].removeprefix("# ")
        rows.append({"name": name, "summary": summary, "path": str(path)})
    emit(rows, table([(row["name"], row["summary"]) for row in rows]), as_json=as_json)


@recipes_group.command("show")
@click.argument("name")
@json_option
def show_command(name: str, as_json: bool) -> None:
    """Print the recipe NAME (built-in, or a file), to redirect into a file of your own."""
    from quantkit.recipe import load_recipe

    recipe = load_recipe(name)
    document = {"name": name, "sha256": recipe.sha256, "text": recipe.text}
    emit(document, [recipe.text.removesuffix("\n")], as_json=as_json)
