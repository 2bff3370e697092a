"""Conversations that end in a right structured answer, generated from a seed without end.

Small models lose their JSON first when they are quantized to few bits; calibration needs more of it, and more varied,
than a file holds. An answer follows from the values that its text was made of, so it is right by construction.
Nothing here resembles the suites that judge a checkpoint (tests/quantkit/test_structured_chat_suites.py).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from quantkit.calibration.sources import Conversation
from quantkit.calibration.structured.arithmetic import arithmetic_task
from quantkit.calibration.structured.classification import classification_task
from quantkit.calibration.structured.collection import (
    collections,
    list_format_task,
    list_task,
    plain_list_exchange,
    table_task,
)
from quantkit.calibration.structured.extraction import flat_task, format_task, nested_task, plain_exchange
from quantkit.calibration.structured.function_call import call_task
from quantkit.calibration.structured.repair import repair_task
from quantkit.calibration.structured.scenario import scenarios
from quantkit.calibration.structured.task import Exchange, Task, pose
from quantkit.calibration.structured.vocabulary import load

T = TypeVar("T")
# Of twelve conversations: one in six is answered in plain language, flat extraction comes twice, the rest once.
ROUND = (
    "flat", "flat", "nested", "list", "classification", "call", "table", "repair", "arithmetic", "format",
    "plain", "plain",
)  # fmt: skip


def generate_conversations(num_tokens_hint: int, seed: int) -> Iterator[Conversation]:
    """Conversations without end; take as many as needed.

    Args:
        num_tokens_hint: how many tokens are wanted; the conversations do not depend on it, so that a longer run begins
            with the shorter one.
        seed: the same seed gives the same conversations.
    """
    del num_tokens_hint
    return (exchange.conversation for exchange in generate_exchanges(seed))


def generate_exchanges(seed: int) -> Iterator[Exchange]:
    """The conversations of a seed, with what they are made of."""
    rng = random.Random(f"structured_chat/{seed}")
    kinds, decks = _deal(ROUND, rng), _decks(rng)
    while True:
        yield decks[next(kinds)](rng)


def _deal(cards: Sequence[T], rng: random.Random) -> Iterator[T]:
    """The cards in random order, again and again: a short run misses as little as possible."""
    while True:
        yield from rng.sample(cards, len(cards))


def _decks(rng: random.Random) -> Mapping[str, Callable[[random.Random], Exchange]]:
    """Kind of conversation -> what makes one of it; each kind goes through all of its topics."""
    english = [scenario for scenario in scenarios() if scenario.language == "en"]
    flat, nested, broken, told = (_deal(scenarios(), rng) for _ in range(4))
    formatted, listed, columns, rows = _deal(english, rng), *(_deal(collections(), rng) for _ in range(3))
    domains = _deal(list(load("labels").values()), rng)

    def posed(make: Callable[[random.Random], Task]) -> Callable[[random.Random], Exchange]:
        return lambda rng: pose(make(rng), rng)

    return {
        "flat": posed(lambda rng: flat_task(next(flat), rng)),
        "nested": posed(lambda rng: nested_task(next(nested), rng)),
        "list": posed(lambda rng: list_task(next(listed), rng)),
        "classification": posed(lambda rng: classification_task(next(domains), rng)),
        "call": posed(call_task),
        "table": posed(lambda rng: table_task(next(columns), rng)),
        "repair": posed(lambda rng: repair_task(next(broken), rng)),
        "arithmetic": posed(arithmetic_task),
        "format": posed(
            lambda rng: format_task(next(formatted), rng) if rng.random() < 0.65 else list_format_task(next(rows), rng)
        ),
        "plain": lambda rng: (
            plain_exchange(next(told), rng) if rng.random() < 0.75 else plain_list_exchange(next(rows), rng)
        ),
    }
