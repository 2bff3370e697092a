"""``arith``: two to six steps of integer arithmetic, every step written out in JSON.

Catches damage to computing and to keeping a plan: numbers go wrong long before prose does. ``first_wrong_step`` tells
a slip early in a chain from one at its end. An item is exact if every step and the answer are right.
"""

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quantkit_eval.suites.answers import agrees, read_object
from quantkit_eval.suites.graded import GradedSuite, Item, Metrics, Parts
from quantkit_eval.suites.levels import Draw, items_in_turn

CELLS = [
    ("sum", 1),
    ("sum", 2),
    ("mixed", 2),
    ("sum", 1),
    ("sum", 3),
    ("mixed", 3),
    ("sum", 1),
    ("mixed", 4),
    ("mixed", 5),
]
LEVELS: Mapping[int, tuple[int, int, int]] = {  # level -> steps, largest start, largest operand
    1: (2, 9, 5),
    2: (2, 15, 9),
    3: (3, 60, 20),
    4: (4, 90, 40),
    5: (6, 200, 90),
}
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
STEP_TOKENS = 16  # of a written step: at most four numbers' digits and signs
MAX_FACTOR = 3  # larger ones measure multiplication tables, not chains
EXAMPLES = (  # turns before the question: how a chain is written
    ("2 + 1 + 4", '{"steps": ["2 + 1 = 3", "3 + 4 = 7"], "answer": 7}'),
    ("5 + 3 + 1", '{"steps": ["5 + 3 = 8", "8 + 1 = 9"], "answer": 9}'),
)
WORDINGS = (
    "Compute from left to right: {task}",
    "{task}\nWrite every step, from left to right, as JSON.",
    "Work out {task} step by step.",
)


def _make(draw: Draw) -> Item:
    num_steps, largest_start, largest_operand = LEVELS[draw.level]
    value = draw.rng.randint(1, largest_start)
    task, steps = str(value), []
    for _ in range(num_steps):
        signs = ["+"] if draw.kind == "sum" else [sign for sign in OPERATIONS if sign != "-" or value > 1]
        sign = draw.rng.choice(signs)
        largest = {"-": min(value - 1, largest_operand), "*": MAX_FACTOR}.get(sign, largest_operand)
        operand = draw.rng.randint(2 if sign == "*" else 1, largest)
        value = OPERATIONS[sign](value, operand)
        task += f" {sign} {operand}"
        steps.append(value)
    wording = WORDINGS[draw.wording]
    examples = [(wording.format(task=shown), answer) for shown, answer in EXAMPLES]
    gold, limit = {"steps": steps, "answer": value}, STEP_TOKENS * (num_steps + 2)
    return Item.after_examples(draw.id, examples, wording.format(task=task), gold, max_tokens=limit)


def _result(step: object) -> object:
    """What a step comes to: the part after its last equals sign, or the step itself."""
    return step.rpartition("=")[2] if isinstance(step, str) else step


def measure(item: Item, output: str) -> Metrics:
    """Read the trace and find its first wrong step, counted from 1; null if every step is right."""
    answer, _ = read_object(output)
    gold = item.gold["steps"]
    given = answer.get("steps") if answer else None
    steps = given if isinstance(given, list) else []
    right = [index < len(steps) and agrees(_result(steps[index]), value) for index, value in enumerate(gold)]
    answer_ok = answer is not None and agrees(answer.get("answer"), item.gold["answer"])
    trace_ok = all(right) and len(steps) == len(gold)
    return {
        "parse_ok": answer is not None,
        "exact": answer_ok and trace_ok,
        "answer_ok": answer_ok,
        "steps_correct": sum(right),
        "steps_total": len(gold),
        "first_wrong_step": None if trace_ok else right.index(False) + 1 if False in right else len(gold) + 1,
    }


def form(item: Item) -> dict[str, Any]:
    """Steps as texts and an answer, as the examples show it; how many steps is the model's to know."""
    return {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": {"type": "string"}}, "answer": {"type": "integer"}},
        "required": ["steps", "answer"],
        "additionalProperties": False,
    }


generate_items = partial(items_in_turn, _make, CELLS, len(WORDINGS))
run = GradedSuite(
    measure=measure,
    primary="exact",
    shares=("exact", "parse_ok", "answer_ok"),
    parts=Parts("steps_correct", "steps_total", "step_accuracy"),
    form=form,
).generated(generate_items, num_items=99, max_tokens=128)
