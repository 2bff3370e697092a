"""Values: drawn by kind, each with the JSON value and the words that state it in a text.

A kind is one of the words below, the name of a list in ``values.yaml``, or a mapping from a JSON value to its wordings:

    person, firm, email, date, time    int LOW HIGH [STEP]    decimal LOW HIGH (two places)    decimal1 LOW HIGH (one)
    choice A|B|C      code PATTERN (d: digit, L: capital, l: small letter)      many KIND LOW HIGH (a list)
"""

import datetime
import random
import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.calibration.structured.vocabulary import load

Kind = str | Mapping[Any, Sequence[str]]
JsonValue = Any  # str | int | float | bool | None, lists and objects of them

AND = {"en": "and", "de": "und", "fr": "et", "es": "y"}
_FIRST_DAY, _NUM_DAYS = datetime.date(2019, 1, 1), 3650


@dataclass(frozen=True, slots=True)
class Drawn:
    """A value and how a text states it.

    Attributes:
        value: as it stands in JSON: dates as YYYY-MM-DD, times as HH:MM.
        surface: in the words of the text's language.
    """

    value: JsonValue
    surface: str


def draw_value(kind: Kind, rng: random.Random, language: str = "en") -> Drawn:
    """A value of a kind, stated in a language (en, de, fr, es)."""
    if not isinstance(kind, str):
        value = rng.choice(list(kind))
        return Drawn(value, rng.choice(kind[value]))
    word, _, rest = kind.partition(" ")
    match word:
        case "int":
            low, high, *step = map(int, rest.split())
            number = rng.randrange(low, high + 1, *step)
            return Drawn(number, str(number))
        case "decimal" | "decimal1":
            return _draw_decimal(rest, 2 if word == "decimal" else 1, rng, language)
        case "date":
            return _draw_date(rng, language)
        case "time":
            return _draw_time(rng, language)
        case "many":
            return _draw_many(rest, rng, language)
        case "choice":
            text = rng.choice(rest.split("|"))
        case "code":
            letters = {"d": string.digits, "L": string.ascii_uppercase, "l": string.ascii_lowercase}
            stem, dot, suffix = rest.partition(".p")  # a file's ending is no pattern
            text = "".join(rng.choice(letters.get(sign, sign)) for sign in stem) + dot + suffix
        case "person":
            text = f"{_pick('given', rng)} {_pick('family', rng)}"
        case "firm":
            text = f"{_pick('stem', rng)} {_pick('ending', rng)}"
        case "email":
            text = f"{_ascii(_pick('given', rng))}.{_ascii(_pick('family', rng))}@{_pick('stem', rng).lower()}.example"
        case _:
            text = _pick(kind, rng)
    return Drawn(text, text)


def json_schema(kind: Kind) -> dict[str, Any]:
    """The JSON Schema of a kind's values."""
    if not isinstance(kind, str):
        return {"type": "boolean"}
    match kind.partition(" ")[0]:
        case "int":
            return {"type": "integer"}
        case "decimal" | "decimal1":
            return {"type": "number"}
        case "many":
            return {"type": "array", "items": {"type": "string"}}
        case "date" | "time" as name:
            return (
                {"type": "string", "format": name}
                if name == "date"
                else {"type": "string", "pattern": "^\\d\\d:\\d\\d$"}
            )
        case "choice":
            return {"enum": kind.partition(" ")[2].split("|")}
    return {"type": "string"}


def type_name(kind: Kind) -> str:
    """What a kind is called in an outline: ``integer``, ``date YYYY-MM-DD``."""
    word = kind.partition(" ")[0] if isinstance(kind, str) else "boolean"
    names = {"date": "date YYYY-MM-DD", "time": "time HH:MM", "many": "[string, ...]", "boolean": "boolean"}
    return names.get(word) or str(json_schema(kind).get("type", "string"))


def join(parts: Sequence[str], language: str = "en") -> str:
    """``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {AND[language]} {parts[-1]}"


def _pick(name: str, rng: random.Random) -> str:
    return str(rng.choice(load("values")[name]))


def _ascii(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "".join(letter for letter in plain.lower() if letter.isalnum())


def _draw_decimal(bounds: str, places: int, rng: random.Random, language: str) -> Drawn:
    low, high = (int(bound) * 10**places for bound in bounds.split())
    number = rng.randint(low, high) / 10**places
    text = f"{number:.{places}f}"
    return Drawn(number, text if language == "en" else text.replace(".", ","))


def _draw_date(rng: random.Random, language: str) -> Drawn:
    day = _FIRST_DAY + datetime.timedelta(days=rng.randrange(_NUM_DAYS))
    month = load("values")[f"month_{language}"][day.month - 1]
    surfaces = {
        "en": (f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}", day.isoformat()),
        "de": (f"{day.day}. {month} {day.year}", f"{day:%d.%m.%Y}"),
        "fr": (f"{day.day if day.day > 1 else '1er'} {month} {day.year}", f"{day:%d/%m/%Y}"),
        "es": (f"{day.day} de {month} de {day.year}", f"{day:%d/%m/%Y}"),
    }
    return Drawn(day.isoformat(), rng.choice(surfaces[language]))


def _draw_time(rng: random.Random, language: str) -> Drawn:
    hour, minute = rng.randint(6, 22), rng.randrange(0, 60, 5)
    text = f"{hour:02}:{minute:02}"
    surfaces = [text]
    if language == "en":
        surfaces.append(f"{(hour - 1) % 12 + 1}:{minute:02} {'am' if hour < 12 else 'pm'}")
    elif language == "fr":
        surfaces.append(f"{hour} h {minute:02}")
    return Drawn(text, rng.choice(surfaces))


def _draw_many(rest: str, rng: random.Random, language: str) -> Drawn:
    kind, low, high = rest.split()
    drawn: list[str] = []
    count = rng.randint(int(low), int(high))
    while len(drawn) < count:
        text = draw_value(kind, rng, language).surface
        if text not in drawn:
            drawn.append(text)
    return Drawn(drawn, join(drawn, language))
