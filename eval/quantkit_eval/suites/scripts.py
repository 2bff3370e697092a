"""``scripts``: copy words of ten and more scripts and emoji to the letter.

Catches damage to rare tokens, which calibration text hardly touches: languages with other letters suffer first. Emoji
with joiners, flags and skin tones are several code points each. ``replacement_chars`` counts U+FFFD, the sign of bytes
that make no character. Two ways to spell one letter (composed or not) are the same letter.
"""

import unicodedata
from functools import partial

from quantkit_eval.suites.graded import GradedSuite, Item, Metrics
from quantkit_eval.suites.levels import Draw, items_in_turn
from quantkit_eval.suites.words import script_words

CELLS = [(script, level) for level in (1, 2, 3) for script in script_words()]
WORDS = {1: 1, 2: 3, 3: 6}  # level -> words to copy
EXAMPLES = ("guten Tag", "три 🍋")  # turns before the question: the task is clear, only the letters are new
WORDINGS = (
    "Repeat this text exactly: {text}",
    'Copy the text between the quotes and write nothing else.\n"{text}"',
    "Write the same text again: {text}",
)
_AROUND = " \t\r\n\"'“”.`"


def _make(draw: Draw) -> Item:
    text = " ".join(draw.rng.sample(script_words()[draw.kind], WORDS[draw.level]))
    wording = WORDINGS[draw.wording]
    examples = [(wording.format(text=example), example) for example in EXAMPLES]
    return Item.after_examples(draw.id, examples, wording.format(text=text), text)


def measure(item: Item, output: str) -> Metrics:
    """The first line that is not empty must be the text; blanks, quotes and full stops around it are set aside."""
    first = next((line for line in output.splitlines() if line.strip(_AROUND)), "")
    gold = item.gold
    return {
        "exact": unicodedata.normalize("NFC", first.strip(_AROUND)) == unicodedata.normalize("NFC", gold),
        "contained": unicodedata.normalize("NFC", gold) in unicodedata.normalize("NFC", output),
        "replacement_chars": output.count("\ufffd"),
    }


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS))
run = GradedSuite(
    measure=measure,
    primary="exact",
    shares=("exact", "contained"),
    means=("replacement_chars",),
).generated(generate_items, num_items=108, max_tokens=96)
