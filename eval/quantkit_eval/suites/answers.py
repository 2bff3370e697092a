"""How an answer is read, the same for every model: nothing is repaired.

The first brace (or bracket, where a list may come) of the output starts the value, and the value ends where JSON says
it ends; what stands before and after (a code fence, a remark) is set aside. What does not parse from there is none.
"""

import json
import re
from typing import Any

FENCE = re.compile(r"```[A-Za-z]*")


def read_object(output: str) -> tuple[dict[str, Any] | None, bool]:
    """The object in an answer, and whether it is all of the answer, a code fence aside.

    Returns:
        (object, only_json); (None, False) if the first brace starts no valid object.
    """
    value, only_json = read_json(output, "{")
    return (value, only_json) if isinstance(value, dict) else (None, False)


def read_json(output: str, openings: str = "{[") -> tuple[Any, bool]:
    """The same for an object or a list, whichever begins first."""
    start = min((at for at in map(output.find, openings) if at >= 0), default=-1)
    if start < 0:
        return None, False
    try:
        value, length = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(output[start:])
    except (ValueError, RecursionError):
        return None, False
    around = FENCE.sub("", output[:start]) + FENCE.sub("", output[start + length :])
    return value, not around.strip()


def agrees(value: object, gold: object) -> bool:
    """Whether a value says what the gold value says.

    Text to the letter, blanks around it aside; a number also as text of that number; true is not 1. Lists agree entry
    by entry, objects key by key with no key too many.
    """
    if isinstance(gold, dict):
        return isinstance(value, dict) and value.keys() == gold.keys() and all(agrees(value[k], gold[k]) for k in gold)
    if isinstance(gold, list):
        if not isinstance(value, list) or len(value) != len(gold):
            return False
        return all(agrees(mine, right) for mine, right in zip(value, gold, strict=True))
    if gold is None or isinstance(gold, bool):
        return value is gold
    if isinstance(gold, int | float) and isinstance(value, int | float):
        return not isinstance(value, bool) and value == gold
    return isinstance(value, str) and value.strip() == str(gold).strip()


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
