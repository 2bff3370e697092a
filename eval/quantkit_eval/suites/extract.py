"""``extract``: read a sentence, answer with a JSON object.

Unconstrained, the format is the model's own work. Constrained, the keys and the kinds of their values are
given, as the prompt says them; the values are the model's.

Text values must agree to the letter, after stripping blanks; a number may stand in quotes. A missing field is wrong,
and a field too many makes the item not exact. How an object is found in an answer: ``answers``.
"""

from typing import Any

from quantkit_eval.suites.answers import agrees, read_object
from quantkit_eval.suites.extract_items import generate_items
from quantkit_eval.suites.graded import FIELDS, GradedSuite, Item, Metrics


def measure(item: Item, output: str) -> Metrics:
    """Read the object and count its fields."""
    gold = item.gold
    answer, only_json = read_object(output)
    correct = sum(name in answer and agrees(answer[name], value) for name, value in gold.items()) if answer else 0
    return {
        "parse_ok": answer is not None,
        "exact": answer is not None and correct == len(gold) and set(answer) == set(gold),
        "fields_correct": correct,
        "fields_total": len(gold),
        "only_json": only_json,
    }


def form(item: Item) -> dict[str, Any]:
    """The keys that the prompt names, as text or whole numbers."""
    kinds = {name: {"type": "integer" if isinstance(value, int) else "string"} for name, value in item.gold.items()}
    return {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}


run = GradedSuite(
    measure=measure,
    primary="exact",
    shares=("exact", "parse_ok", "only_json"),
    parts=FIELDS,
    form=form,
).generated(generate_items, num_items=256, max_tokens=64)
