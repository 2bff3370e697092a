"""``instructions``: rules about an answer that a program can verify: counts, case, forbidden words, order.

Catches damage to obedience: a model that still writes well but no longer does as it is told. Level 1 asks for little
more than its rule; above, a task comes with one to three rules. An item is followed if all of its rules are.
"""

import random
from functools import partial
from typing import Any

from quantkit_eval.suites.graded import GradedSuite, Item, Metrics, Parts
from quantkit_eval.suites.instruction_rules import follows, told
from quantkit_eval.suites.levels import Draw, items_in_turn
from quantkit_eval.suites.words import word_list

TASKS = ("Write a sentence about a {topic}.", "Say something about a {topic}.", "Describe a {topic} in one sentence.")
KINDS = ("word", "case", "count", "forbidden", "order", "begin")
CELLS = [(kind, level) for level in (1, 2, 1, 3, 4) for kind in KINDS]
WORDINGS = ("{task} {rules}", "{rules} {task}", "{task}\nFollow these rules: {rules}")
EASY_WORDINGS = ("{task}", "Please do this: {task}", "{task} Write nothing else.")
Rules = list[dict[str, Any]]


def _easy(kind: str, topic: str, rng: random.Random) -> tuple[str, Rules]:
    """A task that is little more than its rule, and the rules."""
    match kind:
        case "word":
            word = rng.choice(word_list("things"))
            return f"Write a sentence with the word {word}.", [{"rule": "has_word", "value": word}]
        case "case":
            word = rng.choice(word_list("animals"))
            rules: Rules = [{"rule": "upper", "value": None}, {"rule": "has_word", "value": word}]
            return f"Write the word {word} in capital letters.", rules
        case "count":
            most = rng.randint(15, 30)
            return f"Write a sentence about a {topic}, with at most {most} words.", [
                {"rule": "max_words", "value": most}
            ]
        case "forbidden":
            word = rng.choice(word_list("colors"))
            return f"Write a sentence about a {topic}, without the word {word}.", [{"rule": "no_word", "value": word}]
        case "order":
            words = rng.sample(word_list("animals"), 3)
            return f"Write these words in this order: {', '.join(words)}.", [{"rule": "in_order", "value": words}]
    word = rng.choice(["The", "In", "My", "This"])
    return f"Write a sentence that begins with the word {word}.", [{"rule": "first_word", "value": word}]


def _rule(kind: str, topic: str, rng: random.Random) -> dict[str, Any]:
    match kind:
        case "word":
            return {"rule": "has_word", "value": rng.choice(word_list("things"))}
        case "case":
            return {"rule": rng.choice(["upper", "lower"]), "value": None}
        case "count":
            name = rng.choice(["max_words", "num_words"])
            return {"rule": name, "value": rng.randint(*{"max_words": (8, 15), "num_words": (3, 8)}[name])}
        case "forbidden":
            return {"rule": "no_word", "value": rng.choice(["the", "and", "is", topic])}
        case "order":
            return {"rule": "in_order", "value": rng.sample(word_list("animals"), 3)}
    return {"rule": rng.choice(["first_word", "last_word"]), "value": rng.choice(word_list("colors"))}


def _make(draw: Draw) -> Item:
    topic = draw.rng.choice(word_list("rooms"))
    if draw.level == 1:
        task, easy = _easy(draw.kind, topic, draw.rng)
        return Item(draw.id, EASY_WORDINGS[draw.wording].format(task=task), easy)
    others = draw.rng.sample([kind for kind in KINDS if kind != draw.kind], draw.level - 2)
    rules = [_rule(kind, topic, draw.rng) for kind in (draw.kind, *others)]
    task = draw.rng.choice(TASKS).format(topic=topic)
    told_rules = " ".join(told(rule) for rule in rules)
    return Item(draw.id, WORDINGS[draw.wording].format(task=task, rules=told_rules), rules)


def measure(item: Item, output: str) -> Metrics:
    """Check every rule."""
    followed = [follows(rule, output) for rule in item.gold]
    return {"followed": all(followed), "rules_followed": sum(followed), "rules_total": len(followed)}


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS))
run = GradedSuite(
    measure=measure,
    primary="followed",
    shares=("followed",),
    parts=Parts("rules_followed", "rules_total", "rule_accuracy"),
).generated(generate_items, num_items=90, max_tokens=48)
