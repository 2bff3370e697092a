"""A recipe that is no regular file."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe import load_recipe


def test_a_recipe_may_come_through_a_pipe_and_is_never_read_without_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for text, words in (("version: 1\n", None), ("# " + "x" * (1 << 21), "too many for a recipe")):
        writer = threading.Thread(target=_write_pipe, args=(pipe, text))
        writer.start()
        if words is None:
            recipe = load_recipe(pipe)
            assert (recipe.text, recipe.path) == (text, pipe)
        else:
            with pytest.raises(RecipeError, match=words):
                load_recipe(pipe)
        writer.join()
    with pytest.raises(RecipeError, match="the recipe's name is empty"):
        load_recipe("")


def _write_pipe(pipe: Path, text: str) -> None:
    with contextlib.suppress(BrokenPipeError), pipe.open("w") as file:
        file.write(text)
