"""Signs that a model has lost its way: it repeats itself to the end, or writes nothing but blanks.

A damaged model shows them before its answers are wrong, and a share of wrong answers does not tell them from mistakes.
"""

import re

LOOP_TIMES = 4  # an output that ends with a piece this often in a row is looped
LOOP_CHARACTERS = 24  # that the repetitions together have at least, so that "10000" and "ha ha ha" are none
_WHITESPACE = re.compile(r"\s+")


def is_looped(output: str) -> bool:
    """Whether the output, blanks at its end aside, ends with one piece of text at least ``LOOP_TIMES`` in a row.

    Where the repetition is cut off does not matter: the end of a periodic text is periodic at every cut.
    """
    text = output.rstrip()
    for period in range(1, len(text) // LOOP_TIMES + 1):
        length = max(LOOP_TIMES * period, LOOP_CHARACTERS)
        if length <= len(text) and text[-length:-period] == text[period - length :]:
            return True
    return False


def longest_whitespace_run(output: str) -> int:
    """Characters of the longest run of white space."""
    return max((len(run) for run in _WHITESPACE.findall(output)), default=0)
