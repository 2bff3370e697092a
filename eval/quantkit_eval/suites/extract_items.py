"""The items of ``extract``: sentences with known facts, drawn by seed from lists in ``data/words.json``.

The facts are few and the sentences short, because the suite must be neither a floor nor a ceiling for a model of 10**8
parameters: what it is to find out is whether a quantized model still does what its original does most of the time.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit_eval.suites.graded import Item
from quantkit_eval.suites.words import word_list

# Wordings in turn: one wording alone measures its own brittleness more than it measures JSON (docs/DECISIONS.md).
PROMPTS = (
    "Write the {fields} from this text as a JSON object with the keys {keys}. Text: {text} Answer with JSON only.",
    "Text: {text}\n\nWrite a JSON object with the keys {keys} from this text. "
    "Answer with the JSON object and nothing else.",
    'Read this text: "{text}" Give the {fields} as JSON with the keys {keys}. Only JSON, please.',
    "Answer with a JSON object that has the keys {keys}. Take the {fields} from this text: {text}",
)


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of sentence.

    Attributes:
        sentence: with the fields in braces, in the order in which the answer lists them.
        fields: key of the answer -> list in data/words.json, or (smallest, largest) number.
    """

    sentence: str
    fields: Mapping[str, str | tuple[int, int]]


PERSON: dict[str, str | tuple[int, int]] = {"name": "names", "age": (18, 80), "city": "cities"}
CITIZEN: dict[str, str | tuple[int, int]] = {"name": "names", "age": (18, 80), "country": "countries"}
TEMPLATES = {
    "lives": Template("{name} is {age} years old and lives in {city}.", PERSON),
    "moved": Template("{name}, aged {age}, has moved to {city}.", PERSON),
    "intro": Template("Hello, my name is {name}. I am {age} years old and I live in {city}.", PERSON),
    "form": Template("Name: {name}; Age: {age}; City: {city}.", PERSON),
    "story": Template("After a long winter at sea, {name}, who is {age} years old, came home to {city}.", PERSON),
    "member": Template("Our new member {name}, {age} years old, joined the club in {city}.", PERSON),
    "origin": Template("{name} is {age} years old and comes from {country}.", CITIZEN),
    "captain": Template("The captain of the team is {name}, who is {age} years old and plays for {country}.", CITIZEN),
    "student": Template(
        "{name} is {age} years old and studies {subject}.",
        {"name": "names", "age": (18, 30), "subject": "subjects"},
    ),
    "runner": Template(
        "{name}, who is {age} years old, ran {distance} kilometers.",
        {"name": "names", "age": (18, 60), "distance": (3, 42)},
    ),
}


def generate_items(num_items: int, seed: int) -> list[Item]:
    """Items of all templates in turn, each round in the next wording.

    Item i depends on seed and i alone: a longer run begins with the shorter one.

    Args:
        num_items: how many.
        seed: of the draw.
    """
    names = list(TEMPLATES)
    return [_draw(names[i % len(names)], i, seed) for i in range(num_items)]


def _draw(name: str, index: int, seed: int) -> Item:
    template, rng = TEMPLATES[name], random.Random(f"{seed}/{index}")
    gold: dict[str, str | int] = {}
    for key, source in template.fields.items():
        if isinstance(source, tuple):
            gold[key] = rng.randint(*source)
        else:
            gold[key] = rng.choice([value for value in word_list(source) if value not in gold.values()])  # no twins
    keys = list(gold)
    prompt = PROMPTS[index // len(TEMPLATES) % len(PROMPTS)].format(
        fields=", ".join(keys[:-1]) + " and " + keys[-1],
        keys=", ".join(f'"{key}"' for key in keys),
        text=template.sentence.format(**gold),
    )
    return Item(f"{name}-{index:04d}", prompt, gold)
