"""Scenarios: kinds of short text with known facts, and the records that are drawn from them."""

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantkit.calibration.structured.values import Drawn, Kind, draw_value
from quantkit.calibration.structured.vocabulary import load

_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"\{([^{}]+)\}")
OPTIONAL_SHARE = 0.55  # of the parts of a pattern that may be left out


@dataclass(frozen=True, slots=True)
class Field:
    """A fact that a text can state.

    Attributes:
        kind: of its values.
        what: it is, in the scenario's language.
    """

    kind: Kind
    what: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of text.

    Attributes:
        language: en, de, fr or es.
        thing: what the text is called.
        fields: key -> fact.
        groups: name of an inner object -> keys in it.
        ask: (key, question, answer) for a reader; question and answer with keys in braces.
        patterns: of the text, keys in braces, with parts in brackets that may be left out.
    """

    language: str
    thing: str
    fields: Mapping[str, Field]
    groups: Mapping[str, Sequence[str]]
    ask: Sequence[tuple[str, str, str]]
    patterns: Sequence[str]


@dataclass(frozen=True, slots=True)
class Record:
    """A text and what it states.

    Attributes:
        text: for the reader.
        stated: key -> value, of what the text states.
    """

    text: str
    stated: Mapping[str, Drawn]

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """The values of keys; None where the text is silent."""
        return {key: self.stated[key].value if key in self.stated else None for key in keys}


@cache
def scenarios() -> tuple[Scenario, ...]:
    """All of them, in all languages."""
    entries = [*load("scenarios").values(), *load("scenarios_other_languages").values()]
    return tuple(
        Scenario(
            language=entry.get("language", "en"),
            thing=entry["thing"],
            fields=read_fields(entry["fields"]),
            groups=entry["groups"],
            ask=[(key, question, answer) for key, question, answer in entry["ask"]],
            patterns=entry["text"],
        )
        for entry in entries
    )


def read_fields(entries: Mapping[str, Sequence[Any]]) -> dict[str, Field]:
    """Fields as they stand in the files: key -> [kind, what it is]."""
    return {key: Field(kind, what) for key, (kind, what) in entries.items()}


def keys_of(pattern: str) -> set[str]:
    """The keys that a pattern can state."""
    return set(_NAME.findall(pattern))


def draw_values(fields: Mapping[str, Field], rng: random.Random, language: str = "en") -> dict[str, Drawn]:
    """A value for every field, no two of them stated alike."""
    drawn: dict[str, Drawn] = {}
    for key, field in fields.items():
        value = draw_value(field.kind, rng, language)
        while any(value.surface == other.surface for other in drawn.values()):
            value = draw_value(field.kind, rng, language)
        drawn[key] = value
    return drawn


def draw_record(scenario: Scenario, rng: random.Random, needed: Collection[str] = ()) -> Record:
    """A text of a scenario.

    Args:
        scenario: its kind.
        rng: the draw.
        needed: keys that the text must state; some pattern can state them all.
    """
    pattern = rng.choice([pattern for pattern in scenario.patterns if keys_of(pattern) >= set(needed)])

    def keep(match: re.Match[str]) -> str:
        needs = not keys_of(match[1]).isdisjoint(needed)
        return match[1] if needs or rng.random() < OPTIONAL_SHARE else ""

    chosen = _OPTIONAL.sub(keep, pattern)
    present = keys_of(chosen)
    stated = draw_values(
        {key: field for key, field in scenario.fields.items() if key in present}, rng, scenario.language
    )
    return Record(" ".join(fill(chosen, stated).split()), stated)


def fill(pattern: str, stated: Mapping[str, Drawn]) -> str:
    """The pattern with the values in it."""
    return _NAME.sub(lambda match: stated[match[1]].surface, pattern)
