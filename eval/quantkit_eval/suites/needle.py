"""``needle``: find one value in a list that grows, or follow an instruction that stands after it.

Catches damage to attention over distance: a quantized cache, quantized keys and values, or scales that drift. In
``key`` items the question names one line of the list; in ``end`` items the list does not matter and the last sentence
says what to write. ``other_key`` tells a confusion between lines from an answer that has nothing to do with them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from quantkit_eval.suites.graded import GradedSuite, Item, Metrics
from quantkit_eval.suites.levels import Draw, items_in_turn
from quantkit_eval.suites.words import word_list

CELLS = [("key", 1), ("key", 2), ("end", 1), ("key", 3), ("end", 3), ("key", 4), ("key", 1), ("key", 5), ("end", 4)]
LINES = {1: 2, 2: 4, 3: 10, 4: 24, 5: 48}  # level -> lines of the list; a line has some ten tokens
LINE = "The code of the {thing} is {code}."
WORDINGS: Mapping[str, Sequence[str]] = {
    "key": (
        "{context}\nWhat is the code of the {wanted}?",
        "Here is a list of codes.\n{context}\nWrite only the code of the {wanted}.",
        "{context}\n\nWhich code has the {wanted}? Answer with the number only.",
    ),
    "end": (
        "{context}\nWrite the word {wanted} and nothing else.",
        "Here is a list that you can ignore.\n{context}\nAnswer with the word {wanted}.",
        "{context}\n\nAnswer with one word: {wanted}",
    ),
}
EXAMPLE = "\n".join(LINE.format(thing=thing, code=code) for thing, code in (("flute", 3071), ("pot", 8264)))
EXAMPLE_WANTED = {"key": ("pot", "8264"), "end": ("ostrich", "ostrich")}  # kind -> what is asked for, the answer
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d_]+")


def _make(draw: Draw) -> Item:
    count = LINES[draw.level]
    things, codes = draw.rng.sample(word_list("things"), count), draw.rng.sample(range(1000, 10000), count)
    context = "\n".join(LINE.format(thing=thing, code=code) for thing, code in zip(things, codes, strict=True))
    line = draw.rng.randrange(count)
    wanted, gold = things[line], str(codes[line])
    if draw.kind == "end":
        wanted = gold = draw.rng.choice(word_list("animals"))
    wording = WORDINGS[draw.kind][draw.wording]
    shown, answer = EXAMPLE_WANTED[draw.kind]
    examples = [(wording.format(context=EXAMPLE, wanted=shown), answer)]
    return Item.after_examples(draw.id, examples, wording.format(context=context, wanted=wanted), gold)


def measure(item: Item, output: str) -> Metrics:
    """The first number of the answer (or its first word) decides; case does not matter."""
    pattern = _NUMBER if item.gold.isdigit() else _WORD
    found = pattern.search(output)
    answer = found.group().lower() if found else ""
    right = answer == item.gold.lower()
    return {"exact": right, "other_key": answer.isdigit() and not right and f" is {answer}." in item.prompt}


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS["key"]))
run = GradedSuite(
    measure=measure,
    primary="exact",
    shares=("exact", "other_key"),
).generated(generate_items, num_items=99, max_tokens=16)
