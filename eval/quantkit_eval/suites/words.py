"""The lists that items are drawn from: ``data/words.json`` (names, places, things) and ``data/scripts.json``."""

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files


def word_list(name: str) -> Sequence[str]:
    """A list of data/words.json."""
    return _lists("words.json")[name]


def script_words() -> dict[str, list[str]]:
    """Script -> words written in it."""
    return _lists("scripts.json")


@cache
def _lists(file: str) -> dict[str, list[str]]:
    content = files("quantkit_eval").joinpath("data", file).read_text(encoding="utf-8")
    lists: dict[str, list[str]] = json.loads(content)
    return lists
