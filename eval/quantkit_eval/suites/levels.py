"""Items of several kinds and levels in turn, each round in the next wording.

A suite that is all easy tells nothing about a large model and one that is all hard nothing about a small one, so every
run has items of all levels; the level stands in the item's id, 1 being the easiest. One wording alone measures its own
brittleness (docs/DECISIONS.md).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit_eval.suites.graded import Item


@dataclass(frozen=True, slots=True)
class Draw:
    """What one item is made from.

    Attributes:
        id: kind, level and running number.
        kind: what is asked.
        level: how hard, from 1.
        wording: of the prompt, from 0.
        rng: depends on the seed and the id alone.
    """

    id: str
    kind: str
    level: int
    wording: int
    rng: random.Random


def items_in_turn(
    make: Callable[[Draw], Item], cells: Sequence[tuple[str, int]], num_wordings: int, num_items: int, seed: int
) -> list[Item]:
    """Items of all cells (kind, level) in turn; item i depends on seed and i alone.

    Args:
        make: an item from its draw.
        cells: the kinds and levels of one round.
        num_wordings: of the prompts.
        num_items: how many.
        seed: of the draws.
    """
    items = []
    for index in range(num_items):
        kind, level = cells[index % len(cells)]
        name = f"{kind}-L{level}-{index:04d}"
        wording = index // len(cells) % num_wordings
        items.append(make(Draw(name, kind, level, wording, random.Random(f"{seed}/{name}"))))
    return items
