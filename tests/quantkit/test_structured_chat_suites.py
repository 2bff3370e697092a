"""Generated structured chat is not what the suites ask: their wordings are read from the suites themselves."""

import itertools
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from quantkit.calibration.structured.task import Exchange
from quantkit.calibration.structured_chat import generate_conversations, generate_exchanges
from quantkit_eval.suites import arith, extract_items, instructions, needle, schema_items, scripts, tools
from quantkit_eval.suites.words import word_list

SUITES = (arith, extract_items, instructions, needle, schema_items, scripts, tools)
SUITE_KEYS = {
    *("name", "age", "city", "country", "subject", "distance", "tool", "arguments", "steps", "answer", "score"),
    *("price", "weight", "color", "values", "address", "street", "number", "position", "code", "version", "details"),
    *("minutes", "room", "people", "day", "word", "language", "song", "year", "start", "end", "count", "title"),
}


@pytest.fixture(scope="module")
def exchanges() -> list[Exchange]:
    return list(itertools.islice(generate_exchanges(5), 1200))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _strings(value: Any) -> Iterator[str]:
    """Every text in a constant of a suite."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(_strings(inner) for pair in value.items() for inner in pair)
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_strings, value))
    elif hasattr(value, "sentence"):
        yield value.sentence
    elif hasattr(value, "requests"):
        yield from value.requests


def _suite_texts() -> set[str]:
    constants = [value for suite in SUITES for name, value in vars(suite).items() if name.isupper()]
    return set(itertools.chain.from_iterable(map(_strings, constants)))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = _words(text)
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


@pytest.fixture(scope="module")
def generated() -> list[str]:
    conversations = itertools.islice(generate_conversations(0, 77), 500)
    return [turn["content"] for turns in conversations for turn in turns]


def test_no_wording_and_no_template_of_the_suites_occurs(generated: list[str]) -> None:
    texts = _suite_texts()
    assert any("keys {keys}" in text for text in texts)
    assert "Order {count} of the article {thing}." in texts
    ours = set().union(*(_runs(text, 5) for text in generated))
    for text in texts:
        for fixed in re.split(r"\{\w*\}|[.?!\n]", text):
            assert not _runs(fixed, 5) & ours, fixed
    slot = r"[\w' -]{1,40}"
    for text in texts:
        pieces = re.split(r"\{\w+\}", text)
        if len(pieces) > 1 and len(_words(" ".join(pieces))) >= 4:
            template = re.compile(slot.join(map(re.escape, pieces)), re.IGNORECASE)
            longest = max(pieces, key=len).lower()
            assert not any(longest in content.lower() and template.search(content) for content in generated), text


def test_names_cities_and_keys_of_the_suites_do_not_occur(generated: list[str], exchanges: list[Exchange]) -> None:
    found = set(re.findall(r"[^\W\d_]+", " ".join(generated)))
    for name in ("names", "first_names", "cities", "countries"):
        parts = {part for entry in word_list(name) for part in re.findall(r"[^\W\d_]+", entry)} - {"City"}
        assert not parts & found, name
    keys = {key for exchange in exchanges for key in exchange.task.keys}
    assert len(keys) > 150
    lists = json.loads(files("quantkit_eval").joinpath("data", "words.json").read_text(encoding="utf-8"))
    fields = {name for kind, names in lists.items() if kind.endswith("_fields") for name in names}
    assert len(fields) > 100
    assert not keys & (SUITE_KEYS | fields)


def test_values_and_those_of_the_suites_overlap_little(exchanges: list[Exchange]) -> None:
    """Measured as the share of a suite list's entries that are, as a whole and in any case, a value of an answer."""
    values = {
        leaf.casefold() for exchange in exchanges for leaf in _leaves(exchange.sample.value) if isinstance(leaf, str)
    }
    assert len(values) > 1000
    total, common = 0, set()
    for name in ("names", "cities", "countries", "subjects", "things", "colors", "animals", "languages", "rooms"):
        entries = {entry.casefold() for entry in word_list(name)}
        total, common = total + len(entries), common | (entries & values)
    assert len(common) / total < 0.02, common
