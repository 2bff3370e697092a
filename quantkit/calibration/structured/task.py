"""Tasks, and the conversations that pose them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.calibration.sources import Conversation
from quantkit.calibration.structured.values import Drawn
from quantkit.calibration.structured.vocabulary import load

ONE_LINE = ("> ", '"{', "{head", "«", "„")  # beginnings of framings that suit a single line only
EXAMPLE_SHARE = 0.22  # of the conversations show the task on another text first


@dataclass(frozen=True, slots=True)
class Sample:
    """One case of a task.

    Attributes:
        text: what is to be read.
        answer: what is right.
        value: of the answer, if it is JSON.
        stated: key -> value, of all that a text of a scenario states.
    """

    text: str
    answer: str
    value: Any = None
    stated: Mapping[str, Drawn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, of any text of one kind.

    Attributes:
        kind: extraction, nested, list, ...
        instruction: the request without the text.
        head: what the text may be headed with.
        sample: draws a case.
        language: of the request.
        keys: of the object or objects that the answer consists of, if the request names them.
    """

    kind: str
    instruction: str
    head: str
    sample: Callable[[random.Random], Sample]
    language: str = "en"
    keys: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation, and what it is made of.

    Attributes:
        task: that it poses.
        sample: which the last turns are about.
        conversation: all turns; the last is the right answer.
    """

    task: Task
    sample: Sample
    conversation: Conversation = field(default_factory=list)


def wordings(language: str) -> Mapping[str, Any]:
    """The wordings of requests in a language."""
    found: Mapping[str, Any] = load("requests")[language]
    return found


def pose(task: Task, rng: random.Random) -> Exchange:
    """A conversation: with or without a system message, one time in five behind another case with its answer.

    A question in plain language is asked once, and never by a system message.
    """
    words, plain = wordings(task.language), task.kind == "plain"
    turns: Conversation = []
    in_system = not plain and rng.random() < 0.3
    if in_system:
        turns.append(_turn("system", task.instruction))
    elif rng.random() < 0.4:
        turns.append(_turn("system", rng.choice(words["plain_systems" if plain else "systems"])))
    text_first = rng.random() < 0.3

    def request(sample: Sample) -> str:
        framed = frame(sample.text, task.head, words, rng)
        if in_system:
            return framed
        return "\n\n".join((framed, task.instruction) if text_first else (task.instruction, framed))

    sample = task.sample(rng)
    if not plain and rng.random() < EXAMPLE_SHARE:
        turns += [_turn("user", request(sample)), _turn("assistant", sample.answer)]
        sample = task.sample(rng)
        again = request(sample) if in_system else rng.choice(words["next"]).format(text=sample.text)
        turns.append(_turn("user", again))
    else:
        turns.append(_turn("user", request(sample)))
    return Exchange(task, sample, [*turns, _turn("assistant", sample.answer)])


def follow_up(exchange: Exchange, task: Task, sample: Sample) -> Exchange:
    """The conversation with one more question about its text."""
    more = [_turn("user", task.instruction), _turn("assistant", sample.answer)]
    return Exchange(task, sample, [*exchange.conversation, *more])


def frame(text: str, head: str, words: Mapping[str, Any], rng: random.Random) -> str:
    """The text as it stands in a request: bare, quoted, headed, fenced off."""
    unfit = (ONE_LINE if "\n" in text else ()) + (('"{',) if '"' in text else ())
    usable = [framing for framing in words["framing"] if not framing.startswith(unfit)]
    return str(rng.choice(usable)).format(text=text, head=head[:1].upper() + head[1:])


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
