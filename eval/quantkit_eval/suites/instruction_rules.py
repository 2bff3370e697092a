"""Rules about an answer that a program can verify: how people are told, and how it is checked.

A rule in a gold value is ``{"rule": name, "value": value}``, so that records explain themselves.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")


def words_of(text: str) -> list[str]:
    """The words of a text in small letters; an apostrophe or hyphen inside does not part them."""
    return [word.lower() for word in _WORD.findall(text)]


def _num_items(value: int, text: str) -> bool:
    parts = text.strip().split(",")
    return len(parts) == value and all(words_of(part) for part in parts)


def _no_word(value: str, text: str) -> bool:
    return bool(words_of(text)) and value.lower() not in words_of(text)


def _has_word(value: str, text: str) -> bool:
    return value.lower() in words_of(text)


def _in_order(value: Sequence[str], text: str) -> bool:
    """Each of the words once, in this order; other words may stand between them."""
    return [word for word in words_of(text) if word in value] == list(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rule is told, with {value} for its value, and whether a text follows it."""

    sentence: str
    follows: Callable[[Any, str], bool]


RULES: Mapping[str, Rule] = {
    "num_words": Rule("Write exactly {value} words.", lambda value, text: len(words_of(text)) == value),
    "max_words": Rule("Write at most {value} words.", lambda value, text: 0 < len(words_of(text)) <= value),
    "num_items": Rule("Write exactly {value} things, with commas between them.", _num_items),
    "upper": Rule("Write in capital letters only.", lambda _, text: text.upper() == text != text.lower()),
    "lower": Rule("Write in small letters only.", lambda _, text: text.lower() == text != text.upper()),
    "has_word": Rule("Use the word {value}.", _has_word),
    "no_word": Rule("Do not use the word {value}.", _no_word),
    "first_word": Rule("Begin with the word {value}.", lambda value, text: words_of(text)[:1] == [value.lower()]),
    "last_word": Rule("End with the word {value}.", lambda value, text: words_of(text)[-1:] == [value.lower()]),
    "in_order": Rule("Name in this order: {value}.", _in_order),
}


def told(rule: Mapping[str, Any]) -> str:
    """The sentence that asks for a rule."""
    value = rule["value"]
    return RULES[rule["rule"]].sentence.format(value=", ".join(value) if isinstance(value, list) else value)


def follows(rule: Mapping[str, Any], text: str) -> bool:
    """Whether a text follows a rule."""
    return RULES[rule["rule"]].follows(rule["value"], text)
